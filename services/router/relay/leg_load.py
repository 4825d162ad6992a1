"""The load that this router's own legs add to their workers, until the workers' load reports include it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from services.router.state.cluster_view import ClusterView
from services.router.state.feeds import ReservationFeed
from services.router.state.worker_view import Sent
from shared.contracts.inference import StartLeg


class LegLoads:
    """Counts legs in the cluster view and announces them to the other routers."""

    def __init__(
        self,
        cluster: ClusterView,
        reservations: ReservationFeed,
        load_changed: Callable[[], None],
        now: Callable[[], float],
    ) -> None:
        self.cluster = cluster
        self.reservations = reservations
        self.load_changed = load_changed
        self.now = now

    def of(self, start: StartLeg, context_tokens: int) -> LegLoad:
        """``with`` this around the leg: its load counts from entry to exit."""
        return LegLoad(self, start, context_tokens)


class LegLoad:
    """One leg's load: its context while it runs, and its prompt until that is computed."""

    __slots__ = ("_context_tokens", "_legs", "_loads", "_prompt_tokens", "_sent", "_start")

    def __init__(self, loads: LegLoads, start: StartLeg, context_tokens: int) -> None:
        self._loads = loads
        self._start = start
        self._prompt_tokens = max(0, start.expected_tokens)
        self._context_tokens = context_tokens
        self._legs = start.sequences
        self._sent: Sent | None = None

    def __enter__(self) -> Self:
        self._sent = Sent(self._loads.now(), self._prompt_tokens, self._context_tokens, self._legs)
        self._loads.cluster.leg_started(self._start.worker_id, self._sent)
        return self

    def sent(self) -> None:
        """The leg's message has left for its worker: announce it to the other routers."""
        self._loads.reservations.leg_started(self._start, self._context_tokens)

    def prompt_computed(self) -> None:
        """The leg's first token has arrived."""
        if self._sent is not None:
            self._loads.cluster.prompt_computed(self._start.worker_id, self._sent, self._prompt_tokens)
        self._prompt_tokens = 0
        self._loads.load_changed()

    def __exit__(self, *_failure: object) -> None:
        self.prompt_computed()
        if self._sent is not None:
            self._loads.cluster.leg_ended(self._start.worker_id, self._sent, self._context_tokens, self._legs)
        self._loads.load_changed()
