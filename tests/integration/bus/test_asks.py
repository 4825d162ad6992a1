"""Requests and replies."""

from __future__ import annotations

import asyncio

import pytest

from shared.bus.port import AskRefused, AskTimedOut, MessageTooLarge, NoResponders
from shared.contracts.channels import KV_SNAPSHOT, TOKENIZER
from shared.contracts.control import AskTokenizer, TokenizerAsset
from shared.contracts.failures import Failure, Reason
from shared.contracts.kv_events import AskKvSnapshot, KvSnapshot
from tests.integration.bus.worlds import FRAME_BUDGET_BYTES, SOON_S, soon, until

ASK = AskKvSnapshot(worker_id="w1", epoch=1)


def snapshot(hashes: bytes = b"") -> KvSnapshot:
    return KvSnapshot(worker_id="w1", epoch=1, seq=7, hashes=hashes)


async def test_an_ask_gets_its_reply(world):
    asker, responder = await world.bus(), await world.bus()
    heard = []

    async def answer(ask, envelope):
        heard.append((ask.worker_id, envelope.headers.get("traceparent")))
        return snapshot()

    await responder.answer(KV_SNAPSHOT, answer, worker_id="w1")

    assert await asker.ask(KV_SNAPSHOT, ASK, timeout_s=SOON_S, headers={"traceparent": "00-1"}) == snapshot()
    assert heard == [("w1", "00-1")]


async def test_an_answer_beyond_the_servers_limit_arrives_whole(world):
    asker, responder = await world.bus(), await world.bus()
    asset = TokenizerAsset(worker_id="w1", epoch=1, tokenizer_json=bytes(range(256)) * 66_000)

    async def answer(_ask, _envelope):
        return asset

    await responder.answer(TOKENIZER, answer, worker_id="w1")

    assert await asker.ask(TOKENIZER, AskTokenizer(worker_id="w1"), timeout_s=SOON_S) == asset


async def test_an_answer_beyond_the_budget_is_a_refusal_with_its_reason(world):
    asker, responder = await world.bus(), await world.bus()

    async def answer(_ask, _envelope):
        return snapshot(b"x" * FRAME_BUDGET_BYTES)

    await responder.answer(KV_SNAPSHOT, answer)

    with pytest.raises(AskRefused) as refused:
        await asker.ask(KV_SNAPSHOT, ASK, timeout_s=SOON_S)
    assert refused.value.failure.reason is Reason.TOO_LARGE


async def test_a_refusal_reaches_the_asker_with_its_reason(world):
    asker, responder = await world.bus(), await world.bus()
    failure = Failure(reason=Reason.WORKER_DRAINING, message="going", retry_after_s=2.0)

    async def answer(_ask, _envelope):
        raise AskRefused(failure)

    await responder.answer(KV_SNAPSHOT, answer)

    with pytest.raises(AskRefused) as refused:
        await asker.ask(KV_SNAPSHOT, ASK, timeout_s=SOON_S)
    assert refused.value.failure == failure


async def test_an_ask_without_a_responder_fails_at_once(world):
    asker = await world.bus()

    with pytest.raises(NoResponders):
        await soon(asker.ask(KV_SNAPSHOT, ASK, timeout_s=60.0))


async def test_a_silent_responder_times_out_and_its_late_reply_is_ignored(world):
    asker, responder = await world.bus(), await world.bus()
    go_on = asyncio.Event()

    async def answer(_ask, _envelope):
        await go_on.wait()
        return snapshot()

    await responder.answer(KV_SNAPSHOT, answer)

    with pytest.raises(AskTimedOut):
        await asker.ask(KV_SNAPSHOT, ASK, timeout_s=0.1)
    go_on.set()
    assert await asker.ask(KV_SNAPSHOT, ASK, timeout_s=SOON_S) == snapshot()


async def test_concurrent_asks_get_their_own_replies(world):
    asker, responder = await world.bus(), await world.bus()
    together = asyncio.Barrier(10)

    async def answer(ask, _envelope):
        await together.wait()
        return KvSnapshot(worker_id=ask.worker_id, epoch=1, seq=0, hashes=b"")

    await responder.answer(KV_SNAPSHOT, answer)
    asks = [AskKvSnapshot(worker_id=f"w{i}", epoch=1) for i in range(10)]
    answers = await asyncio.gather(*(asker.ask(KV_SNAPSHOT, ask, timeout_s=SOON_S) for ask in asks))

    assert [answer.worker_id for answer in answers] == [ask.worker_id for ask in asks]


async def test_an_ask_beyond_the_budget_is_refused_before_it_is_sent(world):
    asker = await world.bus()

    with pytest.raises(MessageTooLarge):
        await asker.ask(KV_SNAPSHOT, AskKvSnapshot(worker_id="w" * FRAME_BUDGET_BYTES, epoch=1), timeout_s=SOON_S)


async def test_an_answerer_that_raises_ends_its_bus(world):
    asker, responder = await world.bus(), await world.bus()

    async def answer(_ask, _envelope):
        raise ZeroDivisionError("a bug")

    await responder.answer(KV_SNAPSHOT, answer)

    with pytest.raises(AskTimedOut):
        await asker.ask(KV_SNAPSHOT, ASK, timeout_s=0.1)
    await until(responder.failed.done)
