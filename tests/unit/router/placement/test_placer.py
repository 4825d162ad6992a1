"""Placement minimises predicted seconds, of the request and of all others."""

from __future__ import annotations

import msgspec
import pytest

from services.router.decisions.decision import DecisionLog
from services.router.placement.placement import Placement, PlacementPolicy, PlacementRequest, Rejection
from services.router.placement.placer import CostPlacer
from services.router.placement.slo import Targets
from services.router.placement.specification import EVICTED_MIN
from services.router.request.facts import ForcedWorkers, Mode
from services.router.settings import Settings
from services.router.state.cluster_view import ClusterView
from services.router.state.prefix_index import PrefixIndex
from services.router.state.worker_speed import WorkerSpeed
from services.router.state.worker_view import Sent
from shared.contracts.decisions import CandidateRecord, Part
from shared.contracts.failures import Reason
from shared.contracts.ids import RequestId, RouterId, WorkerId
from shared.contracts.kv_events import KvSnapshot, pack_hashes
from shared.contracts.workers import Role
from tests.support.fleet_builders import load, record

BLOCK = 32
NOW = 0.0
PROMPT = PlacementRequest(model="m", prompt_tokens=20 * BLOCK + 7, hashes=tuple(range(1, 21)))


class Fleet:
    def __init__(self, policy: PlacementPolicy | None = None) -> None:
        self.cluster, self.index = ClusterView(), PrefixIndex()
        self.costs = CostPlacer(self.cluster, self.index, policy or PlacementPolicy())

    def add(self, worker_id: str, role: Role = Role.BOTH, held: int = 0, **numbers: float) -> None:
        speeds = {name: numbers.pop(name) for name in WorkerSpeed.__struct_fields__ if name in numbers}
        self.cluster.record(record(worker_id, role=role, connector="baton-1"), NOW)
        self.cluster.set_speed(WorkerId(worker_id), WorkerSpeed(**speeds))
        self.cluster.report(load(worker_id, role=role, **numbers), NOW)
        self.index.join(worker_id, 1)
        self.index.restore(KvSnapshot(worker_id=worker_id, epoch=1, seq=1, hashes=pack_hashes(range(1, held + 1))))

    def place(self, **what: object) -> Placement:
        placement = self.costs.place(msgspec.structs.replace(PROMPT, **what), NOW)
        assert isinstance(placement, Placement), placement
        return placement


def who(placement: Placement) -> tuple[str, str]:
    return placement.prefill.record.worker_id if placement.prefill else "", placement.decode.record.worker_id


def candidates(placement: Placement) -> list[CandidateRecord]:
    log = DecisionLog(RouterId("r"), lambda: "0" * 32, lambda: None, bytes_max=1 << 20)
    return log.add(RequestId("q"), PROMPT, placement, at_unix_s=0.0).record(RouterId("r")).candidates


def a_pair_of_which_decode_has_most(policy: PlacementPolicy | None = None, **of_decode: float) -> Fleet:
    fleet = Fleet(policy)
    fleet.add("p1", Role.PREFILL)
    fleet.add("d1", Role.DECODE, held=18, **of_decode)
    return fleet


def test_a_decode_worker_with_most_of_the_prompt_serves_alone():
    placement = a_pair_of_which_decode_has_most().place()

    assert (placement.mode, who(placement)) == (Mode.DECODE_FIRST, ("", "d1"))
    assert 0.5 < placement.hit_share_min < 18 / 20


def test_the_operator_sets_the_share_of_decode_first_and_the_part_of_it_that_may_be_gone():
    settings = Settings(decode_first_share_min=0.95, decode_first_found_min=0.5)
    choosy, lenient = PlacementPolicy.from_settings(settings), PlacementPolicy(decode_first_found_min=0.5)
    fleets = [a_pair_of_which_decode_has_most(policy=policy) for policy in (choosy, lenient)]

    modes = [fleet.place().mode for fleet in fleets]

    assert modes == [Mode.DISAGGREGATED, Mode.DECODE_FIRST]
    assert fleets[1].place().hit_share_min == pytest.approx(0.5 * 18 * 32 / PROMPT.prompt_tokens)


def test_decode_first_is_not_repeated_after_a_refusal():
    placement = a_pair_of_which_decode_has_most().place(may_decode_first=False)

    assert (placement.mode, who(placement)) == (Mode.DISAGGREGATED, ("p1", "d1"))


def test_a_clients_own_threshold_is_respected():
    fleet = a_pair_of_which_decode_has_most()

    assert fleet.place(cache_hit_threshold=0.3).mode is Mode.DISAGGREGATED
    assert fleet.place(cache_hit_threshold=0.3, mode=Mode.DECODE_FIRST).hit_share_min == 0.3


ALONE = "there is less than one block of KV to hand over"


@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.DISAGGREGATED, Mode.DECODE_FIRST])
@pytest.mark.parametrize("tokens", [1, BLOCK - 1])
def test_a_prompt_below_a_block_is_computed_where_it_is_answered(mode, tokens):
    fleet = Fleet()
    fleet.add("p1", Role.PREFILL)
    fleet.add("d1", Role.DECODE, waiting_tokens=5_000)

    placement = fleet.place(prompt_tokens=tokens, hashes=(), mode=mode)

    assert (placement.mode, who(placement), placement.uncached_tokens) == (Mode.AGGREGATED, ("", "d1"), tokens)
    assert placement.why == (ALONE if mode is not Mode.DECODE_FIRST else "asked for")
    # The worker's own threshold would refuse it, and no other worker could hand anything over.
    assert placement.hit_share_min == 0.0
    assert fleet.place(prompt_tokens=BLOCK, hashes=(), mode=mode).mode is Mode.DISAGGREGATED


def test_a_named_prefill_worker_is_passed_over_where_it_has_nothing_to_hand_over():
    fleet = Fleet()
    for name, role in (("p1", Role.PREFILL), ("d1", Role.DECODE), ("d2", Role.DECODE)):
        fleet.add(name, role, held=20 * (name == "d1"))
    named = ForcedWorkers(prefill_worker=WorkerId("p1"))

    assert who(fleet.place(forced=named, prompt_tokens=5, hashes=()))[0] == ""
    assert who(fleet.place(forced=named)) == ("p1", "d2")  # d1 has all blocks.
    both = ForcedWorkers(prefill_worker=WorkerId("p1"), decode_worker=WorkerId("d1"))
    assert who(fleet.place(forced=both)) == ("", "d1")


def test_what_a_decode_worker_lacks_of_a_cached_prompt_may_be_too_little_to_hand_over():
    fleet = Fleet()
    fleet.add("p1", Role.PREFILL)
    fleet.add("d1", Role.DECODE, held=20, waiting_tokens=5_000)

    for mode in (Mode.AUTO, Mode.DISAGGREGATED):
        alone = fleet.place(mode=mode)
        assert (alone.mode, who(alone), alone.uncached_tokens) == (Mode.DECODE_FIRST, ("", "d1"), 7)
        # The worker has refused: it lacks more than the index says.
        assert who(fleet.place(mode=mode, may_decode_first=False)) == ("p1", "d1")
    assert who(fleet.place(mode=Mode.DISAGGREGATED, prompt_tokens=21 * BLOCK)) == ("p1", "d1")


def test_a_clients_threshold_counts_where_nothing_is_handed_over():
    fleet = a_pair_of_which_decode_has_most()
    short = {"prompt_tokens": 5, "hashes": (), "cache_hit_threshold": 0.5}

    assert fleet.place(**short, mode=Mode.DISAGGREGATED).hit_share_min is None
    # It has been tried where it could be cached, and no prefill worker can help.
    assert fleet.place(**short, mode=Mode.DECODE_FIRST).hit_share_min == 0.0


def test_connectors_that_move_partial_blocks_get_short_prompts_too():
    fleet = Fleet()
    for name, role in (("p1", Role.PREFILL), ("d1", Role.DECODE)):
        fleet.cluster.record(record(name, role=role, connector="NixlConnector"), NOW)

    assert who(fleet.place(prompt_tokens=5, hashes=())) == ("p1", "d1")


def test_one_worker_of_both_roles_needs_no_other_reason():
    fleet = Fleet()
    fleet.add("b1")

    assert fleet.place(prompt_tokens=5, hashes=()).why == "one worker is best for both legs"


KV_TOKENS = 100 * 32


def two_decode_workers_of_which_one_is_full(in_use: int) -> Fleet:
    """All but 10 blocks of d1 are used. It holds 20 of the prompt, of which a running request has ``in_use``."""
    fleet = Fleet()
    fleet.add("b1", held=20, kv_tokens_used=KV_TOKENS - 10 * 32, kv_tokens_total=KV_TOKENS)
    fleet.add("b2", kv_tokens_total=KV_TOKENS, prefill_token_s=0.002)
    fleet.cluster.leg_started(WorkerId("b1"), Sent(NOW, 0, 0, 0, PROMPT.hashes[:in_use]))
    return fleet


@pytest.mark.parametrize(("in_use", "chosen"), [(20, "b1"), (16, "b1"), (11, "b2"), (0, "b2")])
def test_blocks_that_running_requests_share_need_no_room(in_use, chosen):
    """The prompt has 20 blocks and a part, and its answer 4: with 16 shared, it needs 8 and a part. Cached blocks that
    no request uses count as free, and are not free for the answer when the prompt uses them.
    """
    fleet = two_decode_workers_of_which_one_is_full(in_use)
    placement = fleet.place(tokens_out=4 * BLOCK, fetch_tokens_min=100_000)

    assert placement.decode.record.worker_id == chosen


def test_what_has_ended_is_not_shared_any_more():
    fleet = two_decode_workers_of_which_one_is_full(in_use=0)
    legs = [Sent(NOW, 0, 0, 0, PROMPT.hashes) for _ in range(2)]
    chosen = []
    for leg in legs:
        fleet.cluster.leg_started(WorkerId("b1"), leg)
    for leg in legs:
        chosen.append(fleet.place(tokens_out=4 * BLOCK, fetch_tokens_min=100_000).decode.record.worker_id)
        fleet.cluster.leg_ended(WorkerId("b1"), leg, 0, 0)
    chosen.append(fleet.place(tokens_out=4 * BLOCK, fetch_tokens_min=100_000).decode.record.worker_id)

    assert chosen == ["b1", "b1", "b2"]


def test_other_prompts_share_nothing():
    fleet = two_decode_workers_of_which_one_is_full(in_use=0)
    fleet.cluster.leg_started(WorkerId("b1"), Sent(NOW, 0, 0, 0, (1, 2, 3, *range(104, 121))))

    assert fleet.place(tokens_out=4 * BLOCK, fetch_tokens_min=100_000).decode.record.worker_id == "b2"
    assert fleet.cluster.shared_tokens(WorkerId("b1"), PROMPT.hashes) == 3 * BLOCK


def test_a_busy_batch_keeps_prefill_off_a_decode_worker():
    fleet = a_pair_of_which_decode_has_most(running=100)
    fleet.add("d2", Role.DECODE)

    assert who(fleet.place())[1] == "d2"


def test_decode_first_without_a_cached_prompt_becomes_disaggregated():
    fleet = Fleet()
    fleet.add("p1", Role.PREFILL)
    fleet.add("d1", Role.DECODE, held=5)

    assert fleet.place(mode=Mode.DECODE_FIRST).mode is Mode.DISAGGREGATED


def test_only_uncached_tokens_count_as_work():
    fleet = Fleet()
    fleet.add("cached", held=19, waiting_tokens=300)
    fleet.add("empty")

    assert fleet.place(fetch_tokens_min=100_000).decode.record.worker_id == "cached"


def test_just_dispatched_work_counts_before_a_report_includes_it():
    fleet = Fleet()
    fleet.add("w1")
    fleet.add("w2")
    fleet.cluster.leg_started(WorkerId("w1"), Sent(NOW, 50_000, 50_000))
    fleet.cluster.leg_started(WorkerId("w2"), Sent(NOW, 100, 100))

    assert {fleet.place().decode.record.worker_id for _ in range(4)} == {"w2"}


def test_a_slower_worker_gets_less():
    fleet = Fleet()
    fleet.add("slow", prefill_token_s=0.01)
    fleet.add("fast", prefill_token_s=0.001)

    assert {fleet.place().decode.record.worker_id for _ in range(4)} == {"fast"}


def test_the_cheapest_worker_that_meets_the_targets_is_chosen():
    fleet = Fleet()
    fleet.add("soon", decode_step_s=0.08, prefill_token_s=0.0005)
    fleet.add("cheap", decode_step_s=0.01, prefill_token_s=0.002)

    assert fleet.place(mode=Mode.AGGREGATED, tokens_out=500).decode.record.worker_id == "cheap"
    soon = fleet.place(mode=Mode.AGGREGATED, tokens_out=500, targets=Targets(ttft_s=0.5))
    assert soon.decode.record.worker_id == "soon"
    assert soon.predicted.total_s() <= 0.5


def test_without_targets_prompts_computed_lately_do_not_outweigh_the_cache():
    fleet = Fleet()
    fleet.add("cached", held=19, running=2)
    fleet.add("empty")
    fleet.cluster.report(load("cached", running=2, computed_tokens_total=100_000), NOW + 1.0)
    request = msgspec.structs.replace(PROMPT, fetch_tokens_min=100_000, tokens_out=1000)

    assert who(fleet.costs.place(request, NOW + 1.0)) == ("", "cached")


@pytest.mark.parametrize(("running", "chosen"), [(40, "cached"), (100, "empty")])
def test_without_targets_only_a_crowded_batch_outweighs_the_cache(running, chosen):
    fleet = Fleet()
    fleet.add("cached", held=19, running=running, decode_request_s=0.001)
    fleet.add("empty", decode_request_s=0.001)

    assert fleet.place(fetch_tokens_min=100_000, tokens_out=1000).decode.record.worker_id == chosen


@pytest.mark.parametrize(("running", "counts"), [(40, False), (100, True)])
def test_where_all_batches_are_crowded_the_time_of_others_counts(running, counts):
    fleet = Fleet()
    for number in range(2):
        fleet.add(f"w{number}", running=running, decode_request_s=0.001)

    assert {one.others_s > 0.0 for one in candidates(fleet.place())} == {counts}


@pytest.mark.parametrize(("evicted", "restored", "chosen"), [(0, 0, "empty"), (400, 8, "empty"), (400, 400, "holder")])
def test_a_fetched_prefix_costs_what_it_evicts_if_that_is_computed_again(evicted, restored, chosen):
    fleet = Fleet()
    fleet.add("holder", held=19, waiting_tokens=100)
    fleet.add("empty")
    fleet.cluster.report(load("empty"), NOW, (evicted, 0))
    fleet.cluster.report(load("holder", waiting_tokens=100), NOW, (0, restored))

    assert fleet.place().decode.record.worker_id == chosen


def test_a_few_evictions_cost_little():
    fleet = Fleet()
    fleet.add("w1")
    fleet.cluster.report(load("w1"), NOW, (1, 1))

    assert [one.others_s for one in candidates(fleet.place()) if one.part is Part.WHOLE] == [
        pytest.approx(len(PROMPT.hashes) * BLOCK * 0.00025 / EVICTED_MIN, rel=0.02)
    ]


def test_the_price_of_eviction_rises_with_the_load():
    prices_s = []
    for computed in (100, 2_100):
        fleet = Fleet()
        fleet.add("w1", computed_tokens_total=100)
        fleet.cluster.report(load("w1", computed_tokens_total=computed), NOW + 1.0, (500, 500))
        prices_s += [one.others_s for one in candidates(fleet.place()) if one.part is Part.WHOLE]

    idle_s, busy_s = prices_s
    assert idle_s == pytest.approx(len(PROMPT.hashes) * BLOCK * 0.00025, rel=0.02)
    assert busy_s > 1.04 * idle_s


def test_if_no_worker_meets_the_targets_the_cheapest_is_chosen():
    fleet = Fleet()
    fleet.add("w1")

    assert who(fleet.place(targets=Targets(ttft_s=0.001))) == ("", "w1")


def test_a_forced_worker_is_chosen():
    fleet = Fleet()
    for number in range(3):
        fleet.add(f"p{number}", Role.PREFILL)
        fleet.add(f"d{number}", Role.DECODE)
    forced = ForcedWorkers(prefill_worker=WorkerId("p2"), decode_worker=WorkerId("d1"), sources=(WorkerId("d0"),))

    placement = fleet.place(forced=forced)

    assert who(placement) == ("p2", "d1")
    assert [source.worker_id for source in placement.sources] == ["d0"]


def test_an_absent_forced_worker_is_not_replaced():
    fleet = Fleet()
    fleet.add("p1", Role.PREFILL)
    fleet.add("d1", Role.DECODE)
    request = msgspec.structs.replace(PROMPT, forced=ForcedWorkers(prefill_worker=WorkerId("p9")))

    assert isinstance(fleet.costs.place(request, NOW), Rejection)


def test_the_recorded_cost_of_the_choice_sums_its_parts():
    fleet = Fleet()
    for number in range(12):
        fleet.add(f"p{number}", Role.PREFILL, waiting_tokens=100 * number, held=number)
        fleet.add(f"d{number}", Role.DECODE, running=number)

    placement = fleet.place(may_decode_first=False)
    listed = candidates(placement)

    assert placement.considered == 24
    assert {(one.part, one.worker_id) for one in listed if one.chosen} == {
        (Part.PREFILL, who(placement)[0]),
        (Part.DECODE, who(placement)[1]),
    }
    for one in listed:
        ttft_s = (
            one.queue_s + one.fetch_s + one.prefill_s + one.handoff_s + one.decode_prefill_s + one.front_end_and_bus_s
        )
        parts = ttft_s + one.decode_s - one.within_s + one.others_s
        assert parts == pytest.approx(one.cost_s)


def test_the_shortlist_gives_the_same_choice_as_all_workers():
    fleets = [Fleet(PlacementPolicy(weighed_max=most, tie_s=0.0)) for most in (4, 1000)]
    for fleet in fleets:
        for number in range(60):
            role = list(Role)[number % 3]
            numbers = {"waiting_tokens": (number * 7919) % 5000, "running": (number * 31) % 17}
            fleet.add(f"w{number}", role, held=(number * 13) % 21, prefill_token_s=0.0001 * (1 + number % 5), **numbers)

    for what in (
        {},
        {"mode": Mode.DISAGGREGATED},
        {"mode": Mode.AGGREGATED},
        {"targets": Targets(ttft_s=0.3, itl_s=0.02)},
    ):
        few, all_of_them = (fleet.place(**what) for fleet in fleets)
        assert who(few) == who(all_of_them)
        assert few.predicted.total_s() == pytest.approx(all_of_them.predicted.total_s())
        assert few.predicted_itl_s == pytest.approx(all_of_them.predicted_itl_s)


def test_the_record_always_has_pairs_and_single_workers():
    fleet = Fleet()
    fleet.add("p1", Role.PREFILL)
    fleet.add("b1", Role.BOTH)

    for what in ({}, {"mode": Mode.DISAGGREGATED}):
        listed = candidates(fleet.place(**what))
        assert {one.part for one in listed} >= {Part.PREFILL, Part.DECODE}
        assert Part.WHOLE in {one.part for one in listed}


def test_a_full_forced_worker_is_waited_for():
    fleet = Fleet()
    fleet.add("p1", Role.PREFILL, legs=16)
    fleet.add("p2", Role.PREFILL)
    fleet.add("d1", Role.DECODE)

    for worker_id, reason in (("p1", Reason.WORKER_BUSY), ("p9", Reason.NO_WORKER)):
        request = msgspec.structs.replace(PROMPT, forced=ForcedWorkers(prefill_worker=WorkerId(worker_id)))
        refused = fleet.costs.place(request, NOW)
        assert isinstance(refused, Rejection)
        assert refused.reason is reason
