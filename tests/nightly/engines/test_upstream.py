"""vLLM's own NixlConnector behind the same workers: the reference that the exchange is compared with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shared.contracts.inference import LegKind
from tests.engines.test_handover import completion, prompt_of
from tests.support.worker_processes import WorkerProcess, ready_workers, start_worker

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def upstream(nats_url, run_dir) -> Iterator[tuple[WorkerProcess, ...]]:
    """A prefill and a decode worker."""
    settings = {"connector": "upstream", "max_model_len": "4096"}
    with ready_workers(
        nats_url,
        start_worker(nats_url, "up", run_dir, role="prefill", cpu_cores="0", **settings),
        start_worker(nats_url, "ud", run_dir, role="decode", cpu_cores="1", **settings),
    ) as pair:
        yield pair


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_handed_over_prompt_gives_the_tokens_that_one_engine_gives(upstream, router, stream):
    prefill, decode = upstream
    body = completion(prompt_of(500, seed=501 + stream), stream=stream)

    first, second = await router.handed_over(prefill, decode, body)
    alone = await router.leg(prefill, LegKind.AGGREGATED, body)

    assert second.token_ids == alone.token_ids
    assert second.report.received_tokens >= second.report.prompt_tokens - 32
    assert second.report.received_bytes > 0
    assert first.report.kv is second.report.kv is None
    assert first.report.kv_transfer


async def test_usage_counts_what_the_prefill_engine_had_cached(upstream, router):
    prefill, decode = upstream
    body = completion(prompt_of(300, seed=503))
    await router.leg(prefill, LegKind.AGGREGATED, body)

    first, second = await router.handed_over(prefill, decode, body)

    assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == first.report.cached_tokens > 0


async def test_kv_that_is_gone_is_computed_anew_by_the_decode_engine(upstream, router):
    prefill, decode = upstream
    body = completion(prompt_of(300, seed=504))
    first = await router.leg(prefill, LegKind.PREFILL, body)
    lost = first.report.kv_transfer.replace(b'"remote_engine_id":"', b'"remote_engine_id":"0')

    second = await router.leg(decode, LegKind.DECODE, body, kv_transfer=lost)
    alone = await router.leg(decode, LegKind.AGGREGATED, body)

    assert second.status == 200
    assert second.token_ids == alone.token_ids


async def test_upstreams_connector_ignores_exchange_orders(upstream, router):
    assert upstream[0].record.fingerprint.connector.startswith("nixl-")
    body = completion(prompt_of(60, seed=505), kv_transfer_params={"baton": "x"})

    answer = await router.leg(upstream[1], LegKind.AGGREGATED, body)

    assert answer.report.finish_reason == "length"


async def test_upstreams_connector_refuses_a_threshold_by_name(upstream, router):
    body = completion(prompt_of(60, seed=506))

    answer = await router.leg(upstream[1], LegKind.AGGREGATED, body, cache_hit_threshold=0.9)

    assert (answer.status, answer.json()["error"]["param"]) == (400, "cache_hit_threshold")
