"""Work that a router knows of each worker: legs sent after its last load report, own legs, and a rate of tokens."""

from __future__ import annotations

import math
from collections import deque

from shared.contracts.ids import Epoch

REPORT_LAG_S = 0.02
"""A load report may miss a leg that was sent up to this long before the report arrived."""
SENT_MAX = 4096
"""Legs counted for a worker between two of its reports. Beyond that the oldest are dropped."""
MEMORY_S = 10.0
"""Time constant of the decay of a ``TokenRate``."""


class Sent:
    """A leg that no load report contains yet."""

    __slots__ = ("at", "context_tokens", "epoch", "legs", "tokens")

    def __init__(self, at: float, tokens: int, context_tokens: int, legs: int = 1) -> None:
        self.at = at
        self.epoch = Epoch(0)
        """Epoch of its worker."""
        self.legs = legs
        """One for each of its sequences."""
        self.tokens = tokens
        """Prompt tokens to compute."""
        self.context_tokens = context_tokens
        """Prompt and completion tokens that will occupy the KV cache."""


class OwnWork:
    """Work on one worker: this router's legs, and in ``sent_*`` legs of all routers that its last report lacks."""

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

    def ended(self, sent: Sent, context_tokens: int, legs: int = 1) -> None:
        """The leg has ended; it counted as ``legs``."""
        self.legs -= legs
        self.context_tokens -= context_tokens
        self._forget(sent)

    def reported(self, now: float) -> None:
        """A load report arrived. It contains the legs sent until ``REPORT_LAG_S`` ago."""
        while self._sent and self._sent[0].at <= now - REPORT_LAG_S:
            self._forget(self._sent.popleft())

    def _forget(self, sent: Sent) -> None:
        self.sent_legs -= sent.legs
        self.sent_tokens -= sent.tokens
        self.sent_context_tokens -= sent.context_tokens
        sent.legs = sent.tokens = sent.context_tokens = 0


class TokenRate:
    """Tokens per second, as a decaying mean, from a running total that is reported from time to time."""

    __slots__ = ("_at", "_per_s", "_total")

    def __init__(self) -> None:
        self._total = 0
        self._at = math.nan
        self._per_s = 0.0

    def update(self, total: int, now: float) -> float:
        """Add the total at ``now``; returns the rate. A smaller total than before (after a restart) starts anew."""
        took_s = now - self._at
        if math.isnan(took_s) or total < self._total:
            self._total, self._at = total, now
        elif took_s > 0.0:
            kept = math.exp(-took_s / MEMORY_S)
            self._per_s = kept * self._per_s + (1.0 - kept) * (total - self._total) / took_s
            self._total, self._at = total, now
        return self._per_s
