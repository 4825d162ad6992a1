"""One completion of a request: the tokens from the simulated engine and the text for the client."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from services.worker.engines.port import EngineDead
from services.worker.engines.simulated.core.sequence import STOP, Sequence


class StopStrings:
    """Holds back text that may be the beginning of a stop string, as vLLM's detokenizer does."""

    def __init__(self, stops: list[str], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held_back = max(map(len, stops)) - 1
        self._pending = ""
        self.matched = ""
        """The stop string that was found; the completion has ended then."""

    def feed(self, text: str, *, last: bool = False) -> str:
        """Add text; returns the text that may be sent. ``last``: no text follows, so none is held back."""
        self._pending += text
        found = min(((at, stop) for stop in self._stops if (at := self._pending.find(stop)) >= 0), default=None)
        if found is not None:
            at, self.matched = found
            shown, self._pending = self._pending[: at + len(self.matched) * self._include], ""
            return shown
        split = len(self._pending) if last else max(0, len(self._pending) - self._held_back)
        shown, self._pending = self._pending[:split], self._pending[split:]
        return shown


class Inbox:
    """Tokens of all choices of one request, from the engine to the request's task. Bounded by their max_tokens."""

    __slots__ = ("_dead", "_tokens", "_waiter")

    def __init__(self) -> None:
        self._tokens: list[tuple[Choice, int | None, str]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._dead = ""

    def put(self, choice: Choice, token: int | None, finish_reason: str) -> None:
        """Called by the engine: one more token, or None for a refused sequence; ``finish_reason`` is set at the end."""
        self._tokens.append((choice, token, finish_reason))
        self._wake()

    def fail(self, reason: str) -> None:
        """Called by the engine when it has died: no token follows."""
        self._dead = reason
        self._wake()

    async def take(self) -> list[tuple[Choice, int | None, str]]:
        """All tokens that have arrived, in order; waits for at least one. Raises EngineDead."""
        while not self._tokens:
            if self._dead:
                raise EngineDead(self._dead)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        tokens, self._tokens = self._tokens, []
        return tokens

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(slots=True, eq=False)
class Choice:
    """One completion of one prompt."""

    index: int
    prompt: list[int]
    inbox: Inbox
    stops: StopStrings | None = None
    sequence: Sequence | None = None
    token_ids: list[int] = field(default_factory=list)
    resumed: int = 0
    """How many of ``token_ids`` another engine generated before this leg; see ``resume``."""
    shown: list[str] = field(default_factory=list)
    """The text so far, in pieces."""
    finish_reason: str = ""
    stop_reason: str | int | None = None

    def has_ended(self) -> bool:
        """Whether the engine or a stop string has ended it."""
        return bool(self.finish_reason)

    def is_at_start(self) -> bool:
        """Whether this engine has generated no token of it yet."""
        return len(self.token_ids) == self.resumed

    def refuse(self, finish_reason: str) -> str:
        """End the choice without another token; returns the text that may be sent now."""
        self.finish_reason = finish_reason
        text = "" if self.stops is None else self.stops.feed("", last=True)
        self.shown.append(text)
        return text

    def add(self, token: int, text: str, finish_reason: str) -> str:
        """Add a token whose text is ``text``; returns the text that may be sent now."""
        self.token_ids.append(token)
        self.finish_reason = finish_reason
        if finish_reason == STOP:
            text = ""  # The text of an end token or stop token is not part of the completion.
            if self.sequence is not None and token in self.sequence.params.stop_token_ids:
                self.stop_reason = token
        if self.stops is not None:
            text = self.stops.feed(text, last=bool(finish_reason))
            if self.stops.matched:
                self.finish_reason, self.stop_reason = STOP, self.stops.matched
        self.shown.append(text)
        return text


def made_up_logprob(token: int) -> float:
    """A deterministic number: the simulated model has no probabilities."""
    return -(1 + token % 97) / 97


def completion_logprobs(tokens: list[int], texts: list[str], offset: int, *, top: int) -> dict[str, Any]:
    """``logprobs`` of /v1/completions; ``offset`` is the position of the first token in the text."""
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "text_offset": offsets,
        "token_logprobs": [made_up_logprob(token) for token in tokens],
        "tokens": texts,
        "top_logprobs": [
            {text: made_up_logprob(token)} if top else None for token, text in zip(tokens, texts, strict=True)
        ],
    }


def chat_logprobs(tokens: list[int], texts: list[str], _offset: int, *, top: int) -> dict[str, Any]:
    """``logprobs`` of /v1/chat/completions."""
    entries = [
        {"token": text, "logprob": made_up_logprob(token), "bytes": list(text.encode())}
        for token, text in zip(tokens, texts, strict=True)
    ]
    return {"content": [{**entry, "top_logprobs": [entry] if top else []} for entry in entries]}
