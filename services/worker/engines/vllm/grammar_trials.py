"""Lets a request with structured output reach the engine only when its grammar compiles within bounds of time and
memory, which ``grammar_process`` tries out first.

The engine compiles on a few threads, of which none can be ended. A trial takes as long as the compilation, once for
each grammar. Trials of a second at most have their own places, so that they do not wait for long ones; tenants take
turns. A request that waits no more ends its trial.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Final, NamedTuple

import msgspec

from shared.bounded import Bounded
from shared.contracts.constraints import ORDINARY_BYTES_MAX, SCHEMA_CHARS_MAX, choice_fault, schema_fault, text_fault
from shared.fair_slots import FairSlots, NoTurn

BACKENDS: Final = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")
"""Libraries that compile. A child that compiled in time exits with the index of the one that vLLM chose."""
COMPILE_S_MAX: Final = 5.0
"""For this long a compilation may have the threads on which it runs, if they have a core each."""
THREADS: Final = 8
"""vLLM gives a compilation so many."""
QUICK_CPU_S: Final = 1.0
QUICK_S_MAX, LONG_S_MAX = 30.0, 120.0
"""Time limits of trials beside those of CPU time: a machine may be loaded, and a library may wait for nothing."""
QUICK_AT_ONCE, LONG_AT_ONCE = 2, 1
QUICK_WAITING_MAX, LONG_WAITING_MAX = 1024, 32
QUICK_TENANT_WAITING_MAX, LONG_TENANT_WAITING_MAX = 256, 8
VERDICTS_MAX: Final = 4096
ADVICE: Final = (
    "Ask for less at once: fewer choices or enumerated values, fewer optional properties, shorter texts, smaller "
    "repetitions (maxLength, {1,n})"
)

INVALID: Final = 100
"""A child's exit status: vLLM refuses the request itself, in time, and says why."""
NO_MEMORY: Final = 101
CHECK_TIMER: Final = (signal.ITIMER_VIRTUAL, signal.SIGVTALRM)
COMPILE_TIMER: Final = (signal.ITIMER_PROF, signal.SIGPROF)
HEADER: Final = struct.Struct("<I")


class Try(msgspec.Struct, frozen=True, tag=True):
    """Begin a trial. ``constraint``: fields of StructuredOutputsParams, as JSON. ``backends``: to try beside the one
    that vLLM chooses.
    """

    number: int
    constraint: str
    backends: list[str]
    cpu_s: float
    is_long: bool


class GiveUp(msgspec.Struct, frozen=True, tag=True):
    """End a trial; it is told as any other end."""

    number: int


class Tried(msgspec.Struct, frozen=True):
    """A trial's end: an exit status, or a signal as a negative number."""

    number: int
    status: int


encode = msgspec.msgpack.Encoder().encode
_tried = msgspec.msgpack.Decoder(Tried)


class GrammarRefused(Exception):
    """The engine must not compile this; the message is for the client."""


class GrammarProcess(NamedTuple):
    """As the worker has it."""

    pid: int
    connection: socket.socket


class Verdict(NamedTuple):
    """Why a grammar is refused (empty: it is not), and the libraries with which it was tried."""

    refusal: str
    tried: frozenset[str]


class Lane(NamedTuple):
    """Places for trials of a length."""

    slots: FairSlots
    cpu_s: float
    is_long: bool
    s_max: float


def cpu_s_max(cores: int) -> float:
    """CPU time of the longest compilation."""
    return COMPILE_S_MAX * min(THREADS, cores)


class GrammarTrials(asyncio.Protocol):
    """The trials of one engine."""

    def __init__(self, process: GrammarProcess, on_death: Callable[[str], None], cpu_s: float) -> None:
        """``cpu_s``: of the longest compilation."""
        self._process = process
        self._on_death = on_death
        self._transport: asyncio.Transport | None = None
        self._is_closed = False
        self._lanes = (
            Lane(
                _slots(QUICK_AT_ONCE, QUICK_WAITING_MAX, QUICK_TENANT_WAITING_MAX),
                min(QUICK_CPU_S, cpu_s),
                False,
                QUICK_S_MAX,
            ),
            Lane(_slots(LONG_AT_ONCE, LONG_WAITING_MAX, LONG_TENANT_WAITING_MAX), cpu_s, True, LONG_S_MAX),
        )
        self._verdicts: Bounded[bytes, Verdict] = Bounded(VERDICTS_MAX)
        self._turns: dict[bytes, tuple[asyncio.Lock, list[None]]] = {}
        """Lock of a grammar that is tried, and who waits or holds it."""
        self._seen: set[str] = set()
        """Libraries of the requests that the engine may have: it compiles all grammars with the first one's."""
        self._numbers = count()
        self._running: dict[int, asyncio.Future[int]] = {}
        self._received = bytearray()
        self.begun = 0
        """Trials, of all lanes."""

    async def connect(self) -> None:
        """Bind to the running event loop."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=self._process.connection)

    async def permit(self, params: Any, tenant: str) -> None:
        """Returns when the engine may compile this. ``params``: vLLM's
        StructuredOutputsParams. Raises GrammarRefused, and NoTurn when too many wait.
        """
        constraint = _checked(params)
        key = hashlib.sha256(constraint.encode()).digest()
        async with self._turn(key):
            verdict = self._verdicts.get(key)
            while verdict is None or not (verdict.refusal or verdict.tried >= self._seen):
                verdict = await self._verdict(constraint, tenant)
                self._verdicts.pop(key, None)
                self._verdicts[key] = verdict
        if verdict.refusal:
            raise GrammarRefused(verdict.refusal)

    @asynccontextmanager
    async def _turn(self, key: bytes) -> AsyncIterator[None]:
        """One request tries a grammar; the others that want the same wait for the verdict, or for their turn."""
        lock, users = self._turns.setdefault(key, (asyncio.Lock(), []))
        users.append(None)
        try:
            async with lock:
                yield
        finally:
            users.pop()
            if not users:
                del self._turns[key]

    async def _verdict(self, constraint: str, tenant: str) -> Verdict:
        beside = frozenset(self._seen)
        for lane in self._lanes:
            try:
                async with lane.slots.slot(tenant):
                    status = await self._tried(constraint, beside, lane)
            except TimeoutError:
                raise NoTurn from None
            if status != -COMPILE_TIMER[1]:
                break
        if status == INVALID:
            return Verdict("", frozenset(BACKENDS))
        if 0 <= status < len(BACKENDS):
            self._seen.add(BACKENDS[status])
            return Verdict("", beside | {BACKENDS[status]})
        return Verdict(self._refusal(status), beside)

    def _refusal(self, status: int) -> str:
        if status == -COMPILE_TIMER[1]:
            return f"This structured output takes more than {self._lanes[-1].cpu_s:g} s to compile. {ADVICE}."
        if status == -CHECK_TIMER[1]:
            return f"This structured output is too complex. {ADVICE}, and less nesting."
        return f"This structured output takes too much memory to compile, or cannot be compiled. {ADVICE}."

    async def _tried(self, constraint: str, beside: frozenset[str], lane: Lane) -> int:
        """How the child that tried it ended. Raises TimeoutError."""
        if self._transport is None or self._transport.is_closing():
            raise NoTurn
        number = next(self._numbers)
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._running[number] = done
        self.begun += 1
        self._send(Try(number, constraint, sorted(beside), lane.cpu_s, lane.is_long))
        try:
            async with asyncio.timeout(lane.s_max):
                return await done
        finally:
            if self._running.pop(number, None) is not None and not self._transport.is_closing():
                self._send(GiveUp(number))

    def _send(self, order: Try | GiveUp) -> None:
        assert self._transport is not None
        encoded = encode(order)
        self._transport.write(HEADER.pack(len(encoded)) + encoded)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            tried = _tried.decode(bytes(self._received[HEADER.size : end]))
            del self._received[:end]
            done = self._running.pop(tried.number, None)
            if done is not None and not done.done():
                done.set_result(tried.status)

    def connection_lost(self, _error: Exception | None) -> None:
        for done in self._running.values():
            if not done.done():
                done.set_exception(NoTurn())
        if not self._is_closed:
            self._on_death("the process that tries grammars has ended")

    def close(self) -> None:
        """End the process with its trials, and wait for it. Blocks for milliseconds."""
        self._is_closed = True
        os.kill(self._process.pid, signal.SIGTERM)
        os.waitpid(self._process.pid, 0)
        self._process.connection.close()


def _slots(at_once: int, waiting_max: int, tenant_waiting_max: int) -> FairSlots:
    return FairSlots(at_once, waiting_max=waiting_max, tenant_waiting_max=tenant_waiting_max)


def _checked(params: Any) -> str:
    """The constraint as JSON. Raises GrammarRefused when it is beyond a bound of ``constraints``."""
    given = {
        name: value
        for name, value in vars(params).items()
        if not name.startswith("_") and value is not None and value is not False
    }
    fault = choice_fault(given["choice"]) if isinstance(given.get("choice"), list) else ""
    for name in ("regex", "grammar"):
        if isinstance(text := given.get(name), str):
            fault = fault or text_fault(name, text)
    constraint = "" if fault else json.dumps(given)
    for name in ("json", "structural_tag"):
        if name in given and not fault:
            fault = schema_fault(_parsed(given[name], len(constraint)), len(constraint))
    if fault:
        raise GrammarRefused(f"{fault}.")
    return constraint


def _parsed(schema: Any, chars: int) -> Any:
    """A schema that is a text, unless its length alone says enough."""
    if not isinstance(schema, str) or not ORDINARY_BYTES_MAX < chars <= SCHEMA_CHARS_MAX:
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError):
        return schema
