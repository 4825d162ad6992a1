"""From a request's text to its block hashes, with the engine's own tokenizer and chat template.

Nothing here decides whether a request is valid, and nothing here can fail a request: whatever cannot be rendered and
tokenized exactly as the engine would is answered with None, and the request is placed by load alone.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

import msgspec
from tokenizers import Tokenizer

from services.router.chat_template import ChatTemplate, TemplateFailed
from services.router.core.block_hash import ALGORITHMS, block_hashes
from services.router.core.request import CHAT, COMPLETIONS, Body, RequestFacts
from shared.contracts.control import TokenizerAsset
from shared.contracts.workers import HashScheme

BYTES_PER_TOKEN_GUESSED = 4
HASH_BYTES_COUNTED = 40
"""What a remembered block hash takes in memory, for the cache's bound."""
KEY_BYTES_COUNTED = 512
"""What a remembered prompt takes beside its own bytes and its hashes."""

TEXT = msgspec.json.Decoder(str)
TOKEN_IDS = msgspec.json.Decoder(list[int])
MESSAGES = msgspec.json.Decoder(list[dict[str, Any]])

TEXT_ITERATED = re.compile(r"for\s+\w+\s+in\s+\w+(\.content|\[\s*['\"]content['\"]\s*\])")
"""A template that walks over a message's content wants it as a list of parts."""


class Prompt(msgspec.Struct, frozen=True):
    """A prompt as placement needs it."""

    tokens: int
    hashes: Sequence[int]
    exact: bool
    """Whether ``tokens`` was counted, not guessed, and ``hashes`` are what the engine will compute."""


def guessed(facts: RequestFacts, body_bytes: int) -> Prompt:
    """A prompt that was not tokenized."""
    body = facts.body
    given = len(memoryview(body.prompt)) + len(memoryview(body.messages)) if body is not None else 0
    return Prompt((given or body_bytes) // BYTES_PER_TOKEN_GUESSED + 1, (), exact=False)


class PromptTokenizer:
    """One model's way from bodies to block hashes. Raises ValueError when the asset is of no use."""

    def __init__(self, asset: TokenizerAsset, scheme: HashScheme, *, cache_bytes_max: int) -> None:
        if not asset.tokenizer_json:
            raise ValueError(asset.note or "the model has no tokenizer.json")
        if scheme.algorithm not in ALGORITHMS:
            raise ValueError(f"block hashes of {scheme.algorithm} cannot be followed")
        try:
            self._tokenizer = Tokenizer.from_str(asset.tokenizer_json.decode())
        except Exception as error:  # tokenizers raises plain Exception for all that it cannot read
            raise ValueError(f"tokenizer.json cannot be read: {error}") from error
        self._scheme = scheme
        self._adds_special_tokens = asset.adds_special_tokens
        self._template = _compiled(asset)
        self._as_parts = TEXT_ITERATED.search(asset.chat_template) is not None
        self._remembered = RememberedPrompts(cache_bytes_max)

    async def prompt(self, facts: RequestFacts, *, threads: Executor, loop_bytes_max: int) -> Prompt | None:
        """The prompt's length and block hashes, or None when they cannot be known exactly."""
        body = facts.body
        if body is None or body.truncate_prompt_tokens is not None:
            return None
        key = _cache_key(facts.path, body)
        if key is not None and (known := self._remembered.get(key)) is not None:
            return known
        if len(memoryview(body.prompt)) + len(memoryview(body.messages)) <= loop_bytes_max:
            made = self._make(facts.path, body)
        else:
            made = await asyncio.get_running_loop().run_in_executor(threads, self._make, facts.path, body)
        if made is not None and key is not None:
            self._remembered.put(key, made)
        return made

    def _make(self, path: str, body: Body) -> Prompt | None:
        try:
            tokens = self._completion_tokens(body) if path == COMPLETIONS else self._chat_tokens(path, body)
        except (msgspec.DecodeError, UnicodeError, TemplateFailed):
            return None
        if tokens is None or any(not 0 <= token < 1 << 32 for token in tokens[:1]):
            return None
        salt = body.cache_salt if isinstance(body.cache_salt, str) else ""
        try:
            hashes = block_hashes(tokens, self._scheme, salt=salt)
        except (ValueError, OverflowError):
            return None  # Token ids that no vocabulary has: the engine will say so.
        return Prompt(len(tokens), hashes, exact=True)

    def _completion_tokens(self, body: Body) -> list[int] | None:
        raw = bytes(body.prompt).lstrip()
        if raw.startswith(b'"'):
            special = self._adds_special_tokens if body.add_special_tokens is None else body.add_special_tokens is True
            return self._encode(TEXT.decode(raw), special)
        return TOKEN_IDS.decode(raw)

    def _chat_tokens(self, path: str, body: Body) -> list[int] | None:
        if path != CHAT or self._template is None or not _renderable(body):
            return None
        messages = conversation(MESSAGES.decode(body.messages), as_parts=self._as_parts)
        if messages is None:
            return None
        text = self._template.render(messages, _template_variables(body))
        return self._encode(text, body.add_special_tokens is True)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids


def _compiled(asset: TokenizerAsset) -> ChatTemplate | None:
    """None when there is no template, or none that compiles: then only chats are placed by load alone."""
    try:
        return ChatTemplate(asset.chat_template, asset.special_tokens) if asset.chat_template else None
    except TemplateFailed:
        return None


def conversation(messages: list[dict[str, Any]], *, as_parts: bool) -> list[dict[str, Any]] | None:
    """Messages as vLLM hands them to the template, or None for content that only the engine understands."""
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


def _cache_key(path: str, body: Body) -> tuple[object, ...] | None:
    """What the hashes depend on; None when that is more than can be compared cheaply."""
    if body.chat_template_kwargs is not None or not isinstance(body.cache_salt, str | None):
        return None
    if not isinstance(body.reasoning_effort, str | None):
        return None
    options = (
        body.cache_salt,
        body.reasoning_effort,
        body.add_special_tokens is True,
        body.add_generation_prompt is False,
    )
    return (path, bytes(body.prompt), bytes(body.messages), *options)


class RememberedPrompts:
    """The newest prompts and their block hashes, bounded in bytes."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._prompts: OrderedDict[tuple[object, ...], Prompt] = OrderedDict()

    def get(self, key: tuple[object, ...]) -> Prompt | None:
        """The prompt, if it is remembered; it is the newest then."""
        prompt = self._prompts.get(key)
        if prompt is not None:
            self._prompts.move_to_end(key)
        return prompt

    def put(self, key: tuple[object, ...], prompt: Prompt) -> None:
        """Remember, and forget the oldest beyond the bound."""
        if key in self._prompts:
            return
        self._prompts[key] = prompt
        self._bytes += self._size(key, prompt)
        while self._bytes > self._bytes_max:
            self._bytes -= self._size(*self._prompts.popitem(last=False))

    @staticmethod
    def _size(key: tuple[object, ...], prompt: Prompt) -> int:
        raw = sum(len(part) for part in key if isinstance(part, bytes))
        return KEY_BYTES_COUNTED + raw + HASH_BYTES_COUNTED * len(prompt.hashes)
