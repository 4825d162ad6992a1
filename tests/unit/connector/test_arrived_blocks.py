"""Blocks that have arrived between two steps: their request is computed in the next step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from connector.messages import EngineCall, Peer, ReadPart, Results
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import KvOffer, LegOrder, pack_block_ids
from tests.support.kv_engines import RankMemory, Shape, handshake
from tests.unit.connector.real_scheduler import BLOCK_TOKENS, make_scheduler

PROMPT = list(range(70))
FULL = len(PROMPT) // BLOCK_TOKENS
ARRIVED_S = 0.001


@dataclass
class Worker:
    """The worker role in the scheduler's process."""

    reported: Results = field(default_factory=Results)
    wake: Callable[[], None] | None = None

    def results(self) -> Results:
        results, self.reported = self.reported, Results()
        return results

    def wake_on_results(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def ends(self, read_id: int, count: int, failure: str = "", first: int = 0) -> None:
        """A part of the read is over."""
        self.reported.parts.append(ReadPart(read_id, first, count, 1, ARRIVED_S, 2 * ARRIVED_S, failure))


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def scheduler(tmp_path, request):
    return make_scheduler(tmp_path, asynchronous=request.param, with_connector=True)


@pytest.fixture
def worker(scheduler) -> Worker:
    worker = Worker()
    side = scheduler.connector.connector_scheduler
    side.share_process(worker.results, worker.wake_on_results)
    shape = Shape()
    peer = Peer(handshake=handshake([RankMemory(shape, 0).described()], shape), clock_ahead_s=0.0)
    side.exchange(msgspec.msgpack.encode(EngineCall(peers=[peer])))
    return worker


def read_of(scheduler) -> int:
    """Add a request that takes an offer, schedule it, and return the number of its read."""
    import time

    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from connector.connector import PARAMS

    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256_cbor)
    request = Request("r", PROMPT, SamplingParams(max_tokens=4), None, block_hasher=hasher)
    offer = KvOffer(
        worker_id=WorkerId("holder"),
        epoch=Epoch(1),
        lease_id="l",
        block_ids=pack_block_ids(range(FULL)),
        last_hash=bytes(request.block_hashes[FULL - 1]),
        until_s=time.monotonic() + 1000.0,
    )
    request.kv_transfer_params = {PARAMS: LegOrder(take=offer)}
    scheduler.add_request(request)
    scheduled = scheduler.schedule()
    assert not scheduled.num_scheduled_tokens
    (read,) = scheduled.kv_connector_metadata.orders.reads
    process(scheduler, scheduled)
    return read.read_id


def process(scheduler, scheduled) -> dict[int, Any]:
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

    ids = list(scheduled.num_scheduled_tokens)
    if not ids:
        return scheduler.update_from_output(scheduled, EMPTY_MODEL_RUNNER_OUTPUT)
    output = ModelRunnerOutput(
        req_ids=ids, req_id_to_index={one: at for at, one in enumerate(ids)}, sampled_token_ids=[[1]] * len(ids)
    )
    return scheduler.update_from_output(scheduled, output)


def test_a_request_whose_blocks_have_arrived_is_in_the_next_step(scheduler, worker):
    worker.ends(read_of(scheduler), FULL)

    scheduled = scheduler.schedule()

    assert scheduled.num_scheduled_tokens == {"r": len(PROMPT) - FULL * BLOCK_TOKENS}
    ((output,),) = [each.outputs for each in process(scheduler, scheduled).values()]
    assert output.new_token_ids == [1]


def test_a_request_waits_for_the_rest_of_its_blocks(scheduler, worker):
    read_id = read_of(scheduler)
    worker.ends(read_id, FULL - 1)

    assert not scheduler.schedule().num_scheduled_tokens
    worker.ends(read_id, 1, first=FULL - 1)

    assert scheduler.schedule().num_scheduled_tokens == {"r": len(PROMPT) - FULL * BLOCK_TOKENS}


def test_blocks_that_did_not_arrive_are_computed_from_the_first_one_on(scheduler, worker):
    read_id = read_of(scheduler)
    worker.ends(read_id, 2)
    worker.ends(read_id, FULL - 2, "the read failed", first=2)

    held = scheduler.schedule()
    assert not held.num_scheduled_tokens
    process(scheduler, held)

    assert scheduler.schedule().num_scheduled_tokens == {"r": len(PROMPT) - 2 * BLOCK_TOKENS}


def test_an_aborted_request_frees_its_blocks_when_its_read_has_ended(scheduler, worker):
    from vllm.v1.request import RequestStatus

    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    read_id = read_of(scheduler)
    scheduler.finish_requests(["r"], RequestStatus.FINISHED_ABORTED)
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free - FULL

    worker.ends(read_id, FULL)
    process(scheduler, scheduler.schedule())

    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    assert "r" not in scheduler.requests
