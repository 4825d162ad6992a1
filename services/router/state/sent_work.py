"""What was sent to a worker that its last report cannot know yet, and what runs there of this router's own."""

from __future__ import annotations

from collections import deque

from shared.contracts.ids import Epoch

REPORT_LAG_S = 0.02
"""A report may leave its worker before a leg that was sent so much earlier has arrived there."""
SENT_MAX = 4096
"""Legs remembered for a worker between two of its reports; the oldest count no more beyond that."""


class Sent:
    """A leg on its way to a worker, as long as no report tells of it."""

    __slots__ = ("at", "context_tokens", "epoch", "legs", "tokens")

    def __init__(self, at: float, tokens: int, context_tokens: int, legs: int = 1) -> None:
        self.at = at
        self.epoch = Epoch(0)
        """The life of the worker that it was sent to."""
        self.legs = legs
        self.tokens = tokens
        """Prompt tokens to compute."""
        self.context_tokens = context_tokens
        """Prompt and completion, as they will lie in the KV cache."""


class OwnWork:
    """Of one worker. ``sent_*`` is what its last report does not have yet, of all routers."""

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
        """A leg of this router."""
        self.legs += sent.legs
        self.tokens += sent.tokens
        self.context_tokens += sent.context_tokens
        self.others_started(sent)

    def others_started(self, sent: Sent) -> None:
        """A leg of any router."""
        if len(self._sent) >= SENT_MAX:
            self._known(self._sent.popleft())
        self._sent.append(sent)
        self.sent_legs += sent.legs
        self.sent_tokens += sent.tokens
        self.sent_context_tokens += sent.context_tokens

    def computed(self, sent: Sent, tokens: int) -> None:
        """That leg got past its prompt of ``tokens`` to compute."""
        self.tokens -= tokens
        self.sent_tokens -= sent.tokens
        sent.tokens = 0

    def ended(self, sent: Sent, context_tokens: int) -> None:
        """That leg is over."""
        self.legs -= 1
        self.context_tokens -= context_tokens
        self._known(sent)

    def reported(self, now: float) -> None:
        """The worker has said how busy it is: what was sent a while before is in it."""
        while self._sent and self._sent[0].at <= now - REPORT_LAG_S:
            self._known(self._sent.popleft())

    def _known(self, sent: Sent) -> None:
        self.sent_legs -= sent.legs
        self.sent_tokens -= sent.tokens
        self.sent_context_tokens -= sent.context_tokens
        sent.legs = sent.tokens = sent.context_tokens = 0
