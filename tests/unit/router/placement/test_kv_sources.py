"""Workers with more of a prompt are its KV sources if reading is faster than computing."""

from __future__ import annotations

import msgspec
import pytest

from services.router.placement.native import IS_COMPILED
from services.router.placement.placement import Placement, PlacementPolicy, PlacementRequest
from services.router.placement.placer import CostPlacer
from services.router.request.facts import Mode
from services.router.state.cluster_view import ClusterView
from services.router.state.prefix_index import PrefixIndex
from services.router.state.worker_speed import WorkerSpeed
from shared.contracts.decisions import Part
from shared.contracts.ids import WorkerId
from shared.contracts.kv_events import KvSnapshot, pack_hashes
from shared.contracts.kv_exchange import KvSource
from shared.contracts.workers import Role
from tests.support.fleet_builders import load, record

BLOCK = 32
NOW = 0.0
POLICY = PlacementPolicy()
PROMPT = PlacementRequest(model="m", may_decode_first=False, prompt_tokens=20 * BLOCK + 7, hashes=tuple(range(1, 21)))


class Fleet:
    def __init__(self) -> None:
        self.cluster, self.index = ClusterView(), PrefixIndex()

    def add(
        self,
        worker_id: str,
        role: Role,
        held: int = 0,
        connector: str = "baton-1",
        release: str = "0",
        dropped: int = 0,
        **numbers: float,
    ) -> None:
        speeds = {name: numbers.pop(name) for name in WorkerSpeed.__struct_fields__ if name in numbers}
        described = record(worker_id, role=role, connector=connector, engine_version=release)
        hashing = msgspec.structs.replace(described.hashing, dropped=dropped)
        self.cluster.record(msgspec.structs.replace(described, hashing=hashing), NOW)
        self.cluster.set_speed(WorkerId(worker_id), WorkerSpeed(**speeds))
        self.cluster.report(load(worker_id, role=role, **numbers), NOW)
        self.index.join(worker_id, 1)
        self.index.restore(KvSnapshot(worker_id=worker_id, epoch=1, seq=1, hashes=pack_hashes(range(1, held + 1))))

    def place(
        self, request: PlacementRequest = PROMPT, policy: PlacementPolicy = POLICY, compiled: bool = IS_COMPILED
    ) -> Placement:
        placement = CostPlacer(self.cluster, self.index, policy, compiled=compiled).place(request, NOW)
        assert isinstance(placement, Placement)
        return placement


def asked(placement: Placement) -> list[tuple[str, int, int]]:
    return [(source.worker_id, source.first, source.end) for source in placement.sources]


def test_a_prefill_worker_reads_earlier_turns_from_the_decode_worker():
    fleet = Fleet()
    fleet.add("p1", Role.PREFILL, held=5)
    fleet.add("d1", Role.DECODE, held=18)

    placement = fleet.place()

    assert asked(placement) == [("d1", 5, 18)]
    assert (placement.cached_tokens, placement.fetched_tokens, placement.uncached_tokens) == (
        5 * BLOCK,
        13 * BLOCK,
        2 * BLOCK + 7,
    )
    assert placement.sources[0] == KvSource(worker_id="d1", epoch=1, first=5, end=18)


def test_sources_are_ordered_by_match_with_fallbacks_for_lost_blocks():
    fleet = Fleet()
    fleet.add("p1", Role.PREFILL)
    for number, held in enumerate((10, 19, 14, 9)):
        fleet.add(f"d{number}", Role.DECODE, held=held)

    assert asked(fleet.place()) == [("d1", 0, 19), ("d2", 0, 14)]


def test_the_last_token_is_always_computed():
    fleet = Fleet()
    fleet.add("p1", Role.PREFILL)
    fleet.add("d1", Role.DECODE, held=20)

    placement = fleet.place(msgspec.structs.replace(PROMPT, prompt_tokens=20 * BLOCK))

    assert asked(placement) == [("d1", 0, 19)]
    assert placement.uncached_tokens == BLOCK


WITH_DRAFTER = {"dropped": BLOCK}


@pytest.mark.parametrize("compiled", [True, False], ids=["C", "Python"])
@pytest.mark.parametrize(
    ("held", "tokens", "cached"), [(0, 100, 0), (1, 100, 0), (2, 100, 1), (5, 96, 1), (5, 97, 2), (20, 20 * BLOCK, 18)]
)
def test_an_engine_with_a_drafter_does_not_use_the_last_block_that_it_holds(held, tokens, cached, compiled):
    fleet = Fleet()
    fleet.add("w1", Role.BOTH, held=held, **WITH_DRAFTER)

    placement = fleet.place(msgspec.structs.replace(PROMPT, prompt_tokens=tokens), compiled=compiled)

    assert (placement.cached_tokens, placement.uncached_tokens) == (cached * BLOCK, tokens - cached * BLOCK)


@pytest.mark.parametrize("compiled", [True, False], ids=["C", "Python"])
def test_an_engine_with_a_drafter_reads_the_block_that_it_does_not_use_too(compiled):
    """From a source that began after it nothing would be read: the engine reads what follows the part that it uses."""
    fleet = Fleet()
    fleet.add("p1", Role.PREFILL, held=5, **WITH_DRAFTER)
    fleet.add("d1", Role.DECODE, held=18, **WITH_DRAFTER)

    placement = fleet.place(compiled=compiled)

    assert asked(placement) == [("d1", 4, 18)]
    assert (placement.cached_tokens, placement.fetched_tokens) == (4 * BLOCK, 14 * BLOCK)


@pytest.mark.parametrize("compiled", [True, False], ids=["C", "Python"])
def test_no_block_is_read_for_a_drafter_alone(compiled):
    """Of a worker that holds no more of the prompt, be it the reader itself."""
    fleet = Fleet()
    fleet.add("p1", Role.PREFILL, held=18, prefill_token_s=1.0, **WITH_DRAFTER)
    fleet.add("d1", Role.DECODE, held=18, **WITH_DRAFTER)

    placement = fleet.place(policy=PlacementPolicy(fetch_tokens_min=1), compiled=compiled)

    assert (asked(placement), placement.fetched_tokens, placement.cached_tokens) == ([], 0, 17 * BLOCK)


def test_too_few_tokens_are_not_fetched():
    fleet = Fleet()
    fleet.add("p1", Role.PREFILL, held=10)
    fleet.add("d1", Role.DECODE, held=17)

    assert asked(fleet.place(policy=PlacementPolicy(fetch_tokens_min=7 * BLOCK + 1))) == []
    assert asked(fleet.place(policy=PlacementPolicy(fetch_tokens_min=7 * BLOCK))) == [("d1", 10, 17)]


def test_a_request_can_set_its_own_fetch_minimum():
    fleet = Fleet()
    fleet.add("p1", Role.PREFILL, held=10)
    fleet.add("d1", Role.DECODE, held=11)

    assert asked(fleet.place(msgspec.structs.replace(PROMPT, fetch_tokens_min=0))) == [("d1", 10, 11)]
    assert asked(fleet.place(msgspec.structs.replace(PROMPT, fetch_tokens_min=BLOCK + 1))) == []


def test_blocks_faster_to_compute_than_read_are_computed():
    fleet = Fleet()
    fleet.add("p1", Role.PREFILL, prefill_token_s=1e-6, transfer_token_s=1e-3)
    fleet.add("d1", Role.DECODE, held=18)

    placement = fleet.place()

    assert (placement.sources, placement.fetched_tokens, placement.cached_tokens) == ((), 0, 0)


def test_an_idle_reader_beats_the_busy_holder_of_the_prompt():
    fleet = Fleet()
    fleet.add("p1", Role.PREFILL, held=18, waiting_tokens=50_000)
    fleet.add("p2", Role.PREFILL)
    fleet.add("d1", Role.DECODE)

    placement = fleet.place()

    assert placement.prefill is fleet.cluster.workers["p2"]
    assert asked(placement) == [("p1", 0, 18)]


def test_a_full_worker_can_still_be_a_kv_source():
    fleet = Fleet()
    fleet.add("p1", Role.PREFILL, held=18, legs=16)
    fleet.add("p2", Role.PREFILL)
    fleet.add("d1", Role.DECODE)

    assert asked(fleet.place()) == [("p1", 0, 18)]


def test_an_aggregated_worker_reads_kv_too():
    fleet = Fleet()
    fleet.add("w1", Role.BOTH, held=18, waiting_tokens=50_000)
    fleet.add("w2", Role.BOTH)

    placement = fleet.place(msgspec.structs.replace(PROMPT, mode=Mode.AGGREGATED))

    assert (placement.decode.record.worker_id, asked(placement)) == ("w2", [("w1", 0, 18)])


def test_an_unsplittable_request_has_its_whole_prompt_computed():
    fleet = Fleet()
    fleet.add("d1", Role.DECODE)
    fleet.add("p1", Role.PREFILL, held=18)

    assert fleet.place(msgspec.structs.replace(PROMPT, unsplittable="prompt logprobs")).sources == ()


def test_other_connectors_are_no_sources_and_get_no_streamed_handoff():
    fleet = Fleet()
    fleet.add("p1", Role.PREFILL, connector="nixl-1")
    fleet.add("d1", Role.DECODE, held=18, connector="nixl-1")

    placement = fleet.place(policy=PlacementPolicy(stream_tokens_min=0))

    assert (placement.sources, placement.handoff, placement.streamed) == ((), (), False)


def test_kv_of_another_fingerprint_is_never_requested():
    fleet = Fleet()
    fleet.add("p1", Role.PREFILL)
    fleet.add("d1", Role.DECODE)
    fleet.add("d2", Role.DECODE, held=18, connector="baton-2")

    assert fleet.place().sources == ()


def two_releases(busy: str = "") -> Fleet:
    """A pair of each release of the engine, which have both served the prompt; the workers of one are busy."""
    fleet = Fleet()
    for release in ("0.32.0", "0.33.0"):
        waiting = 50_000 if release == busy else 0
        fleet.add(f"p-{release}", Role.PREFILL, held=10, release=release, waiting_tokens=waiting)
        fleet.add(f"d-{release}", Role.DECODE, held=18, release=release, waiting_tokens=waiting)
    return fleet


@pytest.mark.parametrize(("busy", "other"), [("0.32.0", "0.33.0"), ("0.33.0", "0.32.0")])
def test_in_a_fleet_of_two_releases_each_request_stays_within_one(busy, other):
    """KV that another release computed may differ in its last bits, its blocks in their hashes or layout."""
    placement = two_releases(busy).place()

    assert placement.prefill is not None
    assert (placement.prefill.record.worker_id, placement.decode.record.worker_id) == (f"p-{other}", f"d-{other}")
    assert {source.worker_id for source in placement.sources} == {f"d-{other}"}


def test_workers_of_two_releases_make_no_pair():
    fleet = Fleet()
    fleet.add("p1", Role.PREFILL, release="0.32.0")
    fleet.add("d1", Role.DECODE, held=18, release="0.33.0")

    placement = fleet.place()

    assert (placement.prefill, placement.sources, placement.handoff) == (None, (), ())


def test_decode_starts_with_prefill_when_enough_tokens_are_computed():
    fleet = Fleet()
    fleet.add("p1", Role.PREFILL, held=10)
    fleet.add("d1", Role.DECODE)
    left = 10 * BLOCK + 7

    def streamed(stream_tokens_min: int) -> bool:
        return fleet.place(policy=PlacementPolicy(stream_tokens_min=stream_tokens_min)).streamed

    assert [streamed(tokens) for tokens in (left, left + 1, 0, -1)] == [True, False, True, False]


def test_decode_reserves_no_memory_for_a_distant_prefill():
    fleet = Fleet()
    fleet.add("p1", Role.PREFILL, prefill_token_s=1e-3, waiting_tokens=20_000)
    fleet.add("d1", Role.DECODE)
    far, near = PlacementPolicy(stream_tokens_min=0), PlacementPolicy(stream_tokens_min=0, stream_s_max=21.0)

    assert [fleet.place(policy=policy).streamed for policy in (far, near)] == [False, True]


def test_parts_held_by_different_workers_are_read_from_each():
    fleet = Fleet()
    fleet.add("p1", Role.PREFILL)
    fleet.add("d1", Role.DECODE, held=10)
    fleet.add("d2", Role.DECODE)
    fleet.index.restore(KvSnapshot(worker_id="d2", epoch=1, seq=2, hashes=pack_hashes(range(8, 21))))

    placement = fleet.place()

    assert asked(placement) == [("d1", 0, 10), ("d2", 10, 20)]
    assert (placement.fetched_tokens, placement.uncached_tokens) == (20 * BLOCK, 7)


def test_two_legs_side_by_side_delay_the_first_token_by_one_transit():
    fleet = Fleet()
    fleet.add("p1", Role.PREFILL, transit_s=0.012)
    fleet.add("d1", Role.DECODE, transit_s=0.008)

    streamed, offered = (fleet.place(policy=PlacementPolicy(stream_tokens_min=tokens)) for tokens in (0, -1))

    assert (streamed.streamed, offered.streamed) == (True, False)
    assert streamed.predicted.front_end_and_bus_s == pytest.approx(0.010)
    assert offered.predicted.front_end_and_bus_s == pytest.approx(0.020)
    assert cost_s(offered) - cost_s(streamed) == pytest.approx(0.010 + handoff_s(offered) - handoff_s(streamed))


def cost_s(placement: Placement) -> float:
    """Of the pair that was chosen."""
    return sum(chosen.cost_s(part) for part, _, chosen in placement.candidates if chosen is not None)


def handoff_s(placement: Placement) -> float:
    return sum(chosen.estimate.handoff_s for part, _, chosen in placement.candidates if chosen and part is Part.DECODE)
