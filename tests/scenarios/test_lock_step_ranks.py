"""The router places requests on the ranks of a data parallel group, whose steps all take as long as the longest."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, fields

import pytest

from replay.capacity.workload import generated
from replay.engine import Engine
from replay.profile import PROFILES, Profile
from replay.simworker import SimWorker
from replay.split import Split
from replay.world import World
from shared.contracts.load import EngineSpeed
from shared.engine_speed.learner import combined

RANKS, REQUESTS = 4, 200


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
        return max([own_s, *(self.own_s.get(rank, 0.0) for rank in computing)])

    def steps_alike(self, step: int, decoding: int, context_tokens: int) -> int:
        """Each step by itself: another rank may decide how long the next one takes."""
        return 1


class Rank(SimWorker):
    """Publishes what all ranks have learned, as ``RankGroup.speed`` does."""

    group: tuple[SimWorker, ...] = ()

    @property
    def speed(self) -> EngineSpeed | None:
        learned = (rank._learner.speed for rank in self.group)
        return combined([speed for speed in learned if speed is not None])


class Group(World):
    worker_type = Rank


def group() -> World:
    profile = LockStep(**{each.name: getattr(PROFILES["8b"], each.name) for each in fields(Profile)})
    world = Group(Split(both=RANKS), profile)
    ranks = tuple(world.workers.values())
    profile.engines.update(enumerate(rank.engine for rank in ranks))
    for rank in ranks:
        assert isinstance(rank, Rank)
        rank.group = ranks
    return world


@pytest.mark.parametrize("per_s", [1.0, 4.0, 10.0, 30.0])
def test_requests_are_spread_over_the_ranks(per_s):
    outcomes = group().run(generated(per_s, 1500, 200, count=REQUESTS, seed=1).requests)

    placed = Counter(one.placement.decode.record.worker_id for one in outcomes if one.placement is not None)
    assert len(placed) == RANKS
    assert min(placed.values()) > 0.75 * REQUESTS / RANKS
    assert max(placed.values()) < 1.25 * REQUESTS / RANKS
