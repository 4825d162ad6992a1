"""Admission queues, starts and rejects requests, on simple engines in virtual time."""

from __future__ import annotations

import math

import pytest

from services.router.admission.admission import LATE_LOAD_MAX, LATE_SHARE_MAX, RECHECK_S, WAIT_TARGET_SHARE
from services.router.admission.queues import LOAD_MEMORY_S, WAITED_S_MIN
from services.router.placement.placement import Placement, Rejection
from services.router.request.facts import ForcedWorkers
from shared.contracts.failures import Reason
from tests.unit.router.engines import Engine, Engines, ask

A_SECOND = 1000
"""Prompt tokens that an engine computes in a second."""


def order(engines: Engines, *entries) -> list:
    """The entries in the order in which they started."""
    return [entry for entry in engines.placed_at if entry in entries]


def test_an_idle_engine_gets_a_request_at_once():
    engines = Engines(Engine("w1"))

    entry = engines.offer()

    assert engines.placed_at[entry] == 0.0
    assert engines.admission.waiting == 0
    assert engines.admission.wakes_at(0.0) is None


def test_the_router_queues_what_exceeds_an_engines_busy_target():
    engines = Engines(Engine("w1"), engine_queue_s_max=0.25)

    entries = [engines.offer(100) for _ in range(10)]

    assert [entry in engines.placed_at for entry in entries] == [True] * 3 + [False] * 7
    assert engines.admission.waiting == 7


def test_queued_requests_start_before_their_engine_idles():
    engines = Engines(Engine("w1"))

    for _ in range(20):
        engines.offer(100)
    engines.run()

    assert engines.admission.waiting == 0
    assert engines.now == pytest.approx(2.0)  # as long as it takes to compute all: no pause between


def test_queued_small_prompts_start_together():
    engines = Engines(Engine("w1"))
    engines.offer(A_SECOND)
    small = [engines.offer(1) for _ in range(50)]

    decided = engines.admission.schedule(0.8)  # the engine has a fifth of a second left to do

    assert [entry for entry, _placed in decided] == small


def test_requests_started_together_stay_within_the_busy_target():
    engines = Engines(Engine("w1"))
    engines.offer(A_SECOND)
    for _ in range(10):
        engines.offer(100)

    assert len(engines.admission.schedule(0.8)) == 1


def test_full_workers_queue_requests_instead_of_rejecting_them():
    engines = Engines(Engine("w1", legs_max=1, decode_s=1.0))
    first, second = engines.offer(10), engines.offer(10)

    engines.run()

    assert engines.placed_at[second] == pytest.approx(1.01)
    assert engines.reason(first) is engines.reason(second) is None


def test_without_workers_requests_are_rejected_at_once():
    engines = Engines(Engine("w1"))

    entry = engines.offer(model="other")

    assert engines.reason(entry) is Reason.NO_WORKER


def test_queued_requests_are_rejected_when_the_last_worker_leaves():
    engines = Engines(Engine("w1"))
    engines.offer(A_SECOND)
    waiting = engines.offer(A_SECOND)

    engines.engines.clear()
    decided = engines.admission.schedule(0.5)

    assert [(entry, no.reason) for entry, no in decided if isinstance(no, Rejection)] == [(waiting, Reason.NO_WORKER)]


def test_more_urgent_priorities_are_served_first():
    engines = Engines(Engine("w1"))
    engines.offer(A_SECOND)
    patient, urgent = engines.offer(priority=10), engines.offer(priority=-10)

    engines.run()

    assert order(engines, patient, urgent) == [urgent, patient]


def test_within_a_tenant_the_earliest_deadline_comes_first():
    engines = Engines(Engine("w1"), late_ratio=10.0)
    engines.offer(A_SECOND)
    none, late, soon = engines.offer(900), engines.offer(900, ttft_s=20.0), engines.offer(900, ttft_s=10.0)

    engines.run()

    assert order(engines, none, late, soon) == [soon, late, none]


def test_without_targets_the_queue_is_first_in_first_out():
    engines = Engines(Engine("w1"))
    engines.offer(A_SECOND)
    entries = [engines.offer(500) for _ in range(5)]

    engines.run()

    assert order(engines, *entries) == entries


def test_without_targets_short_prompts_overtake_by_ten_times_the_difference():
    engines = Engines(Engine("w1"))
    engines.offer(10_000)
    long = engines.offer(1000)
    engines.now = 4.0
    short = engines.offer(500)
    engines.now = 6.0
    too_late = engines.offer(500)

    engines.run()

    assert order(engines, long, short, too_late) == [short, long, too_late]


def test_a_light_tenant_does_not_wait_behind_a_heavy_one():
    engines = Engines(Engine("w1"))
    greedy = [engines.offer(500, tenant="greedy") for _ in range(20)]
    modest = engines.offer(500, tenant="modest")

    engines.run()

    assert sum(engines.placed_at[entry] > engines.placed_at[modest] for entry in greedy) >= 16


def test_twice_the_weight_gives_twice_the_service():
    engines = Engines(Engine("w1"), tenant_weights={"paying": 2.0})
    for _ in range(40):
        engines.offer(500, tenant="paying")
        engines.offer(500, tenant="other")

    engines.run(until=12.0)

    begun = engines.engines["w1"].begun
    assert begun.count("paying") == pytest.approx(2 * begun.count("other"), abs=2)


def test_several_sequences_in_a_request_get_no_more_service_than_in_requests_of_their_own():
    engines = Engines(Engine("w1"))
    engines.offer(tenant="first")
    for _ in range(30):
        engines.offer(tokens_out=100, sequences=8, tenant="batches")
        engines.offer(tokens_out=100, tenant="singles")

    engines.run(until=2.05)

    begun = engines.engines["w1"].begun
    assert begun.count("singles") >= 4 * begun.count("batches")


def test_a_request_passes_others_that_wait_for_another_worker():
    engines = Engines(Engine("w1"), Engine("w2"))
    engines.offer(A_SECOND, forced=ForcedWorkers(decode_worker="w1"))
    stuck = engines.offer(100, forced=ForcedWorkers(decode_worker="w1"))

    passing = engines.offer(100, forced=ForcedWorkers(decode_worker="w2"))

    assert stuck not in engines.placed_at
    assert engines.placed_at[passing] == 0.0


def test_an_idle_worker_is_not_waited_for_because_it_computed_a_long_prompt():
    engines = Engines(Engine("w1", decode_s=3.0, computed_lately=True))
    engines.offer(10, itl_s=0.1)
    engines.run(until=1.0)

    entry = engines.offer(10, itl_s=0.1)

    assert engines.placed_at[entry] == 1.0


def test_a_worker_stays_reserved_for_the_earlier_queued_request():
    engines = Engines(Engine("w1", decode_s=3.0), Engine("w2"))
    first = engines.offer(10, forced=ForcedWorkers(decode_worker="w1"))
    waits = engines.offer(10, forced=ForcedWorkers(decode_worker="w1"), itl_s=0.015)  # for the batch to be smaller

    behind = engines.offer(10, forced=ForcedWorkers(decode_worker="w1"))
    engines.run()

    assert engines.placed_at[waits] == pytest.approx(engines.first_token_at[first] + 3.0)
    assert engines.placed_at[behind] >= engines.placed_at[waits]


def test_an_unreachable_itl_target_does_not_delay_requests():
    engines = Engines(Engine("w1", decode_s=1.0))

    entry = engines.offer(10, itl_s=0.001)

    assert engines.placed_at[entry] == 0.0


def test_requests_waiting_for_one_worker_do_not_hide_startable_ones():
    engines = Engines(Engine("w1"), Engine("w2", models=("m", "other")))
    engines.offer(100 * A_SECOND, forced=ForcedWorkers(decode_worker="w1"))
    engines.offer(A_SECOND, forced=ForcedWorkers(decode_worker="w2"))
    for _ in range(50):
        engines.offer(100, forced=ForcedWorkers(decode_worker="w1"))
    hidden = engines.offer(100, forced=ForcedWorkers(decode_worker="w2"))

    engines.run(until=3.0)

    assert 0.7 < engines.placed_at[hidden] < 1.3


def test_one_models_queue_does_not_block_another_model():
    engines = Engines(Engine("w1"), Engine("w2", models=("other",)))
    for _ in range(50):
        engines.offer(A_SECOND)

    entry = engines.offer(model="other")

    assert engines.placed_at[entry] == 0.0


def test_a_full_queue_rejects_with_a_retry_time():
    engines = Engines(Engine("w1"), queue_max=5)

    entries = [engines.offer(A_SECOND) for _ in range(10)]

    refused = [entry for entry in entries if entry in dict(engines.ends) and engines.reason(entry)]
    assert (len(refused), engines.admission.waiting) == (4, 5)
    assert {engines.reason(entry) for entry in refused} == {Reason.OVERLOADED}
    assert all(no.retry_after_s >= 1.0 for _entry, no in engines.ends if isinstance(no, Rejection))


def test_a_full_queue_evicts_for_a_tenant_below_its_share():
    engines = Engines(Engine("w1"), queue_max=5)
    greedy = [engines.offer(A_SECOND, tenant="greedy") for _ in range(6)]

    modest = engines.offer(A_SECOND, tenant="modest")

    assert engines.reason(greedy[-1]) is Reason.OVER_SHARE
    assert modest not in dict(engines.ends)
    assert engines.admission.waiting == 5


def test_a_tenant_at_its_share_of_a_full_queue_is_rejected():
    engines = Engines(Engine("w1"), queue_max=4)
    for _ in range(3):
        engines.offer(A_SECOND, tenant="greedy")
        engines.offer(A_SECOND, tenant="modest")

    entry = engines.offer(A_SECOND, tenant="greedy")

    assert engines.reason(entry) is Reason.OVER_SHARE


def test_a_full_queue_evicts_for_a_more_urgent_request():
    engines = Engines(Engine("w1"), queue_max=2)
    engines.offer(A_SECOND)
    patient = [engines.offer(A_SECOND, priority=5) for _ in range(2)]

    engines.offer(A_SECOND, priority=0)
    less = engines.offer(A_SECOND, priority=9)

    assert engines.reason(patient[1]) is Reason.OVERLOADED
    assert engines.reason(less) is Reason.OVERLOADED


def test_each_tenants_queue_is_bounded():
    engines = Engines(Engine("w1"), tenant_queue_max=2)
    engines.offer(A_SECOND, tenant="a")
    entries = [engines.offer(A_SECOND, tenant="a") for _ in range(3)]
    other = engines.offer(A_SECOND, tenant="b")

    assert engines.reason(entries[2]) is Reason.OVER_SHARE
    assert other not in dict(engines.ends)


def test_requests_that_would_miss_their_target_are_rejected_on_arrival():
    engines = Engines(Engine("w1"), late_ratio=1.0)
    for _ in range(20):
        engines.offer(A_SECOND)
    engines.run(until=WAITED_S_MIN + 3.0)

    sooner = engines.offer(100, ttft_s=2.0)
    entry = engines.offer(100, ttft_s=2.0, priority=1)

    assert sooner not in dict(engines.ends)  # it comes before all that have no target
    result = dict(engines.ends)[entry]
    assert isinstance(result, Rejection)
    assert result.reason is Reason.OVERLOADED
    assert 10.0 < (result.retry_after_s or 0) < 25.0  # about 16 s of work are before it


def test_queued_requests_are_rejected_once_too_late():
    engines = Engines(Engine("w1"), late_ratio=1.0)
    engines.offer(10 * A_SECOND)
    entry = engines.offer(100, ttft_s=2.0)
    waits_s = WAIT_TARGET_SHARE * 2.0 - 0.1  # it takes a tenth of a second itself

    engines.run(until=waits_s - 0.1)
    assert entry not in dict(engines.ends)
    engines.run(until=waits_s + 0.1)

    assert engines.reason(entry) is Reason.OVERLOADED


def test_a_target_that_an_idle_engine_misses_rejects_nothing():
    engines = Engines(Engine("w1"))
    engines.offer(100)
    engines.offer(200)

    entry = engines.offer(5 * A_SECOND, ttft_s=0.1)
    engines.run()

    assert engines.reason(entry) is None


def test_late_requests_are_rejected_until_the_load_is_low():
    engines = Engines(Engine("w1", decode_s=300.0))
    for _ in range(20):
        engines.offer(A_SECOND)
        engines.run(until=engines.now + 1.0)

    rushed = engines.offer(5 * A_SECOND, ttft_s=0.1)
    again_s = dict(engines.ends)[rushed].retry_after_s
    engines.run(until=engines.now + again_s / 4)
    sooner = engines.offer(5 * A_SECOND, ttft_s=0.1)
    engines.run(until=engines.now + again_s * 3 / 4)
    later = engines.offer(5 * A_SECOND, ttft_s=0.1)

    assert again_s == pytest.approx(LOAD_MEMORY_S * math.log(1 / LATE_LOAD_MAX), abs=2.0)
    assert [engines.reason(entry) for entry in (rushed, sooner, later)] == [Reason.OVERLOADED, Reason.OVERLOADED, None]


def test_late_requests_are_rejected_while_others_wait():
    engines = Engines(Engine("w1"))
    engines.offer(A_SECOND)
    engines.offer(A_SECOND)

    entry = engines.offer(5 * A_SECOND, ttft_s=0.1)

    assert engines.reason(entry) is Reason.OVERLOADED


def test_late_requests_take_a_small_share_of_busy_engines():
    engines = Engines(*(Engine(f"w{number}") for number in range(8)), engine_queue_s_max=60.0)
    asked = []
    for _ in range(100):
        engines.offer(100)
        asked.append(engines.offer(A_SECOND, ttft_s=0.5))
        engines.run(until=engines.now + 0.09)  # the other one is still being computed

    served = [entry for entry in asked if entry in engines.placed_at]
    assert len(served) == math.ceil(engines.now * 8 * LATE_SHARE_MAX / 1.0)
    again_s = [no.retry_after_s for _entry, no in engines.ends if isinstance(no, Rejection)]
    assert max(again_s) == pytest.approx(1.0 / (8 * LATE_SHARE_MAX), abs=0.1)


def test_idle_engines_serve_late_requests():
    engines = Engines(Engine("w1"))
    asked = []
    for _ in range(3):
        asked.append(engines.offer(A_SECOND, ttft_s=0.5))
        engines.run()

    assert [engines.reason(entry) for entry in asked] == [None] * 3


def test_the_operator_can_have_late_requests_always_rejected():
    engines = Engines(Engine("w1"), serve_late=False)

    assert engines.reason(engines.offer(5 * A_SECOND, ttft_s=0.1)) is Reason.OVERLOADED


def test_no_request_waits_beyond_the_maximum_wait():
    engines = Engines(Engine("w1"), queue_s_max=3.0)
    engines.offer(10 * A_SECOND)
    entry = engines.offer()

    engines.run(until=5.0)

    assert engines.reason(entry) is Reason.OVERLOADED


def test_a_request_that_times_out_in_the_queue_gets_that_reason():
    engines = Engines(Engine("w1"))
    engines.offer(10 * A_SECOND)
    entry = engines.offer(ends_at=2.0)

    engines.run(until=3.0)

    assert engines.reason(entry) is Reason.DEADLINE


def test_cancelled_requests_leave_the_queue():
    engines = Engines(Engine("w1"))
    engines.offer(A_SECOND)
    gone, stays = engines.offer(500), engines.offer(500)

    engines.withdraw(gone)
    engines.run()

    assert gone not in engines.placed_at
    assert isinstance(dict(engines.ends)[stays], Placement)
    assert engines.admission.waiting == 0


def test_a_scheduling_pass_is_bounded_for_any_queue_length():
    engines = Engines(Engine("w1"), queue_max=1000)
    for _ in range(500):
        engines.offer(A_SECOND)
    before = engines.places

    engines.admission.schedule(engines.now)

    assert engines.places - before <= 8


def test_longer_completions_are_charged_when_they_end():
    engines = Engines(Engine("w1"))
    admission = engines.admission
    entry = engines.offer(100, tenant="a", tokens_out=10)
    share = entry.queue.share
    expected = share.served("a")

    admission.ended(entry, 100, 500)
    admission.ended(entry, 100, 500)  # once only

    assert share.served("a") == expected + 2 * 490


def test_cached_tokens_are_not_charged():
    engines = Engines(Engine("w1"))
    admission = engines.admission
    entry = engines.offer(100, tenant="a", tokens_out=1)

    admission.ended(entry, 0, 1)

    assert entry.queue.share.served("a") == 2.0


def test_a_default_request_has_no_tenant_priority_or_forced_workers():
    request = ask()

    assert (request.tenant, request.priority, request.forced) == ("", 0, None)


def test_changes_cause_passes_a_moment_apart_while_a_predicted_queue_lasts():
    engines = Engines(Engine("w1"))
    engines.offer(A_SECOND)
    engines.offer(A_SECOND)
    admission = engines.admission

    assert admission.pass_at(0.01) == pytest.approx(RECHECK_S)
    assert admission.pass_at(0.2) == pytest.approx(0.2)
    admission.schedule(0.74)
    assert admission.pass_at(0.741) == pytest.approx(0.74 + RECHECK_S)
    assert admission.pass_at(0.751) == 0.751  # the worker has less than a quarter of a second left to do


def test_requests_that_no_worker_has_room_for_wait_for_any_change():
    engines = Engines(Engine("w1", legs_max=1, decode_s=1.0))
    engines.offer(10)
    engines.offer(10)

    assert engines.admission.pass_at(0.001) == 0.001


def test_requests_that_wait_for_a_long_batch_wait_for_any_change():
    engines = Engines(Engine("w1", decode_s=1.0))
    for _ in range(3):
        engines.offer(10, itl_s=0.025)

    assert engines.admission.waiting == 1
    assert engines.admission.pass_at(0.031) == 0.031


def test_requests_behind_many_that_wait_for_one_worker_begin_at_the_next_pass():
    engines = Engines(Engine("w1"), Engine("w2"))
    for name in ("w1", "w2"):
        engines.offer(A_SECOND, forced=ForcedWorkers(decode_worker=name))
    for _ in range(50):
        engines.offer(100, forced=ForcedWorkers(decode_worker="w1"))
    hidden = engines.offer(100, forced=ForcedWorkers(decode_worker="w2"))
    engines.engines["w2"].free_at = 0.3

    assert [entry for entry, _placed in engines.admission.schedule(0.3)] == [hidden]


def test_each_request_is_placed_again_in_turn_although_others_wait_for_the_same_worker():
    engines = Engines(Engine("w1"))
    for _ in range(8):
        engines.offer(A_SECOND, forced=ForcedWorkers(decode_worker="w1"))
    free = engines.offer(A_SECOND)
    engines.engines["w2"] = Engine("w2")

    decided = [entry for _ in range(10) for entry, _placed in engines.admission.schedule(0.0)]

    assert decided == [free]
