"""From a request's text to its block hashes, with the engine's own tokenizer and chat template.

Nothing here validates or fails a request: for a prompt that cannot be rendered and tokenized exactly as the engine
does, the result is None, and the request is placed by load alone.
"""

from __future__ import annotations

import asyncio
import re
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

import msgspec
from tokenizers import Tokenizer

from services.router.placement.request_fields import CHAT, COMPLETIONS, Body, RequestFacts
from services.router.tokenize.block_hash import ALGORITHMS, extend_chain
from services.router.tokenize.chat_template import ChatTemplate, TemplateFailed
from services.router.tokenize.segments import PieceTooLong, Prompt, Segments, Walk
from shared.contracts.control import TokenizerAsset
from shared.contracts.workers import HashScheme

BYTES_PER_TOKEN_GUESSED = 4.0
TOKENIZE_S_MAX = 1.0
"""A prompt that the thread has not tokenized within this time, waiting included, is placed by load alone."""
HASHED_AT_ONCE = 4096
"""Token ids that are hashed between two checks whether any worker holds their blocks."""
TEXT = msgspec.json.Decoder(str)
TOKEN_IDS = msgspec.json.Decoder(list[int])
MESSAGES = msgspec.json.Decoder(list[dict[str, Any]])

TEXT_ITERATED = re.compile(r"for\s+\w+\s+in\s+\w+(\.content|\[\s*['\"]content['\"]\s*\])")
"""A template that iterates over a message's content expects a list of parts."""


NOT_EXACT = (msgspec.DecodeError, UnicodeError, TemplateFailed, PieceTooLong, ValueError, OverflowError, struct.error)
"""Errors of an invalid prompt; the engine reports them to the client."""
Held = Callable[[int], bool]
"""Whether any worker holds a block."""


class Text(NamedTuple):
    """A prompt as text."""

    text: str
    special: bool
    """With the tokenizer's special tokens."""


def guessed(facts: RequestFacts, body_bytes: int, bytes_per_token: float = BYTES_PER_TOKEN_GUESSED) -> Prompt:
    """An estimate for a prompt that was not tokenized."""
    body = facts.body
    given = len(memoryview(body.prompt)) + len(memoryview(body.messages)) if body is not None else 0
    return Prompt(int((given or body_bytes) / bytes_per_token) + 1, (), exact=False)


class PromptTokenizer:
    """From one model's request bodies to block hashes. Raises ValueError when the asset cannot be used."""

    def __init__(self, asset: TokenizerAsset, scheme: HashScheme, *, cache_bytes_max: int) -> None:
        if not asset.tokenizer_json:
            raise ValueError(asset.note or "the model has no tokenizer.json")
        if scheme.algorithm not in ALGORITHMS:
            raise ValueError(f"block hashes of {scheme.algorithm} cannot be followed")
        try:
            tokenizer = Tokenizer.from_str(asset.tokenizer_json.decode())
        except Exception as error:  # tokenizers raises plain Exception for all that it cannot read
            raise ValueError(f"tokenizer.json cannot be read: {error}") from error
        self._scheme = scheme
        self._adds_special_tokens = asset.adds_special_tokens
        self._template = _compiled(asset)
        self._as_parts = TEXT_ITERATED.search(asset.chat_template) is not None
        if getattr(tokenizer.model, "dropout", None):
            raise ValueError("the tokenizer uses dropout, so its tokens are random")
        self._segments = Segments(
            tokenizer, scheme, cache_bytes_max=cache_bytes_max, hint=self._example(asset.special_tokens)
        )

    @property
    def chars_per_token(self) -> float:
        """Mean of the text that was tokenized so far."""
        return self._segments.chars_per_token

    def whole_prompt(self, facts: RequestFacts) -> Prompt | None:
        """All of its hashes, however long that takes; None when they cannot be known exactly."""
        body = facts.body
        if body is None:
            return None
        try:
            given = self._given(facts.path, body)
            if not isinstance(given, Text):
                return None
            walk = self._segments.begin(given.text, special=given.special, salt=body.cache_salt or "")
            self._segments.advance(walk, lambda _block: True, sys.maxsize)
        except NOT_EXACT:
            return None
        return self._segments.prompt(walk, special=given.special)

    async def prompt(
        self,
        facts: RequestFacts,
        held: Held,
        *,
        threads: Executor,
        loop_chars_max: int,
        more: Sequence[int] = (),
    ) -> Prompt | None:
        """Its length, and its block hashes as far as ``held`` knows them; None when they cannot be known exactly.
        ``more``: tokens that follow it.
        """
        body = facts.body
        if body is None or body.truncate_prompt_tokens is not None or not isinstance(body.cache_salt, str | None):
            return None
        salt = body.cache_salt or ""
        try:
            given = self._given(facts.path, body)
            if given is None:
                return None
            if not isinstance(given, Text):
                given += more
                return Prompt(len(given), self._hashes(given, salt, held), exact=True)
        except NOT_EXACT:
            return None
        walk = self._segments.begin(given.text, special=given.special, salt=salt)
        try:
            if not self._segments.advance(walk, held, loop_chars_max):
                await self._go_on_in_thread(walk, held, threads)
        except (PieceTooLong, TimeoutError):
            return None
        return self._segments.prompt(walk, special=given.special, more=more)

    async def _go_on_in_thread(self, walk: Walk, held: Held, threads: Executor) -> None:
        """Raises TimeoutError; the thread then stops soon, too."""
        given_up = False

        def still_held(block: int) -> bool:
            return not given_up and held(block)

        try:
            async with asyncio.timeout(TOKENIZE_S_MAX):
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(threads, self._segments.advance, walk, still_held, sys.maxsize)
        finally:
            given_up = True

    def _example(self, special_tokens: Mapping[str, str]) -> str:
        """An example chat with the tokens between messages."""
        shown = " ".join(special_tokens.values())
        for system in ([{"role": "system", "content": "s"}], []):
            turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
            try:
                if self._template is not None:
                    shown += self._template.render(system + turns, {"add_generation_prompt": True})
            except TemplateFailed:
                continue
        return shown

    def _hashes(self, tokens: list[int], salt: str, held: Held) -> list[int]:
        at_once = HASHED_AT_ONCE - HASHED_AT_ONCE % self._scheme.block_size or self._scheme.block_size
        hashes: list[int] = []
        digest: bytes | None = None
        for begin in range(0, len(tokens), at_once):
            if hashes and not held(hashes[-1]):
                break
            more, digest = extend_chain(digest, tokens[begin : begin + at_once], self._scheme, salt=salt)
            hashes += more
        return hashes

    def _given(self, path: str, body: Body) -> Text | list[int] | None:
        if path == COMPLETIONS:
            raw = bytes(body.prompt).lstrip()
            if not raw.startswith(b'"'):
                return TOKEN_IDS.decode(raw)
            special = self._adds_special_tokens if body.add_special_tokens is None else body.add_special_tokens is True
            return Text(TEXT.decode(raw), special)
        if path != CHAT or self._template is None or not _renderable(body):
            return None
        messages = conversation(MESSAGES.decode(body.messages), as_parts=self._as_parts)
        if messages is None:
            return None
        return Text(self._template.render(messages, _template_variables(body)), body.add_special_tokens is True)


def _compiled(asset: TokenizerAsset) -> ChatTemplate | None:
    """None when there is no template, or none that compiles: then only chats are placed by load alone."""
    try:
        return ChatTemplate(asset.chat_template, asset.special_tokens) if asset.chat_template else None
    except TemplateFailed:
        return None


def conversation(messages: list[dict[str, Any]], *, as_parts: bool) -> list[dict[str, Any]] | None:
    """Messages as vLLM passes them to the template; None for content that only the engine understands."""
    made: list[dict[str, Any]] = []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        texts = _texts(content)
        if not isinstance(role, str) or role in ("developer", "tool") or texts is None:
            return None
        if message.get("tool_calls") or message.get("reasoning") is not None:
            return None
        parts = [{"type": "text", "text": text} for text in texts]
        one: dict[str, Any] = {"role": role, "content": parts if as_parts else "\n".join(texts)}
        if isinstance(message.get("name"), str):
            one["name"] = message["name"]
        made.append(one)
    return made


def _texts(content: object) -> list[str] | None:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        return None
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not isinstance(text, str):
            return None
        texts.append(text)
    return texts


def _renderable(body: Body) -> bool:
    """Whether the template sees nothing but plain messages."""
    simple = body.chat_template is None and body.continue_final_message in (None, False)
    kwargs = body.chat_template_kwargs
    return simple and not _given(body.tools) and not _given(body.documents) and (kwargs is None or type(kwargs) is dict)


def _template_variables(body: Body) -> dict[str, Any]:
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    effort = body.reasoning_effort
    if effort is not None:
        variables.setdefault("enable_thinking", effort != "none")
        variables["reasoning_effort"] = effort
    variables["add_generation_prompt"] = body.add_generation_prompt is not False
    return variables


def _given(raw: msgspec.Raw) -> bool:
    return bytes(memoryview(raw)[:5]) not in (b"", b"null")
