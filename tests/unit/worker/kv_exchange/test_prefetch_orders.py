"""Prefetches that routers order: what the engine is told, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from connector.messages import EngineNotification, FetchEnded
from services.worker.engines.port import EnginePrompt, Identity
from services.worker.kv_exchange.prefetch_orders import AT_ONCE_MAX, SOURCES_MAX, PrefetchHandler
from services.worker.prompt_handlers import RenderHandler
from shared.bus.port import AskRefused
from shared.contracts.channels import KV_PREFETCH
from shared.contracts.failures import Reason
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.inference import PREFETCH_S_MAX, PrefetchKv
from shared.contracts.kv_exchange import PROMPT_TOKENS_MAX, FetchedKv, KvSource, pack_full_hashes
from shared.runtime.clock import SystemClock
from tests.support.memory_bus import MemoryHub
from tests.unit.worker.kv_exchange.fakes import WAIT_S_MAX, OneWorker, exchange_state, exchanging

SOURCE = KvSource(worker_id=WorkerId("h1"), epoch=Epoch(1))
HASHES = [bytes(31) + bytes([number]) for number in range(3)]
BLOCK = 32
ORDER = {
    "worker_id": "w1", "epoch": 1, "path": "/v1/completions", "body": b'{"prompt": "x"}', "cache_salt": "own",
    "sources": [SOURCE], "tokens": 96, "deadline_s": 5.0,
}  # fmt: skip


class Renderer:
    def __init__(self, prompt: EnginePrompt) -> None:
        self.prompt = prompt
        self.asked: list[tuple[str, str]] = []

    async def render(self, path: str, body: bytes, *, cache_salt: str, media_salt: str) -> EnginePrompt:
        del body, media_salt
        self.asked.append((path, cache_salt))
        return self.prompt


@asynccontextmanager
async def prefetching(prompt: EnginePrompt, result: FetchedKv | None) -> AsyncIterator[tuple[OneWorker, Renderer]]:
    """A worker that takes orders; its engine fetches with this result, or does not end (None)."""
    worker, renderer = OneWorker(MemoryHub(), "w1"), Renderer(prompt)
    if result is not None:
        worker.engine.answer = lambda call: EngineNotification(
            fetched=[FetchEnded(fetch_id=one.fetch_id, result=result) for one in call.fetches]
        )
    async with exchanging(worker):
        rendering = RenderHandler(renderer, worker.worker_id, worker.epoch, worker.bus)
        identity = Identity(worker.worker_id, worker.epoch)
        await PrefetchHandler(worker.bus, SystemClock(), identity, rendering, worker.exchange).open()
        yield worker, renderer


async def ordered(worker: OneWorker, **fields: Any) -> Any:
    return await worker.bus.ask(KV_PREFETCH, PrefetchKv(**{**ORDER, **fields}), timeout_s=WAIT_S_MAX)


PROMPT = EnginePrompt(tokens=100, hashes=HASHES)


async def test_the_engine_fetches_the_prompt_as_it_would_name_it_for_a_request_to_come():
    result = FetchedKv(held=1, fetched=2, bytes=4096, seconds=0.5)
    async with prefetching(PROMPT, result) as (worker, renderer):
        done = await ordered(worker)

        (order,) = worker.engine.every("fetches")
        assert order.is_prefetch
        assert (order.fetch.hashes, order.fetch.sources) == (pack_full_hashes(HASHES), [SOURCE])
        assert renderer.asked == [("/v1/completions", "own")]
    assert (done.prompt_tokens, done.held_tokens, done.fetched_tokens) == (100, BLOCK, 2 * BLOCK)
    assert (done.bytes, done.seconds, done.failure) == (4096, 0.5, "")


@pytest.mark.parametrize(
    ("tokens", "said"), [(64, ""), (65, "no source has more of it"), (0, "no source has more of it")]
)
async def test_the_new_end_of_a_next_turn_is_no_failure(tokens: int, said: str):
    async with prefetching(PROMPT, FetchedKv(fetched=2, failure="not_held")) as (worker, _renderer):
        assert (await ordered(worker, tokens=tokens)).failure == said


@pytest.mark.parametrize("prompt", [EnginePrompt(refusal="400: no"), EnginePrompt(tokens=20)])
async def test_nothing_is_fetched_of_a_prompt_without_blocks(prompt: EnginePrompt):
    async with prefetching(prompt, FetchedKv()) as (worker, _renderer):
        done = await ordered(worker)

        assert done.failure == (prompt.refusal or "the prompt has no whole block")
        assert worker.engine.every("fetches") == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"epoch": 7}, Reason.WORKER_LOST),
        ({"deadline_s": float("nan")}, Reason.BAD_MESSAGE),
        ({"deadline_s": 0.0}, Reason.BAD_MESSAGE),
        ({"deadline_s": 2 * PREFETCH_S_MAX}, Reason.BAD_MESSAGE),
        ({"tokens": -1}, Reason.BAD_MESSAGE),
        ({"tokens": 2 * PROMPT_TOKENS_MAX}, Reason.BAD_MESSAGE),
        ({"eviction_cost": float("nan")}, Reason.BAD_MESSAGE),
        ({"eviction_cost": 1.1}, Reason.BAD_MESSAGE),
        ({"sources": []}, Reason.BAD_MESSAGE),
        ({"sources": [SOURCE] * (SOURCES_MAX + 1)}, Reason.BAD_MESSAGE),
    ],
    ids=str,
)
async def test_malformed_orders_are_refused_before_anything_is_rendered(fields: dict[str, Any], reason: Reason):
    async with prefetching(PROMPT, FetchedKv()) as (worker, renderer):
        with pytest.raises(AskRefused) as refused:
            await ordered(worker, **fields)

        assert refused.value.failure.reason is reason
        assert renderer.asked == []


async def test_a_draining_worker_prefetches_nothing():
    async with prefetching(PROMPT, FetchedKv()) as (worker, _renderer):
        worker.exchange.refuse_fetches()
        with pytest.raises(AskRefused) as refused:
            await ordered(worker)

        assert refused.value.failure.reason is Reason.WORKER_DRAINING


async def test_prefetches_beyond_the_share_of_the_link_are_refused_with_the_time_to_wait():
    async with prefetching(PROMPT, FetchedKv(fetched=3, seconds=20.0)) as (worker, _renderer):
        await ordered(worker)
        with pytest.raises(AskRefused) as refused:
            await ordered(worker)

        assert refused.value.failure.reason is Reason.WORKER_BUSY
        assert "their share of the link" in refused.value.failure.message
        assert refused.value.failure.retry_after_s == pytest.approx((20.0 - 1.0) / 0.5, abs=2.0)
        assert len(worker.engine.every("fetches")) == 1


async def test_nothing_is_prefetched_that_is_of_less_use_than_what_it_evicts():
    async with prefetching(PROMPT, FetchedKv(fetched=3, seconds=0.01)) as (worker, _renderer):
        await ordered(worker, eviction_cost=0.5)
        state = exchange_state(
            prefetched_blocks_total=2000, prefetch_used_blocks_total=0, prefetch_wasted_blocks_total=2000
        )
        worker.engine.tell(state=state)
        with pytest.raises(AskRefused) as refused:
            await ordered(worker, eviction_cost=0.5)

        assert "would evict again" in refused.value.failure.message
        await ordered(worker, eviction_cost=0.01)


async def test_only_so_many_run_at_a_time():
    async with prefetching(PROMPT, FetchedKv(fetched=3, seconds=0.001)) as (worker, _renderer):
        await ordered(worker)  # It shows what a token takes.
        worker.engine.answer = lambda _call: EngineNotification()
        waiting = [asyncio.create_task(ordered(worker)) for _ in range(AT_ONCE_MAX)]
        await worker.engine.told("fetches", 1 + AT_ONCE_MAX)
        with pytest.raises(AskRefused) as refused:
            await ordered(worker)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)

        assert f"{AT_ONCE_MAX} prefetches are under way" in refused.value.failure.message
