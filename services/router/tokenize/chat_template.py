"""Chat templates rendered as Hugging Face's ``apply_chat_template`` does, in a sandbox, without its library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


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
    """Looks up a dictionary's key first, which is faster: the sandbox tries attributes first, and a plain dictionary
    has none except its methods.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        """``obj.attribute``."""
        if type(obj) is dict and attribute in obj and attribute not in METHODS:
            return obj[attribute]
        return super().getattr(obj, attribute)


METHODS = frozenset(dir(dict))


class ChatTemplate:
    """One compiled template. Raises TemplateFailed when it does not compile."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
            extensions=[GenerationBlock, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateFailed(str(error)) from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        """The prompt's text. Raises TemplateFailed."""
        try:
            return self._template.render(
                {"tools": None, "documents": None, **self._special_tokens, **variables, "messages": messages}
            )
        except Exception as error:  # A template is a program of the model's author: it may raise anything.
            raise TemplateFailed(str(error)) from error


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 -- the engine gives templates the local time, too
