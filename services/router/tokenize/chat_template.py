"""Chat templates rendered as Hugging Face's ``apply_chat_template`` does, in a sandbox, without its library.

Messages and variables come from a client, the template from a worker. What rendering may cost is therefore bounded:
the length of every text, the rounds of loops, the size of numbers, and the time, which is checked in each round.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.visitor
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.contracts.request_body import TextTooLong, joined

ROUNDS_MAX = 1 << 16
"""Maximum number of a rendering's rounds of loops and calls: a tenth of a second."""
NUMBER_MAX = 10_000_000
"""Greatest number in a template, and from its arithmetic: numbers may become lengths of text."""
SIZED = (str, list, tuple)
INDENT_MAX = 64
FILTERS_WITHOUT_BOUND = ("center", "filesizeformat", "format", "pprint", "urlize", "wordwrap", "xmlattr")
"""Filters whose results may be any times as long as their arguments. Templates of chats do without them."""
RANDOM = "random"
"""A filter that templates must not use: the engine would get another result than the router."""
METHODS_WITHOUT_BOUND = frozenset(("expandtabs", "format_map", "translate"))
WIDE_FORMAT = re.compile(r"\d{5}|\*")
POWER_MAX = 64
"""Greatest base, and greatest exponent."""
ROUNDS_KEY = " rounds"
"""Name of the ``Rounds`` in a template's context; no template can spell it."""


class TemplateFailed(Exception):
    """The template rejected the messages or raised an error. The engine reports the error to the client."""


class GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's part for training. For serving, only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2 declares it as a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The block's body, unchanged."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """Bounds what a template can make (see above), and looks up a dictionary's key first, which is faster: the sandbox
    tries attributes first, and a plain dictionary has none except its methods.
    """

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, chars_max: int) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
            extensions=[GenerationBlock, "jinja2.ext.loopcontrols"],
        )
        self._chars_max = chars_max
        self.filters["tojson"] = _to_json
        for name in (*FILTERS_WITHOUT_BOUND, RANDOM):
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters |= {"replace": self._replaced, "join": self._join, "indent": _indented}
        self.filters |= {COUNTED: _counted, BOUNDED: self._bounded, SUM: self._sum}
        self.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}

    def concat(self, pieces: Iterable[str]) -> str:
        """How jinja2 joins the pieces of a template, a macro or a block."""
        return joined(pieces, self._chars_max)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        """Has loops counted and concatenations measured."""
        bounded: jinja2.nodes.Template = Bounding().visit(super()._parse(source, name, filename))
        return bounded

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, a method or a function."""
        rounds: Rounds = context.parent[ROUNDS_KEY]
        rounds.spend()
        text = getattr(obj, "__self__", None)
        if isinstance(text, str):
            name = obj.__name__
            if name == "replace":
                return self._replaced(text, *args)
            if name == "join":
                return self._join(args[0], text)
            if name in METHODS_WITHOUT_BOUND:
                raise TextTooLong(f"the template calls {name}")
        for number in (*args, *kwargs.values()):
            self._bounded(number)
        return self._bounded(super().call(context, obj, *args, **kwargs))

    def _replaced(self, text: str, old: str, new: str, count: int | None = None) -> str:
        text, old, new = str(text), str(old), str(new)
        if len(text) + text.count(old) * len(new) > self._chars_max:
            raise TextTooLong("the template replaces text by too much")
        return text.replace(old, new, -1 if count is None else count)

    def _join(self, values: Iterable[Any], between: str = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            values = map(jinja2.filters.make_attrgetter(self, attribute), values)
        pieces = (piece for value in values for piece in (between, str(value)))
        next(iter(pieces), None)
        return joined(pieces, self._chars_max)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``text.format``, as the sandbox has it called."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and WIDE_FORMAT.search(value.__self__):
            raise TextTooLong("the template pads text to a great length")
        return wrapped

    def call_binop(self, _context: Any, operator: str, left: Any, right: Any) -> Any:
        """``left operator right``, unless the result is too large."""
        if operator == "%" and isinstance(left, str) and WIDE_FORMAT.search(left):
            raise TextTooLong("the template pads text to a great length")
        if operator == "*":
            count = left if isinstance(left, int) else right
            size = len(right) if isinstance(right, SIZED) else len(left) if isinstance(left, SIZED) else 0
            if size and isinstance(count, int) and size * count > self._chars_max:
                raise TextTooLong("the template repeats text too often")
        if operator == "**" and max(abs(left), abs(right)) > POWER_MAX:
            raise TextTooLong("the template makes too large a number")
        return self._bounded(self.binop_table[operator](left, right))

    def _sum(self, first: Any, *others: Any) -> Any:
        """``first + other + ...``."""
        if type(first) is str and ONLY_TEXT.issuperset(map(type, others)):
            return self._bounded(first + "".join(others))
        for other in others:
            first = self._bounded(first + other)
        return first

    def _bounded(self, value: Any) -> Any:
        if isinstance(value, int | float):
            too_much = abs(value) > NUMBER_MAX
        else:
            too_much = isinstance(value, SIZED) and len(value) > self._chars_max
        if too_much:
            raise TextTooLong("the template makes too long a text or too large a number")
        return value

    def getattr(self, obj: Any, attribute: str) -> Any:
        """``obj.attribute``."""
        if type(obj) is dict and attribute not in METHODS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


METHODS = frozenset(dir(dict))
ONLY_TEXT = frozenset((str,))
COUNTED, BOUNDED, SUM = " counted", " bounded", " sum"
"""Filters that only ``Bounding`` can apply."""


def filtered(node: Any, name: str, *args: jinja2.nodes.Expr) -> jinja2.nodes.Filter:
    """``node | name(args)``."""
    return jinja2.nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


class Bounding(jinja2.visitor.NodeTransformer):
    """Changes a template's tree so that its loops are counted and its concatenations measured."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802
        """``{% for %}``."""
        self.generic_visit(node)
        node.iter = filtered(node.iter, COUNTED)
        return node

    def visit_Add(self, node: jinja2.nodes.Add) -> jinja2.nodes.Node:  # noqa: N802
        """``a + b + c``, which becomes one call: templates of chats add many short texts."""
        self.generic_visit(node)
        left: Any = node.left
        if isinstance(left, jinja2.nodes.Filter) and left.name == SUM:
            left.args.append(node.right)
            return left
        return filtered(left, SUM, node.right)

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802
        """``a ~ b``."""
        self.generic_visit(node)
        return filtered(node, BOUNDED)

    def visit_Const(self, node: jinja2.nodes.Const) -> jinja2.nodes.Node:  # noqa: N802
        """A number or a text."""
        if isinstance(node.value, int | float) and abs(node.value) > NUMBER_MAX:
            raise jinja2.TemplateSyntaxError(f"numbers go up to {NUMBER_MAX}", node.lineno)
        return node


class Rounds:
    """What is left of the work that a rendering may do: rounds of loops, and calls."""

    __slots__ = ("_left", "_stopped")

    def __init__(self, count: int, stopped: Callable[[], bool]) -> None:
        self._left = count
        self._stopped = stopped

    def spend(self) -> None:
        """One more. Raises TooManyRounds."""
        self._left -= 1
        if self._left < 0 or self._stopped():
            raise TooManyRounds


class TooManyRounds(Exception):
    """The rendering has been stopped."""


class Counted:
    """What a loop goes through."""

    __slots__ = ("_items", "_rounds")

    def __init__(self, items: Any, rounds: Rounds) -> None:
        self._items = items
        self._rounds = rounds

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        spend = self._rounds.spend
        for item in self._items:
            spend()
            yield item


@jinja2.pass_context
def _counted(context: jinja2.runtime.Context, items: Any) -> Counted:
    return Counted(items, context.parent[ROUNDS_KEY])


class ChatTemplate:
    """One compiled template. Raises TemplateFailed when it does not compile."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, chars_max: int) -> None:
        self._sandbox = Sandbox(chars_max)
        self._chars_max = chars_max
        try:
            self._template = self._sandbox.from_string(source)
        except Exception as error:
            # jinja2 compiles to Python's source, which Python may refuse: for nesting too deep, or an argument twice.
            raise TemplateFailed(str(error)) from error
        # Each rendering copies these, which takes longer from the chain of maps that jinja2 makes.
        self._template.globals = dict(self._template.globals)
        self._globals = {**self._template.globals, "tools": None, "documents": None}
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any],
        *,
        rounds_max: int = ROUNDS_MAX,
        stopped: Callable[[], bool] = lambda: False,
    ) -> str:
        """The prompt's text. ``stopped`` is asked in each round of a loop. Raises TemplateFailed, TooManyRounds."""
        given = {**self._globals, **variables, **self._special_tokens, "messages": messages}
        given[ROUNDS_KEY] = Rounds(rounds_max, stopped)
        try:
            context = self._template.new_context(given, shared=True)
            return joined(self._template.root_render_func(context), self._chars_max)
        except TooManyRounds:
            raise
        except Exception as error:  # A template is a program of the model's author: it may raise anything.
            raise TemplateFailed(str(error)) from error


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _indented(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    return jinja2.filters.do_indent(text, _narrow(width), first, blank)


def _narrow(width: Any) -> Any:
    if (len(width) if isinstance(width, str) else width or 0) > INDENT_MAX:
        raise TextTooLong(f"the template indents text by more than {INDENT_MAX}")
    return width


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=_narrow(indent), separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 -- the engine gives templates the local time, too
