"""The router places requests on the ranks of a data parallel group, whose steps all take as long as the longest."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import pytest

from replay.capacity.workload import generated
from replay.engine import Engine
from replay.profile import PROFILES, Profile
from replay.split import Split
from replay.traces import Request
from replay.world import World

RANKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LockStep(Profile):
    """Engines of one group. An idle one has steps without work, which are no shorter than those of the others."""

    engines: dict[int, Engine] = field(default_factory=dict)
    """The ranks by number. All profiles of a group share it."""
    own_s: dict[int, float] = field(default_factory=dict)
    """What the current step of each rank would take alone."""

    def step_s(
        self, prefill_tokens: int, prefill_pairs: float, decoding: int, context_tokens: float, *, follows: bool = False
    ) -> float:
        own_s = Profile.step_s(self, prefill_tokens, prefill_pairs, decoding, context_tokens, follows=follows)
        self.own_s[self.noise_seed] = own_s
        computing = (rank for rank, engine in self.engines.items() if engine.step.ends_at < math.inf)
        return max(own_s, *(self.own_s.get(rank, 0.0) for rank in computing), 0.0)

    def steps_alike(self, step: int, decoding: int, context_tokens: int) -> int:
        """Each step by itself: the next one may be another rank's."""
        return 1


def served(requests: list[Request]) -> tuple[World, Counter[str]]:
    """A group that has served these, and how many each rank got."""
    profile = LockStep(**{name: getattr(PROFILES["8b"], name) for name in PROFILES["8b"].__dataclass_fields__})
    world = World(Split(both=RANKS), profile)
    profile.engines.update(enumerate(worker.engine for worker in world.workers.values()))
    outcomes = world.run(requests)
    placed = Counter(str(one.placement.decode.record.worker_id) for one in outcomes if one.placement is not None)
    return world, placed


@pytest.mark.parametrize("per_s", [1.0, 10.0, 30.0])
def test_requests_are_spread_over_the_ranks(per_s):
    _world, placed = served(generated(per_s, 1500, 200, count=200, seed=1).requests)

    print(placed)
    assert sum(placed.values()) == 200
