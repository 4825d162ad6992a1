"""A request of which too little is cached is refused by Baton's scheduler, and nothing of it remains."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shared.contracts.kv_exchange import KvTransferReport, LegOrder
from tests.unit.connector.real_scheduler import make_scheduler

PROMPT = list(range(80))


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def scheduler(tmp_path, request):
    return make_scheduler(tmp_path, asynchronous=request.param, with_connector=True)


def params_name() -> str:
    from connector.connector import PARAMS  # Imports vLLM.

    return PARAMS


def add(scheduler, request_id: str, threshold: float) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256_cbor)
    order = msgspec.msgpack.encode(LegOrder(cache_hit_threshold=threshold))
    params = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": {params_name(): order}})
    hasher = get_request_block_hasher(16, sha256_cbor)
    scheduler.add_request(Request(request_id, PROMPT, params, None, block_hasher=hasher))


def step(scheduler, between=lambda: None) -> list[Any]:
    """One step without a model; returns its outputs. ``between`` runs while the step is computed."""
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    scheduled = scheduler.schedule()
    assert not scheduled.num_scheduled_tokens
    between()
    made = scheduler.update_from_output(scheduled, EMPTY_MODEL_RUNNER_OUTPUT)
    return [output for outputs in made.values() for output in outputs.outputs]


def mentions(found: Any, text: str, seen: set[int] | None = None) -> bool:
    """Whether Baton's part of the scheduler holds the text anywhere."""
    seen = set() if seen is None else seen
    if found == text if isinstance(found, str) else id(found) in seen:
        return isinstance(found, str)
    seen.add(id(found))
    if isinstance(found, dict):
        return any(mentions(one, text, seen) for pair in found.items() for one in pair)
    if isinstance(found, list | set | tuple):
        return any(mentions(one, text, seen) for one in found)
    if not type(found).__module__.startswith("connector."):
        return False
    names = [*getattr(found, "__dict__", ()), *getattr(type(found), "__slots__", ())]
    return any(mentions(getattr(found, name, None), text, seen) for name in names)


def test_a_refused_request_ends_with_its_report(scheduler):
    from connector.scheduler.engine_scheduler import CACHE_THRESHOLD

    add(scheduler, "r1", threshold=0.9)

    (output,) = step(scheduler)

    assert (output.request_id, output.stop_reason) == ("r1", CACHE_THRESHOLD)
    report = msgspec.msgpack.decode(output.kv_transfer_params[params_name()], type=KvTransferReport)
    assert (report.refused, report.hit_share) == (True, 0.0)
    assert not mentions(scheduler.connector, "r1")


def test_nothing_remains_of_a_request_that_is_aborted_while_it_is_refused(scheduler):
    from vllm.v1.request import RequestStatus

    add(scheduler, "r1", threshold=0.9)

    def leave() -> None:
        assert mentions(scheduler.connector, "r1"), "it is about to be refused"
        scheduler.finish_requests(["r1"], RequestStatus.FINISHED_ABORTED)

    assert step(scheduler, leave) == []

    assert not mentions(scheduler.connector, "r1")
