"""Finds out whether a chat's text begins with the text of its first messages, whatever messages follow them.

Then the next turn of a conversation need not be rendered from its beginning. A template is a program, so this is found
out for each rendering: ``Messages`` notes what the template reads before its loop over the messages has ended. If that
was nothing but the messages so far, in order, every longer conversation makes the template do the same until then: a
template has no other input than its variables and the time, whose readings are compared. For messages that follow, the
loop is entered where it would go on. It has no state of its own: loops that assign to namespaces, for example, are not
followed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.runtime
import jinja2.visitor

PROGRESS_KEY: Final = " progress"
"""Of a rendering's ``Progress`` in its context; no template can spell it, nor the filters' names."""
ENTERED, FROM_START, IS_FIRST, AHEAD = " entered", " from start", " is first", " ahead"
"""Filters: of what a followed loop goes through, of its rounds' numbers, of ``loop.first``, and of the ``loop`` where
what lies ahead is read.
"""
STATEFUL: Final = frozenset(("cycler", "joiner"))
"""Functions whose results depend on earlier calls."""
LOOP: Final = "loop"
READ_AHEAD: Final = frozenset(("last", "length", "nextitem", "revindex", "revindex0"))
COUNT_ROUNDS: Final = frozenset(("index", "index0", "length"))
FOLLOWED: Final = READ_AHEAD | COUNT_ROUNDS | {"first"}
"""Attributes of ``loop``; the others remember earlier rounds."""
NOT_FOLLOWED: Final = (jinja2.nodes.CallBlock, jinja2.nodes.Macro, jinja2.nodes.NSRef)
"""In a loop."""


class NeedsWhole(Exception):
    """The template needs messages that this rendering leaves out."""


class Progress:
    """Of one rendering. ``left_out``: so many messages, whose text is known, are not rendered."""

    __slots__ = ("_left_out", "_looked", "begun_at", "chars", "ended_at", "skipped", "times")

    def __init__(self, left_out: int = 0) -> None:
        self._left_out = left_out
        self._looked = False
        """Something was read that further messages may change."""
        self.skipped = 0
        """Rounds of the followed loop that are left out: fewer than messages, if it never begins with the first one."""
        self.chars = 0
        """Of text, so far."""
        self.begun_at: int | None = None
        """Characters before the followed loop; None: it was not reached."""
        self.ended_at: int | None = None
        """Characters when that had gone through all messages. None: it has not, or further messages may change them."""
        self.times: list[str] = []
        """Readings of the time before the loop."""

    def look(self) -> None:
        """Something is read that further messages may change."""
        self._looked = True

    def note(self, pieces: Iterator[str]) -> Iterator[str]:
        """The pieces of the text, as they are rendered."""
        for piece in pieces:
            self.chars += len(piece)
            yield piece

    def read_time(self, reading: str) -> str:
        """The template has read the time."""
        if self.begun_at is None:
            self.times.append(reading)
        else:
            self._looked = True
        return reading

    def enter(self, first: int) -> int:
        """A followed loop begins with this message. Returns how many rounds to leave out."""
        if self.begun_at is not None:
            self._looked = True
            self.ended_at = None
        else:
            self.begun_at = self.chars
            self.skipped = max(0, self._left_out - first)
        return self.skipped

    def leave(self) -> None:
        """It has gone through all messages."""
        if not self._looked:
            self.ended_at = self.chars


class Messages(Sequence[Any]):
    """The messages as a template sees them. ``first``: of the conversation's, this view begins there. Unlike a list it
    cannot be written into the text or compared as a whole: those raise NeedsWhole.
    """

    __slots__ = ("_first", "_items", "_progress")

    def __init__(self, items: list[dict[str, Any] | None], progress: Progress, first: int = 0) -> None:
        self._items = items
        """None: left out."""
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
        return map(_known, self._items[self._first :])

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return self._slice(at)
        index = operator.index(at)
        if not 0 <= index < len(self._items) - self._first:
            self._progress.look()
            return _known(self._items[self._first :][index])
        return _known(self._items[self._first + index])

    def _slice(self, at: slice) -> Any:
        begin = 0 if at.start is None else operator.index(at.start)
        if begin < 0 or at.stop is not None or at.step is not None:
            self._progress.look()
            return [_known(item) for item in self._items[self._first :][at]]
        return Messages(self._items, self._progress, self._first + begin)

    def _turns(self) -> Turns:
        return Turns(self._items, self._progress, self._first)

    def __eq__(self, _other: object) -> NoReturn:
        raise NeedsWhole

    def __repr__(self) -> NoReturn:
        raise NeedsWhole

    __hash__ = None  # type: ignore[assignment]


class Turns:
    """What a followed loop goes through: the messages that are not left out."""

    __slots__ = ("_items", "_progress")

    def __init__(self, items: list[dict[str, Any] | None], progress: Progress, first: int) -> None:
        self._items = items[first + progress.enter(first) :]
        self._progress = progress

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        yield from map(_known, self._items)
        self._progress.leave()


def _known(item: dict[str, Any] | None) -> dict[str, Any]:
    if item is None:
        raise NeedsWhole
    return item


def follow_loops(tree: jinja2.nodes.Template) -> bool:
    """Change the loops that can be followed so that they tell the rendering's ``Progress``. Returns whether there are
    any.
    """
    if any(name.name in STATEFUL for name in tree.find_all(jinja2.nodes.Name)):
        return False
    if any(any(macro.find_all(jinja2.nodes.NSRef)) for macro in tree.find_all(jinja2.nodes.Macro)):
        return False
    loops = [loop for loop in _outer_loops(tree.body) if _can_be_followed(loop)]
    for loop in loops:
        loop.iter = filtered(loop.iter, ENTERED)
        loop.body = [Rounds().visit(node) for node in loop.body]
    return bool(loops)


def filtered(node: Any, name: str, *args: jinja2.nodes.Expr) -> jinja2.nodes.Filter:
    """``node | name(args)``."""
    return jinja2.nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


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
    if any(isinstance(node, NOT_FOLLOWED) or any(node.find_all(NOT_FOLLOWED)) for node in loop.body):
        return False
    own = [node for one in loop.body for node in _own_nodes(one)]
    uses = sum(isinstance(node, jinja2.nodes.Name) and node.name == LOOP for node in own)
    return uses == sum(_attribute(node) in FOLLOWED for node in own)


def _own_nodes(node: jinja2.nodes.Node) -> Iterator[jinja2.nodes.Node]:
    """The node and those below it, without the bodies of loops, which have a ``loop`` of their own."""
    yield node
    is_loop = isinstance(node, jinja2.nodes.For)
    for child in node.iter_child_nodes(exclude=("body", "test") if is_loop else None):
        yield from _own_nodes(child)


def _attribute(node: jinja2.nodes.Node) -> str:
    """Which one of ``loop`` it reads; empty: none."""
    if not isinstance(node, jinja2.nodes.Getattr) or not isinstance(node.node, jinja2.nodes.Name):
        return ""
    return node.attr if node.node.name == LOOP else ""


class Rounds(jinja2.visitor.NodeTransformer):
    """Changes the body of a loop so that its ``loop`` counts the rounds that are left out, and notes what it tells of
    those ahead.
    """

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802
        """``{% for %}``: its body has a ``loop`` of its own."""
        node.iter = self.visit(node.iter)
        node.else_ = [self.visit(one) for one in node.else_]
        return node

    def visit_Getattr(self, node: jinja2.nodes.Getattr) -> jinja2.nodes.Node:  # noqa: N802
        """``loop.index0``."""
        name = _attribute(node)
        if not name:
            return self.generic_visit(node)
        if name in READ_AHEAD:
            node.node = filtered(node.node, AHEAD)
        if name in COUNT_ROUNDS:
            return filtered(node, FROM_START)
        return filtered(node, IS_FIRST) if name == "first" else node


def _entered(items: Any) -> Any:
    return items._turns() if type(items) is Messages else items


@jinja2.pass_context
def _from_start(context: jinja2.runtime.Context, number: int) -> int:
    progress: Progress = context.parent[PROGRESS_KEY]
    return number + progress.skipped


@jinja2.pass_context
def _is_first(context: jinja2.runtime.Context, is_first: bool) -> bool:
    progress: Progress = context.parent[PROGRESS_KEY]
    return is_first and not progress.skipped


@jinja2.pass_context
def _ahead(context: jinja2.runtime.Context, loop: Any) -> Any:
    progress: Progress = context.parent[PROGRESS_KEY]
    progress.look()
    return loop


FILTERS: Final[dict[str, Callable[..., Any]]] = {
    ENTERED: _entered,
    FROM_START: _from_start,
    IS_FIRST: _is_first,
    AHEAD: _ahead,
}
