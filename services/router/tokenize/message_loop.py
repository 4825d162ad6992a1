"""Finds out whether a chat's text begins with the text of its first messages, whatever messages follow them.

Then the next turn of a conversation need not be rendered from its beginning: the template's loop over the messages is
entered where it would go on. A template is a program, so this is found out for each rendering. What a round of the loop
writes depends on its message and number, on what was set before the loop, and on what it reads of other messages. So:

* What was written and set before the loop must be what it was when the known messages were rendered. A variable that
  rounds only compare with their numbers, such as that of the last question, may differ if all results are the same.
* If a round reads what further messages may change, or sets something for later rounds, nothing lasting is known.

Beside its variables a template reads only the time: before the loop, or as what further messages may change.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.utils
import jinja2.visitor

PROGRESS_KEY: Final = " progress"
"""Of a rendering's ``Progress`` in its context; no template can spell it, nor the filters' names."""
ENTERED: Final = " entered"
"""Filter of what a followed loop goes through."""
FROM_START, IS_FIRST, COMPARED = " from start", " is first", " compared"
"""Filters of a round's number, of ``loop.first``, and of a number that is compared with a namespace's."""
LOOKED, NEEDS_ROUNDS = " looked", " needs rounds"
"""Filters that change nothing: of what is read of messages ahead or set for later rounds, and read of earlier ones."""

STATEFUL: Final = frozenset(("cycler", "joiner"))
"""Functions whose results depend on earlier calls."""
LOOP: Final = "loop"
READ_AHEAD: Final = frozenset(("last", "length", "nextitem", "revindex", "revindex0"))
NUMBERS: Final = frozenset(("index", "index0"))
COMPARISONS: Final[dict[str, Callable[[int, int], bool]]] = {
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
}
FROZEN_MAX: Final = 64
"""Elements of a list or a dictionary that is compared."""

Variable = tuple[str, str]
"""A namespace's name, and that of its attribute."""
Comparison = tuple[Variable, str, bool]
"""With a variable, how, and with which result."""
Loops = Sequence[frozenset[Variable]]
"""Of a template's loops that can be followed, the variables that may differ."""


class NeedsWhole(Exception):
    """The template needs messages that this rendering leaves out."""


class Dependencies(NamedTuple):
    """What the text of the known messages depended on, beside them."""

    before: str
    """The text before them."""
    variables: Mapping[str, Any]
    """Set before the loop; frozen, without those that may differ."""
    comparisons: Mapping[Comparison, tuple[int, int]]
    """The least and the greatest number of a round that was compared so. All between them give the same result."""


class Missing:
    """Stands for a message that a rendering leaves out. It can be passed over, not read."""

    __slots__ = ()

    def __getattr__(self, _name: str) -> NoReturn:
        raise NeedsWhole

    def _read(self, *_args: object) -> NoReturn:
        raise NeedsWhole

    __getitem__ = __bool__ = __iter__ = __len__ = __contains__ = __eq__ = __repr__ = _read
    __hash__ = None  # type: ignore[assignment]


MISSING: Final = Missing()


class Progress:
    """Of one rendering. ``left_out``: so many messages, with these dependencies, are not rendered."""

    __slots__ = (
        "_known",
        "_left_out",
        "_looked",
        "_loops",
        "_may_differ",
        "begun_at",
        "chars",
        "comparisons",
        "ended_at",
        "skipped",
        "variables",
    )

    def __init__(self, loops: Loops, left_out: int = 0, dependencies: Dependencies | None = None) -> None:
        self._loops = loops
        self._may_differ: frozenset[Variable] = frozenset()
        self._left_out = left_out
        self._known = dependencies
        self._looked = False
        """A round has read what further messages may change, or set something for later rounds."""
        self.skipped = 0
        """Rounds that are left out: fewer than messages, if the loop never begins with the first one."""
        self.chars = 0
        """Of text, so far."""
        self.begun_at: int | None = None
        """Characters before the followed loop; None: it was not reached."""
        self.ended_at: int | None = None
        """Characters when that had gone through all messages. None: it has not, or further messages may change them."""
        self.variables: dict[str, Any] = {}
        self.comparisons: dict[Comparison, tuple[int, int]] = {}

    def note(self, pieces: Iterator[str]) -> Iterator[str]:
        """The pieces of the text, as they are rendered."""
        for piece in pieces:
            self.chars += len(piece)
            yield piece

    def look(self) -> None:
        """Something is read that further messages may change, or set for later."""
        self._looked = True

    def compare(self, number: int, how: str, variable: Variable, value: Any) -> bool:
        """A round's number with the variable, which has this value."""
        result = COMPARISONS[how](number, value)
        if type(value) is not int:
            self._looked = True
        comparison = variable, how, result
        least, greatest = self.comparisons.get(comparison, (number, number))
        self.comparisons[comparison] = min(least, number), max(greatest, number)
        return result

    def enter(self, loop: int, first: int, variables: Mapping[str, Any]) -> int:
        """A followed loop begins with this message. Returns how many rounds to leave out. Raises NeedsWhole."""
        if self.begun_at is not None:  # It is the second one.
            if self._left_out:
                raise NeedsWhole
            self._looked = True
            self.ended_at = None
            return 0
        self.begun_at = self.chars
        self._looked = False
        self._may_differ = self._loops[loop]
        self.comparisons = dict(self._known.comparisons) if self._known is not None else {}
        self.variables = {name: self._frozen(name, value) for name, value in variables.items()}
        if self._known is not None and not self._is_as_before(self._known, variables):
            raise NeedsWhole
        self.skipped = max(0, self._left_out - first)
        return self.skipped

    def leave(self) -> None:
        """It has gone through all messages."""
        if not self._looked:
            self.ended_at = self.chars

    def _frozen(self, name: str, value: Any) -> Any:
        if not isinstance(value, jinja2.utils.Namespace):
            return frozen(value)
        kept = {key: one for key, one in attributes(value).items() if (name, key) not in self._may_differ}
        return jinja2.utils.Namespace, frozen(kept)

    def _is_as_before(self, dependencies: Dependencies, variables: Mapping[str, Any]) -> bool:
        if self.variables != dependencies.variables:
            return False
        for (variable, how, result), numbers in dependencies.comparisons.items():
            if variable in self._may_differ:
                name, key = variable
                namespace = variables.get(name)
                value = attributes(namespace).get(key) if isinstance(namespace, jinja2.utils.Namespace) else None
                if type(value) is not int or any(COMPARISONS[how](number, value) is not result for number in numbers):
                    return False
        return True


class Messages(Sequence[Any]):
    """The messages as a template sees them. ``first``: of the conversation's, this view begins there. Unlike a list it
    cannot be written into the text or compared: that raises NeedsWhole.
    """

    __slots__ = ("_first", "_items", "_progress")

    def __init__(self, items: list[Any], progress: Progress, first: int = 0) -> None:
        self._items = items
        self._progress = progress
        self._first = first

    def __bool__(self) -> bool:
        if self._first >= len(self._items):
            self._progress.look()
            return False
        return True

    def __len__(self) -> int:
        self._progress.look()
        return max(0, len(self._items) - self._first)

    def __iter__(self) -> Iterator[Any]:
        self._progress.look()
        return iter(self._items[self._first :])

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return self._slice(at)
        index = operator.index(at)
        if 0 <= index < len(self._items) - self._first:
            return self._items[self._first + index]
        self._progress.look()
        return self._items[self._first :][index]

    def _slice(self, at: slice) -> Any:
        begin = 0 if at.start is None else operator.index(at.start)
        if begin < 0 or at.stop is not None or at.step is not None:
            self._progress.look()
            return self._items[self._first :][at]
        return Messages(self._items, self._progress, self._first + begin)

    def __eq__(self, _other: object) -> NoReturn:
        raise NeedsWhole

    def __repr__(self) -> NoReturn:
        raise NeedsWhole

    __hash__ = None  # type: ignore[assignment]

    def _turns(self, loop: int, variables: Mapping[str, Any]) -> Turns:
        begin = self._first + self._progress.enter(loop, self._first, variables)
        return Turns(self._items[begin:], self._progress)

    def _frozen(self) -> tuple[type, int]:
        return Messages, self._first


class Turns:
    """What a followed loop goes through: the messages that are not left out."""

    __slots__ = ("_items", "_progress")

    def __init__(self, items: list[Any], progress: Progress) -> None:
        self._items = items
        self._progress = progress

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        yield from self._items
        self._progress.leave()


def frozen(value: Any) -> Any:
    """Equal to another one only if templates cannot tell the two values apart. Raises NeedsWhole."""
    if value is None or isinstance(value, str | int | float):
        return type(value), value
    if isinstance(value, Missing):
        raise NeedsWhole
    if isinstance(value, Messages):
        return value._frozen()
    if isinstance(value, jinja2.runtime.Macro):
        return value._func.__code__
    if isinstance(value, jinja2.runtime.Undefined):
        return type(value)
    if isinstance(value, list | tuple) and len(value) <= FROZEN_MAX:
        return type(value), [frozen(one) for one in value]
    if isinstance(value, dict) and len(value) <= FROZEN_MAX:
        return type(value), [(frozen(key), frozen(one)) for key, one in value.items()]
    return object()


def attributes(namespace: jinja2.utils.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = object.__getattribute__(namespace, "_Namespace__attrs")
    return found


def follow_loops(tree: jinja2.nodes.Template) -> Loops:
    """Change the loops that can be followed so that they tell the rendering's ``Progress``."""
    if any(name.name in STATEFUL for name in tree.find_all(jinja2.nodes.Name)):
        return ()
    if any(_sets_attribute(block.target) for block in tree.find_all(jinja2.nodes.AssignBlock)):
        return ()
    for assignment in tree.find_all(jinja2.nodes.Assign):
        if _sets_attribute(assignment.target):
            assignment.node = filtered(assignment.node, LOOKED)
    loops = [loop for loop in _outer_loops(tree.body) if _can_be_followed(loop)]
    return [_followed(loop, number, list(tree.find_all(jinja2.nodes.Macro))) for number, loop in enumerate(loops)]


def _followed(loop: jinja2.nodes.For, number: int, macros: list[jinja2.nodes.Macro]) -> frozenset[Variable]:
    """Returns the variables that may differ: those that rounds compare with their numbers, if nothing else in them or
    in a macro reads their namespaces.
    """
    rounds = Rounds({name.name for name in loop.find_all(jinja2.nodes.Name) if name.ctx == "store"})
    loop.iter = filtered(loop.iter, ENTERED, jinja2.nodes.Const(number, lineno=loop.lineno))
    loop.body = [rounds.visit(node) for node in loop.body]
    compared = [name for name, _key in rounds.compared]
    reads = [name.name for node in (loop, *macros) for name in node.find_all(jinja2.nodes.Name)]
    return frozenset(one for one in rounds.compared if reads.count(one[0]) == compared.count(one[0]))


def filtered(node: Any, name: str, *args: jinja2.nodes.Expr) -> jinja2.nodes.Filter:
    """``node | name(args)``."""
    return jinja2.nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _sets_attribute(target: jinja2.nodes.Node) -> bool:
    return isinstance(target, jinja2.nodes.NSRef) or any(target.find_all(jinja2.nodes.NSRef))


def _outer_loops(nodes: list[jinja2.nodes.Node]) -> Iterator[jinja2.nodes.For]:
    """Those whose text goes right into the prompt's."""
    for node in nodes:
        if isinstance(node, jinja2.nodes.For):
            yield node
        elif isinstance(node, jinja2.nodes.If):
            yield from _outer_loops([*node.body, *node.elif_, *node.else_])


def _can_be_followed(loop: jinja2.nodes.For) -> bool:
    if loop.recursive or loop.test is not None:
        return False
    if any(any(node.find_all((jinja2.nodes.CallBlock, jinja2.nodes.Macro))) for node in [loop, *loop.body]):
        return False
    own = [node for one in loop.body for node in _own_nodes(one)]
    uses = sum(isinstance(node, jinja2.nodes.Name) and node.name == LOOP for node in own)
    return uses == sum(bool(_attribute(node)) for node in own)


def _own_nodes(node: jinja2.nodes.Node) -> Iterator[jinja2.nodes.Node]:
    """The node and those below it, without the bodies of loops, which have a ``loop`` of their own."""
    yield node
    is_loop = isinstance(node, jinja2.nodes.For)
    for child in node.iter_child_nodes(exclude=("body", "test") if is_loop else None):
        yield from _own_nodes(child)


def _attribute(node: jinja2.nodes.Node) -> str:
    """Which attribute of ``loop`` it reads; empty: none."""
    if not isinstance(node, jinja2.nodes.Getattr) or not isinstance(node.node, jinja2.nodes.Name):
        return ""
    return node.attr if node.node.name == LOOP else ""


class Rounds(jinja2.visitor.NodeTransformer):
    """Changes the body of a loop so that its ``loop`` counts the rounds that are left out, and tells what is read of
    others. ``local``: names that it sets itself.
    """

    def __init__(self, local: set[str]) -> None:
        self._local = local
        self.compared: list[Variable] = []
        """With rounds' numbers."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802
        """``{% for %}``: its body has a ``loop`` of its own."""
        node.iter = self.visit(node.iter)
        node.else_ = [self.visit(one) for one in node.else_]
        return node

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Node:  # noqa: N802
        """``loop.index0 > ns.last``."""
        operand, number = node.ops[0], node.expr
        other = operand.expr
        self.generic_visit(node)
        if len(node.ops) > 1 or operand.op not in COMPARISONS or _attribute(number) not in NUMBERS:
            return node
        if not isinstance(other, jinja2.nodes.Getattr) or not isinstance(other.node, jinja2.nodes.Name):
            return node
        variable = other.node.name, other.attr
        if variable[0] in self._local or variable[0] == LOOP:
            return node
        self.compared.append(variable)
        said = [jinja2.nodes.Const(text, lineno=node.lineno) for text in (operand.op, *variable)]
        return filtered(node.expr, COMPARED, *said, other)

    def visit_Getattr(self, node: jinja2.nodes.Getattr) -> jinja2.nodes.Node:  # noqa: N802
        """``loop.index0``."""
        name = _attribute(node)
        if not name:
            return self.generic_visit(node)
        if name == "first":
            return filtered(node, IS_FIRST)
        if name in NUMBERS:
            return filtered(node, FROM_START)
        node.node = filtered(node.node, LOOKED if name in READ_AHEAD else NEEDS_ROUNDS)
        return filtered(node, FROM_START) if name == "length" else node


def _progress(context: jinja2.runtime.Context) -> Progress:
    progress: Progress = context.parent[PROGRESS_KEY]
    return progress


@jinja2.pass_context
def _entered(context: jinja2.runtime.Context, items: Any, loop: int) -> Any:
    return items._turns(loop, context.vars) if type(items) is Messages else items


@jinja2.pass_context
def _from_start(context: jinja2.runtime.Context, number: int) -> int:
    return number + _progress(context).skipped


@jinja2.pass_context
def _is_first(context: jinja2.runtime.Context, is_first: bool) -> bool:
    return is_first and not _progress(context).skipped


@jinja2.pass_context
def _compared(context: jinja2.runtime.Context, number: int, how: str, name: str, attribute: str, value: Any) -> bool:
    return _progress(context).compare(number, how, (name, attribute), value)


@jinja2.pass_context
def _looked(context: jinja2.runtime.Context, value: Any) -> Any:
    _progress(context).look()
    return value


@jinja2.pass_context
def _needs_rounds(context: jinja2.runtime.Context, loop: Any) -> Any:
    progress = _progress(context)
    progress.look()
    if progress.skipped:
        raise NeedsWhole
    return loop


FILTERS: Final[dict[str, Callable[..., Any]]] = {
    ENTERED: _entered,
    FROM_START: _from_start,
    IS_FIRST: _is_first,
    COMPARED: _compared,
    LOOKED: _looked,
    NEEDS_ROUNDS: _needs_rounds,
}
