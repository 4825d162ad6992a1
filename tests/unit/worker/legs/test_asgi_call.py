"""Calls of the engine's server: cancellation and errors."""

from __future__ import annotations

import asyncio

import pytest

from services.worker.engines.port import AsgiApp, LegRecord
from services.worker.legs.asgi_call import LISTEN_S_MAX, AsgiCall
from shared.contracts.inference import LegKind, StartLeg

SOON_S = 30.0


class Nobody:
    """An answer that must not come."""

    def head(self, status: int, content_type: str) -> None:
        raise AssertionError("nobody waits")

    def data(self, data: bytes, token_ids=(), joined=None) -> None:
        raise AssertionError("nobody waits")

    async def drain(self) -> None:
        return


async def no_server_error() -> None:
    return


def call() -> AsgiCall:
    start = StartLeg(
        worker_id="w1",
        router_id="r1",
        request_id="q",
        leg_id="l",
        kind=LegKind.AGGREGATED,
        path="/v1/completions",
        body=b"{}",
        deadline_s=60.0,
    )
    record = LegRecord(kind=LegKind.AGGREGATED, request_id="q", trace_headers={})
    return AsgiCall(start, b"{}", record, Nobody(), no_server_error)


async def cancelled(app: AsgiApp, computing: asyncio.Event) -> None:
    """A call of this app is cancelled while the app computes."""
    running = asyncio.create_task(call().run(app))
    await computing.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_cancelling_a_call_disconnects_the_server_first():
    """As vLLM's does for answers that are not streamed."""
    computing, ended = asyncio.Event(), asyncio.Event()

    async def compute() -> None:
        computing.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def app(_scope, receive, send) -> None:
        await receive()
        tasks = [asyncio.create_task(compute()), asyncio.create_task(receive())]
        _done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    await cancelled(app, computing)

    await asyncio.wait_for(ended.wait(), SOON_S)


async def test_a_busy_server_aborts_its_request_before_it_is_cancelled():
    """vLLM's server passes a cancellation on to its request only after a disconnect."""
    computing, aborted = asyncio.Event(), asyncio.Event()

    async def compute() -> None:
        computing.set()
        try:
            await asyncio.Event().wait()
        finally:
            aborted.set()

    async def app(_scope, receive, _send) -> None:
        await receive()
        computation = asyncio.create_task(compute())
        await receive()
        await asyncio.sleep(2 * LISTEN_S_MAX)  # other requests
        computation.cancel()

    await cancelled(app, computing)

    await asyncio.wait_for(aborted.wait(), SOON_S)


async def test_a_server_that_ignores_a_disconnect_is_cancelled():
    computing, ended = asyncio.Event(), asyncio.Event()

    async def app(_scope, _receive, _send) -> None:
        computing.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    await cancelled(app, computing)

    await asyncio.wait_for(ended.wait(), SOON_S)


async def test_exceptions_of_the_server_propagate():
    async def app(_scope, _receive, _send) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await call().run(app)
