"""Requests with media under vLLM's scheduler and Baton's connector: an engine that gets a medium's KV from another one
does not run its encoder for it. The encoder is missing; vLLM's scheduler says when it would run.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from connector.messages import EngineCall, Peer, ReadPart, Results
from services.router.state.worker_view import WorkerView
from services.router.tokenize.rendered_prompts import prompt_of
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.inference import RenderedPrompt
from shared.contracts.kv_exchange import KvOffer, LegOrder
from shared.contracts.workers import HashScheme
from tests.support.fleet_builders import record
from tests.support.kv_messages import one_group
from tests.unit.connector.real_scheduler import BLOCK_TOKENS, make_scheduler
from tests.unit.connector.test_exchange_core import described

ENCODER_TOKENS = 256
MEDIUM_TOKENS = 12


class Decode:
    """A decode engine's scheduler, with one request whose prompt another engine has computed."""

    def __init__(self, folder, *, asynchronous: bool, tokens: int, media_end: int) -> None:
        from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

        self.scheduler = scheduler = make_scheduler(folder, asynchronous=asynchronous, with_connector=True)
        scheduler.max_num_encoder_input_tokens = ENCODER_TOKENS
        scheduler.encoder_cache_manager = EncoderCacheManager(ENCODER_TOKENS)
        peer = Peer(handshake=described("p"), clock_ahead_s=0.0)
        scheduler.connector.connector_scheduler.exchange(msgspec.msgpack.encode(EngineCall(peers=[peer])))
        scheduler.add_request(self._request(tokens, media_end))

    def _request(self, tokens: int, media_end: int) -> Any:
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        from connector.connector import PARAMS

        init_none_hash(sha256_cbor)
        where = PlaceholderRange(offset=media_end - MEDIUM_TOKENS, length=MEDIUM_TOKENS)
        params = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": {}})
        request = Request(
            "r1",
            [*range(tokens)],
            params,
            None,
            mm_features=[MultiModalFeatureSpec(None, "image", "red", where, "red")],
            block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256_cbor),
        )
        full = tokens // BLOCK_TOKENS
        offer = KvOffer(
            worker_id=WorkerId("p"),
            epoch=Epoch(1),
            lease_id="l",
            groups=one_group([*range(full)]),
            boundary=full * BLOCK_TOKENS,
            last_hash=bytes(request.block_hashes[full - 1]),
            until_s=time.monotonic() + 60.0,
        )
        request.kv_transfer_params = {PARAMS: msgspec.msgpack.encode(LegOrder(take=offer))}
        return request

    def read(self, arrives: int) -> None:
        """The step that orders the read, of which the first ``arrives`` blocks arrive."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        from connector.scheduler.connector_scheduler import StepReport

        step = self.scheduler.schedule()
        assert (step.num_scheduled_tokens, step.scheduled_encoder_inputs) == ({}, {})
        (read,) = step.kv_connector_metadata.orders.reads
        count = len(read.local_blocks)
        parts = [ReadPart(read.read_id, 0, arrives, 0, 1.0, 2.0)]
        if arrives < count:
            parts.append(ReadPart(read.read_id, arrives, count - arrives, 0, 1.0, 2.0, "the peer is gone"))
        report = KVConnectorOutput(kv_connector_worker_meta=StepReport([Results(parts=parts)]))
        self.scheduler.update_from_output(
            step, ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=report)
        )

    def runs_encoder(self) -> bool:
        """Whether the encoder runs in the step that computes the rest of the prompt."""
        step = self.scheduler.schedule()
        assert [*step.num_scheduled_tokens] == ["r1"]
        return bool(step.scheduled_encoder_inputs)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize(
    ("tokens", "media_end"), [(84, 56), (84, 80), (84, 81), (84, 84), (80, 64), (80, 79), (80, 80)]
)
def test_the_encoder_runs_exactly_where_the_router_does_not_split(tmp_path, asynchronous, tokens, media_end):
    decode = Decode(tmp_path, asynchronous=asynchronous, tokens=tokens, media_end=media_end)
    view = WorkerView(msgspec.structs.replace(record(), hashing=HashScheme(block_size=BLOCK_TOKENS)), 0, 0.0)
    reply = RenderedPrompt(worker_id=WorkerId("w1"), epoch=Epoch(1), tokens=tokens, media_end=media_end)

    decode.read(tokens // BLOCK_TOKENS)

    assert decode.runs_encoder() is bool(prompt_of(reply, view).unsplittable)


@pytest.mark.parametrize(("arrived", "runs"), [(1, True), (4, False)])
def test_what_does_not_arrive_is_computed_with_its_media(tmp_path, arrived, runs):
    decode = Decode(tmp_path, asynchronous=True, tokens=84, media_end=56)

    decode.read(arrived)

    assert decode.runs_encoder() is runs
