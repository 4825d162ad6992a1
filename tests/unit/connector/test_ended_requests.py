"""A request that ends with a step's output makes no step of its own, and the model runner forgets it with the next one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.unit.connector.real_scheduler import BLOCK_TOKENS, make_scheduler

PROMPT = list(range(20))


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def scheduler(tmp_path, request):
    return make_scheduler(tmp_path, asynchronous=request.param, with_connector=True)


def add(scheduler, request_id: str, tokens: int = 1) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256_cbor)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    prompt = [ord(request_id), *PROMPT]
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256_cbor)
    scheduler.add_request(Request(request_id, prompt, params, None, block_hasher=hasher))


def step(scheduler, between=lambda: None) -> Any:
    """One step in which each request gets a token; returns what the model runner was told. ``between`` runs while the
    step is computed.
    """
    from vllm.v1.outputs import ModelRunnerOutput

    scheduled = scheduler.schedule()
    ids = list(scheduled.num_scheduled_tokens)
    between()
    places = {name: at for at, name in enumerate(ids)}
    scheduler.update_from_output(scheduled, ModelRunnerOutput(ids, places, sampled_token_ids=[[5] for _ in ids]))
    return scheduled


def abort(scheduler, request_id: str) -> None:
    from vllm.v1.request import RequestStatus

    scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)


def test_an_engine_whose_last_request_has_ended_is_idle_at_once(scheduler):
    add(scheduler, "a")
    step(scheduler)

    assert not scheduler.requests
    assert not scheduler.has_requests()


def test_the_next_step_with_tokens_tells_the_model_runner_who_has_ended(scheduler):
    add(scheduler, "a")
    step(scheduler)
    add(scheduler, "b")

    told = step(scheduler)

    assert told.num_scheduled_tokens == {"b": len(PROMPT) + 1}
    assert told.finished_req_ids == {"a"}
    assert not scheduler.has_requests()


def test_a_request_that_ends_in_no_step_makes_one(scheduler):
    add(scheduler, "a", tokens=4)
    step(scheduler)
    abort(scheduler, "a")

    assert scheduler.has_requests(), "the front end would count it as running"
    assert step(scheduler).finished_req_ids == {"a"}
    assert not scheduler.has_requests()


def test_one_that_ends_in_no_step_after_another_with_a_step_makes_one(scheduler):
    add(scheduler, "a")
    add(scheduler, "b", tokens=4)
    step(scheduler)
    assert set(scheduler.requests) == {"b"}
    abort(scheduler, "b")

    assert scheduler.has_requests()
    assert step(scheduler).finished_req_ids == {"a", "b"}
    assert not scheduler.has_requests()


def test_one_that_ends_while_a_step_is_computed_is_told_with_its_output(scheduler):
    add(scheduler, "a", tokens=4)
    step(scheduler, between=lambda: abort(scheduler, "a"))

    assert not scheduler.has_requests()


@dataclass
class Step:
    """Fields of vLLM's ``SchedulerOutput`` in a step without tokens; the last two are of 0.33."""

    total_num_scheduled_tokens: int = 0
    finished_req_ids: set[str] = field(default_factory=set)
    skip_drafts: bool = True
    encoder_input_updates: dict[str, dict[int, None]] = field(default_factory=dict)


def test_a_step_without_tokens_is_for_the_model_runner_only_if_it_says_something():
    pytest.importorskip("vllm")
    from connector.scheduler.engine_scheduler import says_anything

    assert not says_anything(Step())
    assert says_anything(Step(finished_req_ids={"a"}))
    assert says_anything(Step(encoder_input_updates={"a": {0: None}}))
    assert says_anything(Step(total_num_scheduled_tokens=1))
