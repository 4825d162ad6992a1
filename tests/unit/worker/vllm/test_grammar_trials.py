"""Which grammars an engine may compile, by trials in a process whose place the test takes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace

import msgspec
import pytest

from services.worker.engines.vllm.grammar_trials import (
    BACKENDS,
    COMPILE_S_MAX,
    HEADER,
    INVALID,
    LONG_TENANT_WAITING_MAX,
    NO_MEMORY,
    QUICK_AT_ONCE,
    QUICK_CPU_S,
    THREADS,
    GiveUp,
    GrammarProcess,
    GrammarRefused,
    GrammarTrials,
    Tried,
    Try,
    cpu_s_max,
    encode,
)
from shared.fair_slots import NoTurn

CPU_S = 10.0
XGRAMMAR, GUIDANCE = (BACKENDS.index(name) for name in ("xgrammar", "guidance"))
TOO_LONG, TOO_COMPLEX = -signal.SIGPROF, -signal.SIGVTALRM
_orders = msgspec.msgpack.Decoder(Try | GiveUp)


class Process:
    """The other end of the connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection

    async def order(self) -> Try | GiveUp:
        async with asyncio.timeout(10.0):
            (size,) = HEADER.unpack(await self._received(HEADER.size))
            return _orders.decode(await self._received(size))

    async def _received(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += await asyncio.get_running_loop().sock_recv(self._connection, size - len(data))
        return data

    async def tell(self, order: Try, status: int) -> None:
        told = encode(Tried(order.number, status))
        await asyncio.get_running_loop().sock_sendall(self._connection, HEADER.pack(len(told)) + told)

    async def is_idle(self) -> bool:
        await settle()
        try:
            return not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True

    def end(self) -> None:
        self._connection.close()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Trials:
    def __init__(self, trials: GrammarTrials, process: Process, deaths: list[str]) -> None:
        self.trials = trials
        self.process = process
        self.deaths = deaths

    def ask(self, regex: str, tenant: str = "t") -> asyncio.Task[None]:
        return asyncio.create_task(self.trials.permit(SimpleNamespace(regex=regex), tenant))


@pytest.fixture
async def made() -> AsyncIterator[Trials]:
    ours, theirs = socket.socketpair()
    deaths: list[str] = []
    trials = GrammarTrials(GrammarProcess(os.getpid(), ours), deaths.append, CPU_S)
    await trials.connect()
    process = Process(theirs)
    yield Trials(trials, process, deaths)
    process.end()
    await settle()
    ours.close()


async def test_what_compiles_in_time_is_permitted_and_not_tried_again(made):
    first, second = made.ask("a"), made.ask("a")
    order = await made.process.order()
    await made.process.tell(order, XGRAMMAR)
    await asyncio.gather(first, second)

    await made.ask("a")

    assert (order.constraint, order.cpu_s, order.is_long) == ('{"regex": "a"}', QUICK_CPU_S, False)
    assert await made.process.is_idle()


@pytest.mark.parametrize(
    ("statuses", "says"),
    [
        ((TOO_LONG, TOO_LONG), "more than 10 s to compile"),
        ((TOO_COMPLEX,), "too complex"),
        ((NO_MEMORY,), "memory"),
        ((-signal.SIGSEGV,), "cannot be compiled"),
        ((TOO_LONG, -signal.SIGKILL), "memory"),
    ],
)
async def test_what_does_not_is_refused_the_next_time_at_once(made, statuses, says):
    asked = made.ask("a")
    for status in statuses:
        await made.process.tell(await made.process.order(), status)

    with pytest.raises(GrammarRefused, match=says):
        await asked
    with pytest.raises(GrammarRefused, match=says):
        await made.ask("a")

    assert await made.process.is_idle()


async def test_what_vllm_refuses_itself_is_left_to_it(made):
    asked = made.ask("(")
    await made.process.tell(await made.process.order(), INVALID)

    await asked


async def test_a_long_trial_is_begun_again_in_its_own_place_and_does_not_hold_up_quick_ones(made):
    asked = [made.ask(f"long {number}") for number in range(3)]
    begun = [order for _ in range(4) if not await too_long(order := await made.process.order(), made)]
    (long,) = begun
    quick = made.ask("quick")
    await made.process.tell(await made.process.order(), XGRAMMAR)

    await quick

    assert (long.is_long, long.cpu_s) == (True, CPU_S)
    assert await made.process.is_idle(), "one long trial at a time"
    for _ in asked[1:]:
        await made.process.tell(long, XGRAMMAR)
        long = await made.process.order()
        assert long.is_long
    await made.process.tell(long, XGRAMMAR)
    await asyncio.gather(*asked)


async def too_long(order: Try, made: Trials) -> bool:
    """Ends a quick trial; returns False for a long one."""
    if not order.is_long:
        await made.process.tell(order, TOO_LONG)
    return not order.is_long


async def test_a_request_that_waits_no_more_ends_its_trial_and_the_next_begins(made):
    asked = [made.ask(f"{number}") for number in range(QUICK_AT_ONCE + 1)]
    begun = [await made.process.order() for _ in range(QUICK_AT_ONCE)]
    assert await made.process.is_idle()

    asked[0].cancel()

    ended, following = await made.process.order(), await made.process.order()
    assert ended == GiveUp(begun[0].number)
    assert isinstance(following, Try)
    for order in (*begun, following):  # That of the first comes too late to matter.
        await made.process.tell(order, XGRAMMAR)
    await asyncio.gather(*asked[1:])


async def test_another_request_for_the_same_takes_over(made):
    first, second = made.ask("a"), made.ask("a")
    begun = await made.process.order()

    first.cancel()

    assert await made.process.order() == GiveUp(begun.number)
    await made.process.tell(await made.process.order(), XGRAMMAR)
    await second


async def test_those_who_wait_for_long_trials_are_bounded(made):
    asked = [made.ask(f"{number}") for number in range(LONG_TENANT_WAITING_MAX + 2)]
    running = []
    for _ in asked:
        order = await made.process.order()
        if order.is_long:
            running.append(order)
            order = await made.process.order()
        await made.process.tell(order, TOO_LONG)
    done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)

    assert [type(one.exception()) for one in done] == [NoTurn]
    for one in asked:
        one.cancel()
    await settle()


async def test_all_libraries_are_tried_with_which_the_engine_may_compile(made):
    """It compiles every grammar with the library that its first request needed."""
    one, other = made.ask("one"), made.ask("other")
    first, second = await made.process.order(), await made.process.order()
    assert first.backends == second.backends == []
    await made.process.tell(first, XGRAMMAR)
    await one

    await made.process.tell(second, GUIDANCE)

    again = await made.process.order()
    assert (again.constraint, again.backends) == (second.constraint, ["guidance", "xgrammar"])
    await made.process.tell(again, GUIDANCE)
    await other
    known = made.ask("one")
    again = await made.process.order()
    assert (again.constraint, again.backends) == (first.constraint, ["guidance", "xgrammar"])
    await made.process.tell(again, -signal.SIGPROF)
    await made.process.tell(await made.process.order(), -signal.SIGPROF)
    with pytest.raises(GrammarRefused):
        await known


@pytest.mark.parametrize(
    "demand",
    [
        {"choice": ["ab"] * 20_000},
        {"choice": ["x" * 2_000_000]},
        {"regex": "x" * 200_000},
        {"grammar": "x" * 200_000},
        {"json": {"enum": [str(number) for number in range(20_000)]}},
        {"json": json.dumps({"enum": list(range(20_000))})},
        {"structural_tag": json.dumps({"enum": list(range(20_000))})},
        {"json": {"title": "x" * 600_000}},
    ],
    ids=lambda demand: f"{next(iter(demand))} {str(demand)[:30]}",
)
async def test_what_is_beyond_a_bound_is_not_even_tried(made, demand):
    with pytest.raises(GrammarRefused, match="at most"):
        await made.trials.permit(SimpleNamespace(**demand), "t")

    assert await made.process.is_idle()


async def test_the_end_of_the_process_fails_trials_and_is_told(made):
    asked = made.ask("a")
    await made.process.order()

    made.process.end()

    with pytest.raises(NoTurn):
        await asked
    with pytest.raises(NoTurn):
        await made.ask("b")
    assert made.deaths == ["the process that tries grammars has ended"]


def test_more_cores_give_more_cpu_time():
    assert [cpu_s_max(cores) for cores in (1, 2, 64)] == [COMPILE_S_MAX, 2 * COMPILE_S_MAX, THREADS * COMPILE_S_MAX]
