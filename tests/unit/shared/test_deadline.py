"""Deadlines hold although a third party loses cancellations, as ``asyncio.wait_for`` does before Python 3.12."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from shared.bus.nats_bus import connect_nats
from shared.bus.port import BusDown
from shared.deadline import end, keep_cancellation, within, within_lives

HANG_S = 20.0
"""A test that takes longer has failed: the event loop is stopped."""


class RacingLoop(asyncio.SelectorEventLoop):
    """Every connection is refused in the very turn in which somebody cancels the wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.connecting: asyncio.Future[Any] | None = None
        self.refused = 0

    def create_future(self) -> asyncio.Future[Any]:
        return _RacingFuture(self)

    async def create_connection(self, *_args: Any, **_options: Any) -> Any:
        self.connecting = asyncio.Future(loop=self)
        await self.connecting

    def refuse(self) -> None:
        connecting, self.connecting = self.connecting, None
        if connecting is not None and not connecting.done():
            self.refused += 1
            connecting.set_exception(ConnectionRefusedError("refused as the wait was cancelled"))


class _RacingFuture(asyncio.Future):
    def __init__(self, loop: RacingLoop) -> None:
        super().__init__(loop=loop)
        self._racing = loop

    def cancel(self, msg: Any = None) -> bool:
        self._racing.refuse()
        return super().cancel(msg)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="only older ones lose the cancellation in asyncio.wait_for")
def test_connecting_ends_by_its_deadline_when_the_refusal_meets_the_cancellation():
    loop = RacingLoop()
    loop.call_later(HANG_S, loop.stop)
    try:
        with pytest.raises(BusDown, match=r"no NATS at nats://127.0.0.1:4 within 0.05 s: refused as"):
            loop.run_until_complete(connect_nats("nats://127.0.0.1:4", name="test", connect_s_max=0.05))
        assert loop.refused, "the race was not forced"
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


class Deaf:
    """Work that ignores every cancellation until it is released."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.cancelled = 0

    async def work(self) -> None:
        while not self.released.is_set():
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                self.cancelled += 1


async def test_work_that_ignores_cancellation_is_abandoned(caplog):
    deaf = Deaf()

    with pytest.raises(TimeoutError, match=r"deaf: not within 0.01 s"):
        await within(0.01, deaf.work(), name="deaf", grace_s=0.05)

    assert deaf.cancelled > 1, "a lost cancellation is repeated"
    assert "the task deaf ignores its cancellation: abandoned" in caplog.text
    deaf.released.set()


async def test_a_wait_for_uncancellable_work_can_be_cancelled():
    deaf = Deaf()
    waiting = asyncio.ensure_future(within(HANG_S, deaf.work(), name="deaf", grace_s=0.05))
    await asyncio.sleep(0)

    await end({waiting})

    assert waiting.cancelled()
    deaf.released.set()


async def test_result_and_error_of_the_work_are_passed_on():
    async def fails() -> None:
        raise LookupError("its own")

    assert await within(HANG_S, asyncio.sleep(0, "done"), name="quick") == "done"
    with pytest.raises(LookupError, match="its own"):
        await within(HANG_S, fails(), name="failing")


@pytest.mark.parametrize("outcome", ["result", "error"])
async def test_a_cancellation_that_wait_for_loses_is_raised(outcome):
    reply: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def request() -> None:
        with keep_cancellation():
            await asyncio.wait_for(reply, HANG_S)

    task = asyncio.ensure_future(request())
    await asyncio.sleep(0)
    if outcome == "result":
        reply.set_result(None)
    else:
        reply.set_exception(ConnectionRefusedError())
    task.cancel()

    await asyncio.wait({task})
    assert task.cancelled()


async def test_work_begins_anew_on_another_connection_and_ends_by_its_deadline():
    lives, begun = [0], []

    async def reply() -> int:
        begun.append(lives[0])
        if lives[0] == 0:
            asyncio.get_running_loop().call_later(0.05, lives.append, 1)
            asyncio.get_running_loop().call_later(0.05, lives.pop, 0)
            await asyncio.Event().wait()
        return lives[0]

    assert await within_lives(5.0, reply, lambda: lives[0], name="reply") == 1
    assert begun == [0, 1]
    with pytest.raises(TimeoutError, match="never: not within"):
        await within_lives(0.3, asyncio.Event().wait, lambda: 0, name="never")
