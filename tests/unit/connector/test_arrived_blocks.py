"""Blocks that have arrived between two steps: their request is computed in the next step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from connector.messages import EngineCall, EngineNotification, Orders, Peer, ReadPart, Results
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import KvOffer, LeaseKv, LegOrder, blocks_in, pack_full_hashes
from tests.support.kv_engines import RankMemory, Shape, handshake
from tests.support.kv_messages import one_group
from tests.unit.connector.real_scheduler import BLOCK_TOKENS, make_scheduler

PROMPT = list(range(70))
FULL = len(PROMPT) // BLOCK_TOKENS
ARRIVED_S = 0.001


@dataclass
class Worker:
    """The worker role in the scheduler's process."""

    ordered: list[Orders] = field(default_factory=list)
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
    side.share_process(worker.ordered.append, worker.results, worker.wake_on_results)
    shape = Shape()
    peer = Peer(handshake=handshake([RankMemory(shape, 0).described()], shape), clock_ahead_s=0.0)
    side.exchange(msgspec.msgpack.encode(EngineCall(peers=[peer])))
    return worker


def read_of(scheduler, worker: Worker) -> int:
    """Add a request that takes an offer, schedule it, and return the number of its read."""
    add_request(scheduler)
    scheduled = scheduler.schedule()
    assert not scheduled.num_scheduled_tokens
    assert not scheduled.kv_connector_metadata.orders
    (read,) = worker.ordered[-1].reads
    process(scheduler, scheduled)
    return read.read_id


def add_request(scheduler, name: str = "r", prompt: Sequence[int] = PROMPT, *, takes_offer: bool = True) -> list[bytes]:
    """Add a request; returns the hashes of its blocks."""
    import time

    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from connector.connector import PARAMS

    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256_cbor)
    request = Request(name, list(prompt), SamplingParams(max_tokens=4), None, block_hasher=hasher)
    offer = KvOffer(
        worker_id=WorkerId("holder"),
        epoch=Epoch(1),
        lease_id="l",
        groups=one_group(range(FULL)),
        boundary=FULL * BLOCK_TOKENS,
        last_hash=bytes(request.block_hashes[-1]),
        until_s=time.monotonic() + 1000.0,
    )
    request.kv_transfer_params = {PARAMS: LegOrder(take=offer if takes_offer else None)}
    scheduler.add_request(request)
    return list(request.block_hashes)


def granted(scheduler, hashes: Sequence[bytes]) -> int:
    """Blocks that another worker gets when it asks for these."""
    ask = LeaseKv(
        worker_id=WorkerId("d"),
        epoch=Epoch(1),
        reader_id=WorkerId("reader"),
        ask_id="a",
        hashes=pack_full_hashes(hashes),
        hold_s=10.0,
    )
    answer = scheduler.connector.connector_scheduler.exchange(msgspec.msgpack.encode(EngineCall(leases=[ask])))
    (grant,) = msgspec.msgpack.decode(answer, type=EngineNotification).grants
    return blocks_in(grant.groups)


def cached(scheduler, hashes: Sequence[Any]) -> int:
    """How many of these blocks are in the prefix cache."""
    return sum(scheduler.kv_cache_manager.block_pool.get_cached_block(name, [0]) is not None for name in hashes)


def while_waiting(scheduler, event: Callable[[queue.Queue], None]) -> None:
    """From now on the scheduler has EngineCore's queue to wait on; ``event`` happens when it waits."""
    inbox: queue.Queue = queue.Queue()
    waited = inbox.not_empty.wait

    def wait(_s: float) -> bool:  # Without a notification it would wait forever.
        threading.Thread(target=event, args=(inbox,)).start()
        return waited(None)

    inbox.not_empty.wait = wait  # type: ignore[method-assign]
    scheduler.connector.connector_scheduler.idle_wait.attach_to(SimpleNamespace(input_queue=inbox))


def process(scheduler, scheduled, token: int = 1) -> dict[int, Any]:
    """The step's output: ``token`` for each request whose prompt is computed."""
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

    ids = list(scheduled.num_scheduled_tokens)
    if not ids:
        return scheduler.update_from_output(scheduled, EMPTY_MODEL_RUNNER_OUTPUT)
    sampled = [[] if scheduler.requests[one].is_prefill_chunk else [token] for one in ids]
    output = ModelRunnerOutput(
        req_ids=ids, req_id_to_index={one: at for at, one in enumerate(ids)}, sampled_token_ids=sampled
    )
    return scheduler.update_from_output(scheduled, output)


def test_a_request_whose_blocks_have_arrived_is_in_the_next_step(scheduler, worker):
    worker.ends(read_of(scheduler, worker), FULL)

    scheduled = scheduler.schedule()

    assert scheduled.num_scheduled_tokens == {"r": len(PROMPT) - FULL * BLOCK_TOKENS}
    ((output,),) = [each.outputs for each in process(scheduler, scheduled).values()]
    assert output.new_token_ids == [1]


def test_a_read_that_ends_while_the_engine_waits_takes_no_step_of_its_own(scheduler, worker):
    from vllm.v1.request import RequestStatus

    def read_ends(_inbox: queue.Queue) -> None:
        worker.ends(worker.ordered[-1].reads[0].read_id, FULL)
        assert worker.wake is not None
        worker.wake()

    while_waiting(scheduler, read_ends)
    add_request(scheduler)

    scheduled = scheduler.schedule()

    assert scheduled.num_scheduled_tokens == {"r": len(PROMPT) - FULL * BLOCK_TOKENS}
    process(scheduler, scheduled)
    scheduler.finish_requests(["r"], RequestStatus.FINISHED_ABORTED)
    computed = add_request(scheduler, "computed", PROMPT[: -2 * BLOCK_TOKENS : -1], takes_offer=False)
    process(scheduler, scheduler.schedule())
    assert granted(scheduler, computed[:1]) == 1, "its block counts as not computed"


def test_input_ends_the_wait_for_a_read(scheduler, worker):
    while_waiting(scheduler, lambda inbox: inbox.put("request"))

    read_of(scheduler, worker)


def test_a_read_does_not_hold_up_the_output_of_a_step(scheduler, worker):
    read_id = read_of(scheduler, worker)
    worker.ends(read_id, FULL)
    computing = scheduler.schedule()
    assert computing.num_scheduled_tokens
    add_request(scheduler, "other", PROMPT[::-1])
    while_waiting(scheduler, lambda _inbox: pytest.fail("it waits"))

    scheduler.schedule()

    assert process(scheduler, computing)


def test_a_request_waits_for_the_rest_of_its_blocks(scheduler, worker):
    read_id = read_of(scheduler, worker)
    worker.ends(read_id, FULL - 1)

    assert not scheduler.schedule().num_scheduled_tokens
    worker.ends(read_id, 1, first=FULL - 1)

    assert scheduler.schedule().num_scheduled_tokens == {"r": len(PROMPT) - FULL * BLOCK_TOKENS}


def test_blocks_that_have_arrived_are_cached_before_the_rest_arrives(scheduler, worker):
    read_id = read_of(scheduler, worker)
    hashes = scheduler.requests["r"].block_hashes
    worker.ends(read_id, 2)

    scheduler.schedule()
    assert cached(scheduler, hashes) == 2
    worker.ends(read_id, FULL - 2, first=2)

    assert scheduler.schedule().num_scheduled_tokens == {"r": len(PROMPT) - FULL * BLOCK_TOKENS}
    assert cached(scheduler, hashes) == FULL


def test_a_request_waits_for_an_equal_one_of_which_some_blocks_have_arrived(scheduler, worker):
    read_id = read_of(scheduler, worker)
    worker.ends(read_id, 2)
    process(scheduler, scheduler.schedule())
    add_request(scheduler, "equal")

    scheduler.schedule()

    assert [read.read_id for orders in worker.ordered for read in orders.reads] == [read_id]


def test_the_cached_prefix_of_a_request_stays_while_another_plans_its_fetch(scheduler, worker):
    read_id = read_of(scheduler, worker)
    add_request(scheduler, "other", PROMPT[::-1])
    process(scheduler, scheduler.schedule())
    worker.ends(read_id, 2)

    scheduler.schedule()

    assert not cached(scheduler, scheduler.requests["r"].block_hashes)


def test_blocks_that_did_not_arrive_are_computed_from_the_first_one_on(scheduler, worker):
    read_id = read_of(scheduler, worker)
    worker.ends(read_id, 2)
    worker.ends(read_id, FULL - 2, "the read failed", first=2)

    held = scheduler.schedule()
    assert not held.num_scheduled_tokens
    process(scheduler, held)

    assert scheduler.schedule().num_scheduled_tokens == {"r": len(PROMPT) - 2 * BLOCK_TOKENS}


def test_an_aborted_request_frees_its_blocks_when_its_read_has_ended(scheduler, worker):
    from vllm.v1.request import RequestStatus

    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    read_id = read_of(scheduler, worker)
    scheduler.finish_requests(["r"], RequestStatus.FINISHED_ABORTED)
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free - FULL

    worker.ends(read_id, FULL)
    process(scheduler, scheduler.schedule())

    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    assert "r" not in scheduler.requests
