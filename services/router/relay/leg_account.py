"""What a router's own legs add to the load of its workers, before their reports have it."""

from __future__ import annotations

from typing import Self

from services.router.relay.parts import Parts
from services.router.state.sent_work import Sent
from shared.contracts.inference import StartLeg


class Account:
    """What a leg of ours adds to its worker's load, as long as it runs; its prompt, until that is computed."""

    __slots__ = ("_cluster", "_context_tokens", "_now", "_ring", "_sent", "_tokens", "_worker_id")

    def __init__(self, parts: Parts, start: StartLeg, context_tokens: int) -> None:
        self._cluster = parts.fleet.cluster
        self._ring = parts.room.ring
        self._worker_id = start.worker_id
        self._tokens = max(0, start.expected_tokens)
        self._context_tokens = context_tokens
        self._now = parts.clock.now
        self._sent: Sent | None = None

    def __enter__(self) -> Self:
        self._sent = Sent(self._now(), self._tokens, self._context_tokens)
        self._cluster.leg_started(self._worker_id, self._sent)
        return self

    def prompt_computed(self) -> None:
        """The first token is there."""
        if self._sent is not None:
            self._cluster.prompt_computed(self._worker_id, self._sent, self._tokens)
        self._tokens = 0
        self._ring()

    def __exit__(self, *_failure: object) -> None:
        self.prompt_computed()
        if self._sent is not None:
            self._cluster.leg_ended(self._worker_id, self._sent, self._context_tokens)
        self._ring()
