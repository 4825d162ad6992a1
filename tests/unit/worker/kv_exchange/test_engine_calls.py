"""Calls to the engine's end of the KV exchange."""

from __future__ import annotations

import asyncio

import pytest

from connector.messages import EngineCall
from services.worker.engines.port import EngineDead
from services.worker.kv_exchange.engine_calls import CALL_S_MAX, STUCK_S_MAX, EngineCalls
from tests.support.virtual_time import in_virtual_time, run_in_virtual_time
from tests.unit.worker.kv_exchange.fakes import FakeExchange

CALLS_EVERY_S = 20.0


async def call_for_ever(calls: EngineCalls) -> None:
    while True:
        calls.add(EngineCall(describe=True))
        await asyncio.sleep(CALLS_EVERY_S)


def test_an_engine_that_answers_no_call_for_long_is_dead():
    async def follow() -> float:
        engine = FakeExchange("w1")
        engine.may_run.clear()
        calls = EngineCalls(engine, lambda _notifications: None)
        calling = asyncio.create_task(call_for_ever(calls))
        with pytest.raises(ExceptionGroup) as dead:
            await calls.follow()
        calling.cancel()
        assert dead.group_contains(EngineDead, match="it has answered no call for 180 s")
        return asyncio.get_running_loop().time()

    assert STUCK_S_MAX <= run_in_virtual_time(follow()) <= STUCK_S_MAX + CALL_S_MAX


@in_virtual_time
async def test_an_engine_that_answers_now_and_then_is_not_dead():
    engine = FakeExchange("w1")
    calls = EngineCalls(engine, lambda _notifications: None)
    tasks = [asyncio.create_task(call_for_ever(calls)), asyncio.create_task(calls.follow())]
    for _ in range(4):
        engine.may_run.clear()
        await asyncio.sleep(STUCK_S_MAX - CALLS_EVERY_S)
        engine.may_run.set()
        await asyncio.sleep(2 * CALLS_EVERY_S)
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()


def test_an_engine_that_answers_again_is_known_to_without_another_call():
    async def follow() -> list[float]:
        engine = FakeExchange("w1")
        calls = EngineCalls(engine, lambda _notifications: None)
        following = asyncio.create_task(calls.follow())
        engine.may_run.clear()
        calls.add(EngineCall(describe=True))
        silent_s = [calls.unanswered_s]
        await asyncio.sleep(CALL_S_MAX + CALLS_EVERY_S)
        silent_s.append(calls.unanswered_s)
        engine.may_run.set()
        await asyncio.sleep(1)
        silent_s.append(calls.unanswered_s)
        following.cancel()
        return silent_s

    assert run_in_virtual_time(follow()) == [0.0, pytest.approx(CALL_S_MAX + CALLS_EVERY_S), 0.0]


def test_an_answer_that_its_caller_did_not_await_leaves_no_silence():
    async def follow() -> float:
        engine = FakeExchange("w1")
        calls = EngineCalls(engine, lambda _notifications: None)
        following = asyncio.create_task(calls.follow())
        engine.may_run.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await calls.ask(EngineCall(describe=True))
        engine.may_run.set()
        await asyncio.sleep(CALL_S_MAX)
        following.cancel()
        return calls.unanswered_s

    assert run_in_virtual_time(follow()) == 0.0
