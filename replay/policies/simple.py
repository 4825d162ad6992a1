"""Policies that look at no prompt: random, round robin, least loaded, power of two choices."""

from __future__ import annotations

from collections.abc import Sequence

from replay.policies.base import Baseline, Surroundings
from services.router.placement.placement import PlacementRequest
from services.router.state.cluster_view import WorkerView
from shared.contracts.ids import WorkerId


class RandomChoice(Baseline):
    """Any worker, by the seed."""

    def choose(self, need: PlacementRequest, workers: Sequence[WorkerView], matches: dict[WorkerId, int]) -> WorkerView:
        """Looks at nothing."""
        return self.chance.choice(workers)

    def choose_decode(self, need: PlacementRequest, workers: Sequence[WorkerView]) -> WorkerView:
        """Looks at nothing either."""
        return self.chance.choice(workers)


class RoundRobin(Baseline):
    """One after the other."""

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self._turns = {"first": 0, "decode": 0}

    def choose(self, need: PlacementRequest, workers: Sequence[WorkerView], matches: dict[WorkerId, int]) -> WorkerView:
        """The next one."""
        return self._next("first", workers)

    def choose_decode(self, need: PlacementRequest, workers: Sequence[WorkerView]) -> WorkerView:
        """The next one of those."""
        return self._next("decode", workers)

    def _next(self, turn: str, workers: Sequence[WorkerView]) -> WorkerView:
        self._turns[turn] += 1
        return workers[(self._turns[turn] - 1) % len(workers)]


class LeastLoaded(Baseline):
    """The fewest requests in flight, as counted by the router; a tie is broken at random."""

    def choose(self, need: PlacementRequest, workers: Sequence[WorkerView], matches: dict[WorkerId, int]) -> WorkerView:
        """Looks at load alone."""
        return self.least(workers, [self.active(view).requests for view in workers])


class PowerOfTwo(Baseline):
    """The less loaded of two random workers (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing",
    2001).
    """

    def choose(self, need: PlacementRequest, workers: Sequence[WorkerView], matches: dict[WorkerId, int]) -> WorkerView:
        """Looks at the load of two."""
        return self._of_two(workers)

    def choose_decode(self, need: PlacementRequest, workers: Sequence[WorkerView]) -> WorkerView:
        """As well."""
        return self._of_two(workers)

    def _of_two(self, workers: Sequence[WorkerView]) -> WorkerView:
        two = self.chance.sample(workers, min(2, len(workers)))
        return min(two, key=lambda view: self.active(view).requests)
