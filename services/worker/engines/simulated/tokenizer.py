"""The tokenizer of a simulated engine. It reads a Hugging Face ``tokenizer.json`` without the transformers library."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from services.worker.engines.port import TokenizerFiles
from services.worker.engines.simulated.core.engine_core import ModelTokens
from shared.contracts.request_body import joined

SAYABLE_MIN = 64
"""If the vocabulary has fewer whole words, the model generates any token that decodes to text by itself."""
CHARS_MAX = 16 * 1024 * 1024
"""Of a rendered chat."""
PARTS_WALKED = re.compile(r"for\s+\w+\s+in\s+\w+(\.content|\[\s*['\"]content['\"]\s*\])")
"""Matches templates that iterate over a message's content. They get it as a list of parts; other templates get one
string, as vLLM gives it to them.
"""


class ChatTemplateFailed(Exception):
    """The model's chat template cannot render these messages; the message says why."""


class SimulatedTokenizer:
    """Reads ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` of a model directory.

    A simulated model generates tokens that are a space and a word. Their text does not depend on their neighbours, and
    a completion that a client sends back is tokenised into the same tokens, as is mostly so with real models.
    """

    def __init__(self, directory: Path) -> None:
        self._json = (directory / "tokenizer.json").read_bytes()
        self._tokenizer = Tokenizer.from_str(self._json.decode())
        self._tokenizer.no_truncation()
        config = _read_json(directory / "tokenizer_config.json")
        self._special = _special_tokens(config)
        self._template_source = _template_source(directory, config)
        self._template = _environment().from_string(self._template_source) if self._template_source else None
        self._as_parts = PARTS_WALKED.search(self._template_source) is not None
        words = self._words()
        self.texts: dict[int, str] = words
        """Text of each token that the model may generate."""
        eos = self._special.get("eos_token")
        self.model = ModelTokens(
            size=self._tokenizer.get_vocab_size(),
            sayable=sorted(words),
            eos=None if eos is None else self._tokenizer.token_to_id(eos),
        )

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids; ``special``: add the special tokens that the tokenizer puts around a prompt."""
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of the tokens, without special ones."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def render_chat(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """The prompt for a chat. Raises ChatTemplateFailed."""
        if self._template is None:
            raise ChatTemplateFailed("The model has no chat template.")
        given = messages if self._as_parts else list(map(_content_as_text, messages))
        try:
            return self._template.render(messages=given, **self._special, **variables)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise ChatTemplateFailed(f"The chat template failed: {error}") from error

    def files(self) -> TokenizerFiles:
        """Files from which a router makes the same tokens."""
        return TokenizerFiles(
            tokenizer_json=self._json,
            chat_template=self._template_source,
            special_tokens=self._special,
            adds_special_tokens=True,
        )

    def _words(self) -> dict[int, str]:
        special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        texts = dict(self._texts(i for i in range(self._tokenizer.get_vocab_size()) if i not in special))
        words = {i: text for i, text in texts.items() if text[0] == " " and text[1:].isalpha()}
        encoded = self._tokenizer.encode_batch_fast(list(words.values()), add_special_tokens=False)
        stable = {i: text for (i, text), again in zip(words.items(), encoded, strict=True) if again.ids == [i]}
        return stable if len(stable) >= SAYABLE_MIN else texts

    def _texts(self, ids: Iterable[int]) -> Iterable[tuple[int, str]]:
        """Ids with the text that they add after another token. Leaves out tokens that are a part of a character."""
        anchor = self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        before = self._tokenizer.decode(anchor)
        for i in ids:
            text = self._tokenizer.decode([*anchor, i])[len(before) :]
            if text and "\ufffd" not in text:
                yield i, text


def _content_as_text(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [part.get("text") if isinstance(part, dict) else part for part in content]
    return message | {"content": "\n".join(text for text in texts if isinstance(text, str))}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Names such as ``bos_token``, whose values are strings or, in older files, objects."""
    special = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            special[name] = content
    return special


def _template_source(directory: Path, config: dict[str, Any]) -> str:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template") or ""
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return str(named.get("default", ""))
    return str(template)


class _Sandbox(ImmutableSandboxedEnvironment):
    def concat(self, pieces: Iterable[str]) -> str:
        """How jinja2 joins the pieces of a template."""
        return joined(pieces, CHARS_MAX)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment as transformers configures it, since templates are written for that."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
