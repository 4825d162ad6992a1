"""Runs the long work on prompts off the event loop, in short steps that tenants take in turn.

There are two threads. ``quick`` takes steps of about a millisecond, and continues with one prompt while no other waits
(the event loop gets the GIL from it within ``service.SWITCH_S``); ``slow`` takes the rare steps that cannot be cut,
such as a text of 256 KiB without a space, so that no small prompt waits for them. Python code holds the GIL
in either thread; the tokenizers library releases it. A process would not wait for the GIL, but would need every
tokenizer, its cache and the prefix index a second time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from shared.fair_slots import NoTurn
from shared.third_party import CONTAINED

WAITING_MAX = 1024
TENANT_WAITING_MAX = 128
"""Steps that wait for a thread, of all tenants and of one."""

T = TypeVar("T")
Step = tuple[Callable[[], Any], asyncio.Future[Any]]
Again = Callable[[T], bool]
"""Whether a step with this result shall be run once more."""


def once(_result: object) -> bool:
    return False


class Turns:
    """The steps that wait for one thread. Steps of one tenant run in order; tenants take turns."""

    def __init__(self, thread: Executor) -> None:
        self._thread = thread
        self._waiting: OrderedDict[str, deque[Step]] = OrderedDict()
        """Steps by tenant, the next one first."""
        self._count = 0
        self._running = False
        self._is_closed = False

    def close(self) -> None:
        """No further step begins; those that wait end with NoTurn."""
        self._is_closed = True
        for steps in self._waiting.values():
            for _step, done in steps:
                if not done.done():
                    done.set_exception(NoTurn())
        self._waiting.clear()
        self._count = 0

    async def run(self, tenant: str, step: Callable[[], T], again: Again[T] = once) -> T:
        """The step's last result. It is run again while ``again`` says so and no other step waits: to return to the
        event loop and come back takes longer than most steps. Raises NoTurn, and what the step raises; cancelled, the
        step does not begin.
        """
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        steps = self._waiting.get(tenant)
        if self._is_closed or self._count >= WAITING_MAX or len(steps or ()) >= TENANT_WAITING_MAX:
            raise NoTurn
        if steps is None:
            steps = self._waiting[tenant] = deque()
        steps.append((partial(self._repeated, step, again), done))
        self._count += 1
        self._begin_next()
        return await done

    def _repeated(self, step: Callable[[], T], again: Again[T]) -> T:
        """In the thread. The event loop changes ``_count`` meanwhile: a step that has begun to wait is seen after this
        round.
        """
        with CONTAINED:
            result = step()
            while again(result) and not self._count:
                result = step()
        return result

    def _begin_next(self) -> None:
        while self._waiting and not self._running:
            tenant, steps = self._waiting.popitem(last=False)
            step, done = steps.popleft()
            self._count -= 1
            if steps:
                self._waiting[tenant] = steps
            if not done.done():
                self._running = True
                running = asyncio.get_running_loop().run_in_executor(self._thread, step)
                running.add_done_callback(partial(self._ended, done))

    def _ended(self, done: asyncio.Future[Any], running: asyncio.Future[Any]) -> None:
        self._running = False
        error = running.exception() if not running.cancelled() else NoTurn()
        if not done.done():
            if error is None:
                done.set_result(running.result())
            else:
                done.set_exception(error)
        self._begin_next()


class PromptWork:
    """Both threads."""

    def __init__(self, quick: Executor, slow: Executor) -> None:
        self._threads = quick, slow
        self.quick, self.slow = Turns(quick), Turns(slow)

    @classmethod
    def in_threads(cls) -> PromptWork:
        return cls(
            ThreadPoolExecutor(1, thread_name_prefix="prompts-quick"),
            ThreadPoolExecutor(1, thread_name_prefix="prompts-slow"),
        )

    def close(self) -> None:
        """Stop the threads after their present step."""
        for turns in (self.quick, self.slow):
            turns.close()
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)


class Client(Protocol):
    """Who waits for a prompt (see ``HttpRequest``)."""

    left: bool
    on_left: list[Callable[[], None]]

    def hold(self, size: int) -> None:
        """Note that ``size`` bytes more are in memory for this request; a negative number releases them."""


class Work:
    """The work on one prompt: its tenant's turns, as long as its client waits."""

    __slots__ = ("_client", "_held", "_work", "stopped", "tenant")

    def __init__(self, work: PromptWork, tenant: str, client: Client | None = None) -> None:
        self._work = work
        self.tenant = tenant
        self._client = client
        self._held = 0
        self.stopped = False
        """No request waits for the result any more."""

    def is_stopped(self) -> bool:
        """For a step to ask that runs in a thread."""
        return self.stopped

    async def run(self, step: Callable[[], T], *, slow: bool = False, again: Again[T] = once) -> T:
        """The last result of a step, which is run while ``again`` says so and neither another step waits nor the work
        is stopped. Raises NoTurn, and what the step raises.
        """
        turns = self._work.slow if slow else self._work.quick
        return await turns.run(self.tenant, step, lambda result: not self.stopped and again(result))

    def hold(self, size: int) -> None:
        """Note that ``size`` bytes more are in memory until the work ends."""
        if self._client is not None:
            self._held += size
            self._client.hold(size)

    @asynccontextmanager
    async def within(self, s_max: float) -> AsyncIterator[None]:
        """Raises TimeoutError when the time is over or the client leaves."""
        client, timer = self._client, asyncio.timeout(s_max)
        if client is None:
            async with timer:
                yield
            return
        if client.left:
            raise NoTurn

        def leave() -> None:
            if not timer.expired():
                timer.reschedule(0.0)

        client.on_left.append(leave)
        try:
            async with timer:
                yield
        finally:
            self.stopped = True
            client.on_left.remove(leave)
            self.hold(-self._held)
