"""An engine without prefix caching: it reads other workers' blocks and hands over its own, but lends none by hash."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shared.contracts.inference import LegKind
from tests.engines.test_exchange import source
from tests.engines.test_handover import completion, prompt_of
from tests.support.worker_processes import WorkerProcess, ready_workers, start_worker

pytestmark = pytest.mark.vllm

BLOCK = 32


@pytest.fixture(scope="module")
def pair(nats_url, run_dir) -> Iterator[tuple[WorkerProcess, ...]]:
    """A prefill worker without prefix caching, and the decode worker with which it tests itself when it starts."""
    size = {"max_model_len": "8192"}
    without = {"engine_args": "--no-enable-prefix-caching", **size}
    decode = start_worker(nats_url, "nd", run_dir, role="decode", cpu_cores="1", **size)
    with (
        ready_workers(nats_url, decode) as (partner,),
        ready_workers(nats_url, start_worker(nats_url, "np", run_dir, role="prefill", cpu_cores="0", **without)) as (
            prefill,
        ),
    ):
        yield prefill, partner


async def test_it_is_ready_although_it_can_lend_no_blocks_to_a_self_test(pair):
    prefill, _decode = pair

    assert (prefill.record.prefix_caching, prefill.record.note) == (False, "")


async def test_it_serves_and_hands_off(pair, router):
    prefill, decode = pair
    body = completion(prompt_of(300, seed=720))

    first, second = await router.handed_over(prefill, decode, body)
    alone = await router.leg(prefill, LegKind.AGGREGATED, body)

    assert first.report.kv.offer is not None
    assert second.token_ids == alone.token_ids
    assert second.report.kv.fetched_tokens > 0
    assert second.report.kv.recomputed_tokens <= BLOCK


async def test_it_reads_back_what_another_engine_holds(pair, router):
    prefill, decode = pair
    body = completion(prompt_of(400, seed=721))
    await router.leg(decode, LegKind.AGGREGATED, body)

    read_back = await router.leg(prefill, LegKind.PREFILL, body, kv_sources=[source(decode)])

    assert read_back.report.kv.fetched_tokens > 0
    assert read_back.report.kv.recomputed_tokens <= BLOCK
