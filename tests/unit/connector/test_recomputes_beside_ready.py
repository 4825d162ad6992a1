"""What vLLM's scheduler computes, step by step, of requests whose KV was lost, beside requests that are ready."""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from connector.scheduler.recompute_share import RecomputeShare
from shared.contracts.kv_exchange import KvTransferReport, LegOrder
from tests.unit.connector.real_scheduler import BLOCK_TOKENS, TOKENS_A_STEP, make_scheduler
from tests.unit.connector.test_arrived_blocks import process

SHARE = 20
LOST, READY = LegOrder(recomputes=True), LegOrder()
PROMPT = 150
STEPS_MAX = 40


class FixedShare(RecomputeShare):
    """A share that does not depend on how fast this machine is; remembers the targets that it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[float] = []

    def tokens(self, target_s: float) -> float:
        self.targets.append(target_s)
        return SHARE


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def scheduler(tmp_path, request):
    scheduler = make_scheduler(tmp_path, asynchronous=request.param, with_connector=True)
    scheduler.connector.connector_scheduler.share = FixedShare()
    return scheduler


@pytest.fixture
def share(scheduler) -> FixedShare:
    return scheduler.connector.connector_scheduler.share


def add(scheduler, name: str, order: LegOrder, tokens: int = PROMPT, answer: int = 30) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from connector.connector import PARAMS

    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256_cbor)
    prompt = [ord(name[-1]) + number for number in range(tokens)]
    request = Request(name, prompt, SamplingParams(max_tokens=answer, ignore_eos=True), None, block_hasher=hasher)
    request.kv_transfer_params = {PARAMS: order}
    scheduler.add_request(request)


def step(scheduler) -> dict[str, int]:
    """One step, computed; the tokens of each request."""
    scheduled = scheduler.schedule()
    process(scheduler, scheduled)
    return dict(scheduled.num_scheduled_tokens)


def until_computed(scheduler, *names: str) -> list[dict[str, int]]:
    """The steps until the prompts of these requests are computed."""
    steps: list[dict[str, int]] = []
    while any(sum(one.get(name, 0) for one in steps) < PROMPT for name in names):
        assert len(steps) < STEPS_MAX, steps
        steps.append(step(scheduler))
    return steps


def with_ready(scheduler, order: LegOrder = READY) -> None:
    """A request that decodes."""
    add(scheduler, "ready", order, tokens=10)
    step(scheduler)


def test_a_recompute_gets_its_share_of_each_step_beside_a_ready_request(scheduler):
    with_ready(scheduler)
    add(scheduler, "lost", LOST)

    steps = until_computed(scheduler, "lost")

    assert [one["lost"] for one in steps] == [SHARE] * (PROMPT // SHARE) + [PROMPT % SHARE]
    assert all(one["ready"] == 1 for one in steps)


def test_several_recomputes_share_the_step_and_the_first_is_done_first(scheduler):
    with_ready(scheduler)
    for name in ("lost-a", "lost-b", "lost-c"):
        add(scheduler, name, LOST)

    steps = until_computed(scheduler, "lost-a", "lost-b", "lost-c")

    assert steps[0] == {"ready": 1, "lost-a": SHARE, "lost-b": 1, "lost-c": 1}
    assert all(sum(one.values()) <= 1 + SHARE + 2 for one in steps)
    ends = [max(at for at, one in enumerate(steps) if one.get(name, 0) > 1) for name in ("lost-a", "lost-b", "lost-c")]
    assert ends == sorted(ends)


def test_a_request_that_comes_behind_a_recompute_is_in_the_next_step(scheduler):
    with_ready(scheduler)
    add(scheduler, "lost", LOST)
    step(scheduler)
    add(scheduler, "next", READY, tokens=10)

    assert step(scheduler) == {"ready": 1, "lost": SHARE, "next": 10}


def test_without_a_ready_request_a_recompute_takes_whole_steps_after_the_first(scheduler):
    add(scheduler, "lost", LOST)

    steps = [one["lost"] for one in until_computed(scheduler, "lost")]
    assert steps == [SHARE, TOKENS_A_STEP, TOKENS_A_STEP, PROMPT - SHARE - 2 * TOKENS_A_STEP]


def test_recomputes_alone_do_not_slow_each_other(scheduler):
    for name in ("lost-a", "lost-b"):
        add(scheduler, name, LOST)
    step(scheduler)  # Both have just come: either may be ready.

    assert sum(step(scheduler).values()) == TOKENS_A_STEP


def test_a_recompute_goes_on_at_full_speed_when_the_ready_request_ends(scheduler):
    from vllm.v1.request import RequestStatus

    with_ready(scheduler)
    add(scheduler, "lost", LOST)
    step(scheduler)
    scheduler.finish_requests(["ready"], RequestStatus.FINISHED_ABORTED)

    assert step(scheduler) == {"lost": TOKENS_A_STEP}


def test_a_prompt_that_was_computed_nowhere_is_not_bounded(scheduler):
    with_ready(scheduler)
    add(scheduler, "new", READY)

    assert step(scheduler) == {"ready": 1, "new": TOKENS_A_STEP - 1}


def test_the_last_partial_block_of_a_ready_request_is_no_recompute(scheduler):
    with_ready(scheduler)
    add(scheduler, "lost", LOST)
    step(scheduler)
    add(scheduler, "soon", LOST, tokens=BLOCK_TOKENS + 1)

    assert step(scheduler) == {"ready": 1, "lost": SHARE, "soon": BLOCK_TOKENS + 1}


def test_the_shortest_target_of_the_ready_requests_counts(scheduler, share):
    with_ready(scheduler, LegOrder(itl_target_s=0.05))
    add(scheduler, "second", LegOrder(itl_target_s=0.04), tokens=10)
    step(scheduler)
    add(scheduler, "lost", LegOrder(recomputes=True, itl_target_s=0.01))

    until_computed(scheduler, "lost")

    assert set(share.targets) == {0.04}


def test_a_ready_request_without_a_target_asks_for_none(scheduler, share):
    with_ready(scheduler)
    add(scheduler, "lost", LegOrder(recomputes=True, itl_target_s=0.01))

    until_computed(scheduler, "lost")

    assert set(share.targets) == {inf}


def test_the_report_says_for_how_long_a_recompute_was_slowed(scheduler):
    from connector.connector import PARAMS

    with_ready(scheduler)
    add(scheduler, "lost", LOST, answer=1)
    outputs = []
    for _time in range(PROMPT // SHARE + 2):
        scheduled = scheduler.schedule()
        outputs += [one for each in process(scheduler, scheduled).values() for one in each.outputs]

    (ended,) = [one for one in outputs if one.request_id == "lost" and one.finish_reason is not None]
    report = msgspec.msgpack.decode(ended.kv_transfer_params[PARAMS], type=KvTransferReport)
    assert report.recompute_slowed_s > 0
    assert not scheduler.connector.connector_scheduler.share.slowed


def test_an_aborted_recompute_is_forgotten(scheduler, share):
    from vllm.v1.request import RequestStatus

    with_ready(scheduler)
    add(scheduler, "lost", LOST)
    step(scheduler)
    assert share.slowed
    scheduler.finish_requests(["lost"], RequestStatus.FINISHED_ABORTED)

    assert not share.slowed


DECODE_S, TOKEN_S = 0.010, 0.000_1
"""What a step takes, and each token of a prompt in it."""
BATCH, APART_S = 8, 0.004
LOST_PROMPT, TOKENS_MAX = 120, 512


class TimedShare(RecomputeShare):
    """The rule on the test's clock."""

    clock_s = 100.0

    def allow(self, request_id: str, tokens: int, now: float) -> int:
        return super().allow(request_id, tokens, self.clock_s)

    def made(self, prompt_tokens: int, now: float) -> None:
        super().made(prompt_tokens, self.clock_s)
        self.clock_s += DECODE_S + prompt_tokens * TOKEN_S

    def ended(self, now: float) -> None:
        super().ended(self.clock_s)


def second_tokens_s(scheduler, lost: int, itl_target_s: float) -> list[float]:
    """Times from the first request of a batch to the second tokens of those that are ready. The lost ones come first."""
    share = scheduler.connector.connector_scheduler.share = TimedShare()
    add(scheduler, "learn", READY, answer=5)
    while scheduler.has_unfinished_requests():
        step(scheduler)
    begun_s, second_s, made, at = share.clock_s, dict[str, float](), dict[str, int](), 0
    while at < BATCH or scheduler.has_unfinished_requests():
        while at < BATCH and begun_s + at * APART_S <= share.clock_s:
            order = LegOrder(recomputes=True, itl_target_s=itl_target_s)
            add(scheduler, f"{lost}-{at}", order, LOST_PROMPT if at < lost else 2, answer=10)
            at += 1
        scheduled = scheduler.schedule()
        if not scheduled.num_scheduled_tokens:
            share.clock_s = max(share.clock_s, begun_s + at * APART_S)
        for each in process(scheduler, scheduled).values():
            for output in each.outputs:
                made[output.request_id] = made.get(output.request_id, 0) + len(output.new_token_ids)
                if made[output.request_id] >= 2:
                    second_s.setdefault(output.request_id, share.clock_s - begun_s)
    return [second_s[f"{lost}-{one}"] for one in range(lost, BATCH)]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("lost", [1, 2, 4])
def test_second_tokens_of_ready_requests_are_at_most_a_fifth_later(tmp_path, asynchronous, lost):
    without, bound, free = (
        second_tokens_s(
            make_scheduler(tmp_path, asynchronous=asynchronous, with_connector=True, tokens_a_step=TOKENS_MAX),
            count,
            itl_target_s,
        )
        for count, itl_target_s in ((0, 0.0), (lost, 0.0), (lost, 60.0))
    )
    without = without[lost:]

    assert all(late <= 1.2 * early for late, early in zip(bound, without, strict=True)), (bound, without)
    assert max(late / early for late, early in zip(free, without, strict=True)) > 1.3
