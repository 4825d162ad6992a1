"""Simulated engines of models with windows or recurrent state, and what a router predicts of their caches."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest

from services.router.placement.placement import Placement, PlacementPolicy, PlacementRequest
from services.router.placement.placer import CostPlacer
from services.router.state.cluster_view import ClusterView
from services.router.state.prefix_index import PrefixIndex
from services.worker.engines.simulated.core.batch import RequestParams, Sequence
from services.worker.engines.simulated.core.engine_core import EngineCore, ModelTokens
from services.worker.engines.simulated.core.groups import hash_scheme
from services.worker.engines.simulated.core.settings import SimulationSettings, tokens_max
from services.worker.kv_events import HeldBlocks
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_events import KvEventBatch, KvSnapshot, KvTier, block_hash64, unpack_hashes
from shared.contracts.workers import Role
from tests.support.fleet_builders import record

WORKERS = (WorkerId("w1"), WorkerId("w2"))
TOKENS = ModelTokens(size=1000, sayable=list(range(10, 1000)))
KINDS = pytest.mark.parametrize("groups", ["full", "window", "state"])


def settings(groups: str, kv_blocks: int) -> SimulationSettings:
    return SimulationSettings(
        groups=groups, kv_blocks=kv_blocks, max_model_len=min(1024, tokens_max(groups, kv_blocks, 32))
    )


class Fleet:
    """Workers with simulated engines in virtual time, and a router's index and placement."""

    def __init__(self, groups: str, kv_blocks: int) -> None:
        made = settings(groups, kv_blocks)
        self.engines = {one: EngineCore(replace(made, worker_id=one), TOKENS) for one in WORKERS}
        self.held = {one: HeldBlocks() for one in WORKERS}
        self.cluster, self.index, self.now = ClusterView(), PrefixIndex(), 0.0
        for one in WORKERS:
            described = msgspec.structs.replace(
                record(one, role=Role.BOTH), hashing=hash_scheme(made.groups, made.block_size)
            )
            self.cluster.record(described, 0.0)
            self.index.join(one, Epoch(1))
            self.index.restore(KvSnapshot(worker_id=one, epoch=Epoch(1), seq=0, hashes=b""))
        self.placer = CostPlacer(self.cluster, self.index, PlacementPolicy(silent_s_max=1e9))

    def serve(self, prompt: list[int], answer_tokens: int) -> tuple[int, Sequence]:
        """The cached tokens that were predicted, and what became of the request."""
        worker_id = random.Random(len(prompt)).choice(WORKERS)
        probe = self.engines[worker_id].add(None, list(prompt), RequestParams(max_tokens=1), self.now)
        hashes = [block_hash64(name) for name in probe.hashes]
        self.engines[worker_id].abort(probe)
        request = PlacementRequest(model="m", prompt_tokens=len(prompt), hashes=hashes)
        placement = self.placer.place(request, self.now)
        assert isinstance(placement, Placement)
        worker_id = placement.decode.record.worker_id
        engine = self.engines[worker_id]
        params = RequestParams(max_tokens=answer_tokens, ignore_eos=True)
        sequence = engine.add(None, list(prompt), params, self.now)
        while not sequence.finish_reason:
            engine.advance(self.now)
            self.now = max(self.now, engine.wakes_at() or self.now)
        self._listen(worker_id)
        return placement.cached_tokens, sequence

    def _listen(self, worker_id: WorkerId) -> None:
        events = self.engines[worker_id].cache.take_events()
        seq = self.held[worker_id].apply(events)
        self.index.apply(KvEventBatch(worker_id=worker_id, epoch=Epoch(1), seq=seq, events=events))
        assert not self.index.check(worker_id, Epoch(1), self.held[worker_id].digest())


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("kv_blocks", [20_000, 300], ids=["all kept", "evicted"])
def test_a_thousand_predictions_of_cached_tokens_are_exact(groups, kv_blocks):
    chance, fleet, right, found = random.Random(3), Fleet(groups, kv_blocks), 0, 0
    system = [chance.randrange(500) for _ in range(70)]
    for _ in range(500):
        prompt = system + [chance.randrange(500) for _ in range(chance.randint(1, 250))]
        for _turn in range(2):
            predicted, sequence = fleet.serve(prompt, chance.randint(1, 80))
            right += predicted == sequence.stats.cached_tokens
            found += sequence.stats.cached_tokens > 0
            prompt = sequence.tokens + [chance.randrange(500) for _ in range(chance.randint(1, 60))]

    assert right >= 990
    assert found >= 200
    for one in WORKERS:
        whole = HeldBlocks()
        whole.apply(fleet.engines[one].cache.whole_as_events())
        for tier in KvTier:
            assert set(unpack_hashes(whole.packed(tier))) == set(unpack_hashes(fleet.held[one].packed(tier)))


def run(core: EngineCore, prompt: list[int], answer_tokens: int) -> Sequence:
    now, sequence = 0.0, core.add(None, list(prompt), RequestParams(max_tokens=answer_tokens, ignore_eos=True), 0.0)
    while not sequence.finish_reason:
        core.advance(now)
        now = max(now, core.wakes_at() or now)
    return sequence


@KINDS
def test_many_at_once_in_little_memory_all_end(groups):
    core, chance, now = EngineCore(settings(groups, 60), TOKENS), random.Random(5), 0.0
    running = [
        core.add(None, list(range(chance.randint(20, 300))), RequestParams(max_tokens=200, ignore_eos=True), now)
        for _ in range(30)
    ]
    while not all(sequence.finish_reason for sequence in running):
        core.advance(now)
        now = max(now, core.wakes_at() or now)

    assert core.batch.preemptions > 0
    assert core.cache.free == 60


@KINDS
def test_what_a_sequence_held_is_free_when_it_has_ended(groups):
    core = EngineCore(settings(groups, 100), TOKENS)

    for length in (40, 700, 333, 40, 701):
        run(core, list(range(length % 7, length % 7 + length)), 60)

    assert core.cache.free == 100


def test_a_state_is_kept_at_the_prompts_last_boundary_and_at_intervals_of_the_answer():
    core = EngineCore(settings("state", 100), TOKENS)
    first = run(core, list(range(100)), 200)

    assert [number for number, name in enumerate(first.hashes, 1) if core.cache.kept(name)] == [3, 8]
    assert run(core, [*range(100), 7], 1).stats.cached_tokens == 96
    assert run(core, first.tokens[:200], 1).stats.cached_tokens == 96
    assert run(core, [*first.tokens, 7], 1).stats.cached_tokens == 256


def test_a_window_is_of_use_only_as_a_whole():
    """What left the window of a running sequence is evicted before its last blocks."""
    core = EngineCore(settings("window", 400), TOKENS)
    first = run(core, list(range(500)), 1)
    seventh, twelfth = first.hashes[6], first.hashes[11]

    while core.cache.kept(seventh) is not None:
        assert core.cache.take(1)

    assert core.cache.kept(twelfth) is not None
    assert run(core, [*range(500), 3], 1).stats.cached_tokens == 480
    assert run(core, [*range(390), 3], 1).stats.cached_tokens == 0
