"""Policies that ignore the prompt: random, round robin, least loaded, power of two choices."""

from __future__ import annotations

from collections.abc import Sequence

from replay.policies.base import Baseline, PolicyContext
from services.router.placement.placement import PlacementRequest
from services.router.state.cluster_view import WorkerView
from shared.contracts.ids import WorkerId


class RandomChoice(Baseline):
    """A random worker."""

    def choose(
        self, request: PlacementRequest, workers: Sequence[WorkerView], matches: dict[WorkerId, int]
    ) -> WorkerView:
        """Uniformly random."""
        return self.rng.choice(workers)

    def choose_decode(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> WorkerView:
        """Uniformly random."""
        return self.rng.choice(workers)


class RoundRobin(Baseline):
    """Workers in turn."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._turns = {"first": 0, "decode": 0}

    def choose(
        self, request: PlacementRequest, workers: Sequence[WorkerView], matches: dict[WorkerId, int]
    ) -> WorkerView:
        """The next one."""
        return self._next("first", workers)

    def choose_decode(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> WorkerView:
        """The next decode worker."""
        return self._next("decode", workers)

    def _next(self, turn: str, workers: Sequence[WorkerView]) -> WorkerView:
        self._turns[turn] += 1
        return workers[(self._turns[turn] - 1) % len(workers)]


class LeastLoaded(Baseline):
    """The fewest requests in flight, as counted by the router; a tie is broken at random."""

    def choose(
        self, request: PlacementRequest, workers: Sequence[WorkerView], matches: dict[WorkerId, int]
    ) -> WorkerView:
        """By requests in flight."""
        return self.least(workers, [self.active(view).requests for view in workers])


class PowerOfTwo(Baseline):
    """The less loaded of two random workers (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing",
    2001).
    """

    def choose(
        self, request: PlacementRequest, workers: Sequence[WorkerView], matches: dict[WorkerId, int]
    ) -> WorkerView:
        """The less loaded of two."""
        return self._of_two(workers)

    def choose_decode(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> WorkerView:
        """The less loaded of two."""
        return self._of_two(workers)

    def _of_two(self, workers: Sequence[WorkerView]) -> WorkerView:
        two = self.rng.sample(workers, min(2, len(workers)))
        return min(two, key=lambda view: self.active(view).requests)
