"""A slow front end hears of several tokens at once: the report that came with the first one is not lost, so that a
client's usage counts what the prefill worker had cached, and not what the decode worker received.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from services.worker.tiny_model import EOS_ID
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import KvSource, KvTransferReport, LegOrder
from tests.engines.front import CHAT, front, model_with_marks

pytestmark = pytest.mark.vllm

MESSAGES, RESPONSES, COMPLETIONS = "/v1/messages", "/v1/responses", "/v1/completions"
ANSWER = [70, 71, 72, EOS_ID]
RECEIVED, CACHED = 64, 32
"""Tokens of the prompt: of the decode worker, and of those the ones that the prefill worker had cached."""
TURNS = [{"role": "user", "content": "What does a baton cost? " * 20}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TURNS, "max_tokens": len(ANSWER)},
    COMPLETIONS: {"prompt": [70] * 100, "max_tokens": len(ANSWER), "stream_options": {"include_usage": True}},
    MESSAGES: {"messages": TURNS, "max_tokens": len(ANSWER)},
    RESPONSES: {"input": TURNS, "max_output_tokens": len(ANSWER)},
}
FOLLOWED = LegOrder(sources=[KvSource(worker_id=WorkerId("p"), epoch=Epoch(1), follow=True)])


def cached_in(path: str, stream: bytes) -> int:
    """Cached tokens of the usage that the stream ends with."""
    lines = [line.removeprefix(b"data: ") for line in stream.splitlines() if line.startswith(b"data: {")]
    *_, told = (usage for line in lines if (usage := usage_of(json.loads(line))))
    if path == MESSAGES:
        return told["cache_read_input_tokens"]
    return told["input_tokens_details" if path == RESPONSES else "prompt_tokens_details"]["cached_tokens"]


def usage_of(event: dict[str, Any]) -> dict[str, Any] | None:
    return (event.get("response") or event).get("usage")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_with_marks(tmp_path_factory.mktemp("front"))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("joined", [(), (1,), (1, 2, 3)], ids=["each", "first-two", "all"])
async def test_a_report_with_the_first_token_survives_that_later_tokens_join_it(model, path, joined):
    from vllm.v1.metrics.stats import PrefillStats

    from services.worker.engines.vllm.stats import PARAMS

    report = KvTransferReport(local_tokens=0, fetched_tokens=RECEIVED, prefill_cached_tokens=CACHED)
    sources = PrefillStats()
    sources.set(100, 0, RECEIVED)
    async with front(model, "", ANSWER) as serving:
        serving.core.joined = joined
        serving.core.first = {"kv_transfer_params": {PARAMS: msgspec.msgpack.encode(report)}, "prefill_stats": sources}

        pieces, record = await serving.serve(BODIES[path], path=path, order=FOLLOWED)

    assert cached_in(path, b"".join(pieces.data_of)) == CACHED
    assert record.transfer_report == report
    assert (record.cached_tokens, record.received_tokens) == (0, RECEIVED)
