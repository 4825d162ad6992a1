"""The answer's first token goes from the prefill leg to the decode engine, which begins the answer with it."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from connector.messages import EngineCall, EngineNotification, Peer
from shared.contracts.ids import Epoch, LegId, WorkerId
from shared.contracts.kv_exchange import FirstToken, KvOffer, LeaseKv, LegOrder, is_sound_grant, pack_full_hashes
from tests.support.kv_engines import RankMemory, Shape, handshake
from tests.support.kv_messages import one_group
from tests.unit.connector.real_scheduler import BLOCK_TOKENS, make_scheduler
from tests.unit.connector.test_arrived_blocks import Worker, process

PROMPT = list(range(70))
TAIL = len(PROMPT) % BLOCK_TOKENS
TOKEN = 42
LEG = LegId("leg")


class Engine:
    """vLLM's scheduler, and what it sends between steps."""

    def __init__(self, folder, *, asynchronous: bool) -> None:
        self.scheduler = make_scheduler(folder, asynchronous=asynchronous, with_connector=True)
        self.sent: queue.Queue[Any] = queue.Queue()
        self.worker = Worker()
        self.side = self.scheduler.connector.connector_scheduler
        self.side.attach_to(
            SimpleNamespace(scheduler=self.scheduler, output_queue=self.sent, get_weight_version=lambda: "step-1")
        )
        self.side.share_process(self.worker.ordered.append, self.worker.results, self.worker.wake_on_results)
        shape = Shape()
        peer = Peer(handshake=handshake([RankMemory(shape, 0).described()], shape), clock_ahead_s=0.0)
        self.call(peers=[peer])

    def call(self, **fields: Any) -> EngineNotification:
        packed = self.side.exchange(msgspec.msgpack.encode(EngineCall(**fields)))
        return msgspec.msgpack.decode(packed, type=EngineNotification)

    def request(self, name: str, order: LegOrder, prompt: Sequence[int] = PROMPT, **sampling: Any) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        from connector.connector import PARAMS

        init_none_hash(sha256_cbor)
        params = SamplingParams(**{"max_tokens": 4, "temperature": 0.0} | sampling)
        hasher = get_request_block_hasher(BLOCK_TOKENS, sha256_cbor)
        request = Request(name, list(prompt), params, None, block_hasher=hasher)
        request.kv_transfer_params = {PARAMS: order}
        return request

    def prefill(self, prompt: Sequence[int] = PROMPT, **sampling: Any) -> KvOffer:
        """The offer of a prefill leg that sampled ``TOKEN``."""
        order = LegOrder(offer=True, offer_id="offer", leg_id=LEG)
        self.scheduler.add_request(self.request("p", order, prompt, **sampling | {"max_tokens": 1}))
        while "p" in self.scheduler.requests:
            outputs = process(self.scheduler, self.scheduler.schedule(), TOKEN)
        (report,) = [one.kv_transfer_params["baton"] for each in outputs.values() for one in each.outputs]
        return msgspec.msgpack.decode(report)["offer"]

    def decode(self, offer: KvOffer, prompt: Sequence[int] = PROMPT, threshold: float = 0.0, **sampling: Any) -> Any:
        """A decode leg that takes the offer, scheduled once."""
        request = self.request("d", LegOrder(take=offer, cache_hit_threshold=threshold), prompt, **sampling)
        self.scheduler.add_request(request)
        process(self.scheduler, self.scheduler.schedule())
        return request

    def arrive(self) -> None:
        """The blocks of the decode leg are there."""
        (read,) = self.worker.ordered[-1].reads
        self.worker.ends(read.read_id, len(read.local_blocks))


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def engine(tmp_path, request) -> Engine:
    return Engine(tmp_path, asynchronous=request.param)


def offer_of(engine: Engine, prompt: Sequence[int] = PROMPT, token: int = TOKEN, **sampling: Any) -> KvOffer:
    """As another engine makes it after a prefill leg of this prompt with these parameters."""
    from connector.scheduler.first_token import first_token_of

    request = engine.request("of the offer", LegOrder(), prompt, **sampling)
    full = len(prompt) // BLOCK_TOKENS
    return KvOffer(
        worker_id=WorkerId("holder"),
        epoch=Epoch(1),
        lease_id="l",
        groups=one_group(range(full)),
        boundary=full * BLOCK_TOKENS,
        last_hash=bytes(request.block_hashes[full - 1]),
        until_s=time.monotonic() + 1000.0,
        first_token=first_token_of(request, token, BLOCK_TOKENS),
    )


def sent(engine: Engine) -> list[int]:
    """Tokens that were sent between steps."""
    tokens = []
    while not engine.sent.empty():
        _client, outputs = engine.sent.get()
        assert outputs.weight_version == "step-1"
        tokens += [token for output in outputs.outputs for token in output.new_token_ids]
    return tokens


def test_a_decode_leg_begins_with_the_token_before_its_blocks_are_there(engine):
    engine.decode(offer_of(engine))

    assert sent(engine) == [TOKEN]
    engine.arrive()
    scheduled = engine.scheduler.schedule()

    assert scheduled.num_scheduled_tokens == {"d": TAIL + 1}
    (new,) = scheduled.scheduled_new_reqs
    assert new.prompt_token_ids == [*PROMPT, TOKEN]
    assert new.sampling_params.max_tokens == 3
    outputs = process(engine.scheduler, scheduled)
    answered = 1 + sum(len(one.new_token_ids) for each in outputs.values() for one in each.outputs)
    while "d" in engine.scheduler.requests:
        outputs = process(engine.scheduler, engine.scheduler.schedule())
        answered += sum(len(one.new_token_ids) for each in outputs.values() for one in each.outputs)
    assert answered == 4
    assert not sent(engine)


def test_the_report_counts_the_clients_prompt(engine):
    engine.decode(offer_of(engine))
    engine.arrive()
    process(engine.scheduler, engine.scheduler.schedule())

    told = engine.side.reader.transfer_report("d")

    assert told.first_token_received
    assert (told.prompt_tokens, told.fetched_tokens, told.recomputed_tokens) == (len(PROMPT), len(PROMPT) - TAIL, TAIL)


def test_a_request_that_ends_with_its_first_token_reports_what_was_planned(engine):
    """As after a stop string: the engine computes nothing for it."""
    from vllm.v1.request import RequestStatus

    engine.decode(offer_of(engine))
    told = engine.side.reader.transfer_report("d")
    engine.scheduler.finish_requests(["d"], RequestStatus.FINISHED_ABORTED)

    assert (told.prompt_tokens, told.fetched_tokens, told.recomputed_tokens) == (len(PROMPT), len(PROMPT) - TAIL, TAIL)


def test_a_prefill_leg_offers_its_token(engine):
    offer = engine.prefill()

    assert offer["first_token"]["token_id"] == TOKEN
    assert offer["first_token"]["basis"] == offer_of(engine).first_token.basis


def test_a_follower_gets_the_token_with_its_last_grant(engine):
    prompt = list(range(90))
    prefill = engine.request("p", LegOrder(leg_id=LEG), prompt, max_tokens=1)
    ask = LeaseKv(
        worker_id=WorkerId("d"),
        epoch=Epoch(1),
        reader_id=WorkerId("reader"),
        ask_id="ask",
        hashes=pack_full_hashes(map(bytes, prefill.block_hashes)),
        hold_s=10.0,
        follow_s=30.0,
        leg_id=LEG,
    )
    pushed: list[EngineNotification] = []
    engine.side._socket = SimpleNamespace(push=pushed.append)
    engine.scheduler.add_request(prefill)
    engine.call(leases=[ask])
    while "p" in engine.scheduler.requests:
        process(engine.scheduler, engine.scheduler.schedule(), TOKEN)

    *early, last = [grant for each in pushed for grant in each.grants]
    assert all(grant.first_token is None for grant in early)
    assert last.final
    assert last.first_token == offer_of(engine, prompt).first_token
    assert is_sound_grant(last)
    assert not is_sound_grant(msgspec.structs.replace(last, first_token=FirstToken(token_id=1, basis=b"short")))


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        ([*PROMPT[:-1], 1], {}),
        ([1, *PROMPT[1:]], {}),
        (PROMPT, {"temperature": 0.5}),
        (PROMPT, {"repetition_penalty": 1.1}),
        (PROMPT, {"logit_bias": {1: 1.0}}),
        (PROMPT, {"allowed_token_ids": [1, 42]}),
    ],
    ids=["other tail", "other beginning", "temperature", "repetition_penalty", "logit_bias", "allowed_token_ids"],
)
def test_a_token_sampled_for_something_else_is_not_used(engine, prompt, sampling):
    offer = msgspec.structs.replace(offer_of(engine), first_token=offer_of(engine, prompt, **sampling).first_token)

    engine.decode(offer)

    assert sent(engine) == []
    engine.arrive()
    assert engine.scheduler.schedule().num_scheduled_tokens == {"d": TAIL}


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "seed": 3},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logprobs": 0},
        {"prompt_logprobs": 1},
        {"bad_words": ["no"]},
        {"extra_args": {"mine": 1}},
        {"stop_token_ids": [TOKEN]},
        {"max_tokens": 1},
    ],
    ids=lambda sampling: list(sampling)[-1],
)
def test_a_request_that_must_sample_its_first_token_does(engine, sampling):
    engine.decode(offer_of(engine, **{name: it for name, it in sampling.items() if name == "temperature"}), **sampling)

    assert sent(engine) == []


@pytest.mark.parametrize("token", [100, 1 << 30])
def test_a_token_outside_of_the_vocabulary_is_not_used(engine, token):
    engine.decode(offer_of(engine, token=token))

    assert sent(engine) == []


def test_a_request_that_may_be_refused_begins_with_nothing(engine):
    engine.decode(offer_of(engine), threshold=0.5)

    assert sent(engine) == []


@pytest.mark.parametrize("is_full", [False, True])
def test_the_token_of_a_prompt_of_whole_blocks_needs_a_free_block(engine, is_full):
    pool = engine.scheduler.kv_cache_manager.block_pool
    blocks = 4
    if is_full:
        pool.get_new_blocks(pool.get_num_free_blocks() - blocks)
    prompt = PROMPT[: blocks * BLOCK_TOKENS]

    engine.decode(offer_of(engine, prompt), prompt)

    assert sent(engine) == ([] if is_full else [TOKEN])
    engine.arrive()
    assert engine.scheduler.schedule().num_scheduled_tokens == {"d": 1}


def test_blocks_that_do_not_arrive_are_computed_before_the_token(engine):
    engine.decode(offer_of(engine))
    assert sent(engine) == [TOKEN]
    (read,) = engine.worker.ordered[-1].reads
    engine.worker.ends(read.read_id, len(read.local_blocks), failure="lost")
    process(engine.scheduler, engine.scheduler.schedule())
    process(engine.scheduler, engine.scheduler.schedule())

    computed = engine.side.reader.transfer_report("d")

    assert (computed.prompt_tokens, computed.fetched_tokens, computed.recomputed_tokens) == (
        len(PROMPT),
        0,
        len(PROMPT),
    )
    assert sent(engine) == []
