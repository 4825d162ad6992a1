"""Work sent to a worker after its last load report, and this router's legs that run there."""

from __future__ import annotations

import math
from collections import deque

from shared.contracts.ids import Epoch

REPORT_LAG_S = 0.02
"""A report may leave its worker before a leg that was sent up to this long before has arrived there."""
SENT_MAX = 4096
"""Legs counted for a worker between two of its reports; beyond that the oldest are dropped."""


class Sent:
    """A leg that no load report contains yet."""

    __slots__ = ("at", "context_tokens", "epoch", "legs", "tokens")

    def __init__(self, at: float, tokens: int, context_tokens: int, legs: int = 1) -> None:
        self.at = at
        self.epoch = Epoch(0)
        """The epoch of the worker that it was sent to."""
        self.legs = legs
        self.tokens = tokens
        """Prompt tokens to compute."""
        self.context_tokens = context_tokens
        """Prompt and completion, as they will occupy the KV cache."""


class OwnWork:
    """Of one worker. ``sent_*``: legs of all routers that its last report does not contain."""

    __slots__ = ("_sent", "context_tokens", "legs", "sent_context_tokens", "sent_legs", "sent_tokens", "tokens")

    def __init__(self) -> None:
        self.legs = 0
        self.tokens = 0
        self.context_tokens = 0
        self.sent_legs = 0
        self.sent_tokens = 0
        self.sent_context_tokens = 0
        self._sent: deque[Sent] = deque()

    def started(self, sent: Sent) -> None:
        """The router itself sent a leg."""
        self.legs += sent.legs
        self.tokens += sent.tokens
        self.context_tokens += sent.context_tokens
        self.others_started(sent)

    def others_started(self, sent: Sent) -> None:
        """Any router sent a leg."""
        if len(self._sent) >= SENT_MAX:
            self._forget(self._sent.popleft())
        self._sent.append(sent)
        self.sent_legs += sent.legs
        self.sent_tokens += sent.tokens
        self.sent_context_tokens += sent.context_tokens

    def computed(self, sent: Sent, tokens: int) -> None:
        """The leg has computed its prompt of ``tokens``."""
        self.tokens -= tokens
        self.sent_tokens -= sent.tokens
        sent.tokens = 0

    def ended(self, sent: Sent, context_tokens: int) -> None:
        """The leg has ended."""
        self.legs -= 1
        self.context_tokens -= context_tokens
        self._forget(sent)

    def reported(self, now: float) -> None:
        """A load report has come: it contains the legs that were sent ``REPORT_LAG_S`` before."""
        while self._sent and self._sent[0].at <= now - REPORT_LAG_S:
            self._forget(self._sent.popleft())

    def _forget(self, sent: Sent) -> None:
        self.sent_legs -= sent.legs
        self.sent_tokens -= sent.tokens
        self.sent_context_tokens -= sent.context_tokens
        sent.legs = sent.tokens = sent.context_tokens = 0


MEMORY_S = 10.0
"""Time constant of the decay."""


class TokenRate:
    """Tokens per second, from a running total that is reported now and then."""

    __slots__ = ("_at", "_per_s", "_total")

    def __init__(self) -> None:
        self._total = 0
        self._at = math.nan
        self._per_s = 0.0

    def update(self, total: int, now: float) -> float:
        """Record the total at ``now``; returns the rate. A total that shrank (a restart) only resets the count."""
        took_s = now - self._at
        if math.isnan(took_s) or total < self._total:
            self._total, self._at = total, now
        elif took_s > 0.0:
            kept = math.exp(-took_s / MEMORY_S)
            self._per_s = kept * self._per_s + (1.0 - kept) * (total - self._total) / took_s
            self._total, self._at = total, now
        return self._per_s
