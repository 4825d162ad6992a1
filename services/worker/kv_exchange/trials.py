"""Has peers' NIXL metadata tried by a process that may die (``connector.transfer.trial``) before an engine loads it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import Enum
from hashlib import sha256
from typing import NamedTuple, Self

import msgspec

from connector.transfer.trial import LENGTH_BYTES, Ended, Trial, TrialEnded, TrialRank
from shared.contracts.kv_exchange import KvHandshake, KvRank

log = logging.getLogger("baton.worker")

TRIALS_AT_ONCE_MAX = 4
TRIAL_S_MAX = 60.0
"""Time limit for a trial, with the start of the process."""
VERDICTS_MAX = 4096
"""Metadata whose trial is remembered, the newest."""
PIECES_MAX = 1 << 16
"""Pieces of memory of which a trial reads the beginning. A rank has some for each layer."""
PIECE_BYTES = 8
NOT_ITS_FAULT = {signal.SIGALRM, signal.SIGKILL, signal.SIGTERM}
"""Signals that say nothing about the metadata: the machine was busy, or without memory, or somebody sent them."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(TrialEnded).decode


class Outcome(Enum):
    PASSED = "passed"
    REFUSED = "refused"
    """NIXL refused it, as it would in the engine, or it could not be tried. It may be tried again."""
    DEADLY = "deadly"
    """The metadata ended the process, or took too much of the machine."""


class Verdict(NamedTuple):
    outcome: Outcome
    why: str = ""
    transport: str = ""
    """What moves bytes from there, if UCX does and could say it."""


PASSED = Verdict(Outcome.PASSED)


def trial_command(nixl_package: str, backend: str) -> tuple[str, ...]:
    return sys.executable, "-m", "connector.transfer.trial", nixl_package, backend


class Trials:
    """The trials of one worker, with ``async with``. The process that tries them starts there, since it takes half a
    second of CPU time to start and a trial 50 ms; one that has ended is started again when it is needed.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._server: _Server | None = None
        self._starting = asyncio.Lock()
        self._numbers = 0
        self._turns = asyncio.Semaphore(TRIALS_AT_ONCE_MAX)
        self._verdicts: dict[bytes, Verdict] = {}
        """Verdicts by the digest of what was tried, without refusals: the peer may have been about to end."""

    async def __aenter__(self) -> Self:
        with suppress(OSError):  # A trial says why.
            await self._running()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._server is not None:
            await self._server.close()

    async def verdict(self, peer: KvHandshake, own: KvHandshake) -> Verdict:
        """Whether an engine with the handshake ``own`` may load the metadata of the peer's ranks."""
        # A process with GPU memory knows transports that a trial does not, so the engine finds out what NIXL refuses.
        knows_all = all(rank.device == "cpu" for rank in (*peer.ranks, *own.ranks))
        digest = sha256(_encode(peer.ranks)).digest()
        if (known := self._verdicts.get(digest)) is not None:
            return known
        async with self._turns:
            verdict = await self._try(peer.ranks, knows_all=knows_all)
        if verdict.outcome is not Outcome.REFUSED:
            if len(self._verdicts) >= VERDICTS_MAX:
                del self._verdicts[next(iter(self._verdicts))]
            self._verdicts[digest] = verdict
        return verdict

    async def _try(self, ranks: Sequence[KvRank], *, knows_all: bool) -> Verdict:
        if sum(len(layer.planes) for rank in ranks for layer in rank.layers) > PIECES_MAX:
            return Verdict(Outcome.REFUSED, f"it describes more than {PIECES_MAX} pieces of memory")
        self._numbers += 1
        trial = Trial(self._numbers, [TrialRank(rank.agent, list(_pieces(rank))) for rank in ranks])
        try:
            async with asyncio.timeout(TRIAL_S_MAX):
                ended = await (await self._running()).run(trial)
        except OSError as error:
            return _not_tried(str(error))
        except TimeoutError:
            if self._server is not None:
                self._server.kill()
            return _not_tried(f"the trial took longer than {TRIAL_S_MAX:g} s")
        return _verdict(ended) if knows_all or ended.status != Ended.REFUSED else PASSED

    async def _running(self) -> _Server:
        """Raises OSError."""
        async with self._starting:
            if self._server is None or self._server.has_ended:
                self._server = await _Server.start(self._command)
            return self._server


def _pieces(rank: KvRank) -> Iterator[tuple[int, int, int]]:
    """The beginning of each piece of block 0. A trial has no GPU."""
    if rank.device == "cpu":
        for layer in rank.layers:
            for plane in layer.planes:
                size = min(PIECE_BYTES, plane.heads * plane.head_bytes)
                yield layer.base + plane.offset, size, rank.device_id


def _verdict(ended: TrialEnded) -> Verdict:
    if ended.status == Ended.PASSED:
        return Verdict(Outcome.PASSED, transport=ended.text)
    if ended.status == Ended.REFUSED:
        return Verdict(Outcome.REFUSED, ended.text)
    if ended.status == Ended.TOO_LARGE:
        return Verdict(Outcome.DEADLY, "its metadata takes too much memory")
    if ended.status == Ended.NOT_BEGUN or -ended.status in NOT_ITS_FAULT:
        return _not_tried(f"exit status {ended.status} {ended.text}".strip())
    return Verdict(Outcome.DEADLY, f"its metadata ends a process (exit status {ended.status})")


def _not_tried(why: str) -> Verdict:
    return Verdict(Outcome.REFUSED, f"its metadata was not tried: {why}")


class _Server:
    """One process that tries metadata."""

    def __init__(self, process: Process) -> None:
        self.has_ended = False
        self._process = process
        self._waiting: dict[int, asyncio.Future[TrialEnded]] = {}
        self._following = asyncio.create_task(self._follow(), name="follow-trials")

    @classmethod
    async def start(cls, command: Sequence[str]) -> _Server:
        """Raises OSError. Imports what this process imports, without a GPU: an engine needs that."""
        path = os.pathsep.join(filter(None, sys.path))
        environ = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return cls(await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environ))

    async def run(self, trial: Trial) -> TrialEnded:
        """Raises OSError if the process ends."""
        done: asyncio.Future[TrialEnded] = asyncio.get_running_loop().create_future()
        self._waiting[trial.number] = done
        try:
            packed = _encode(trial)
            assert self._process.stdin is not None
            self._process.stdin.write(len(packed).to_bytes(LENGTH_BYTES) + packed)
            return await done
        finally:
            del self._waiting[trial.number]

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        if not self.has_ended:
            self.kill()
        await self._following

    async def _follow(self) -> None:
        assert self._process.stdout is not None
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                length = int.from_bytes(await self._process.stdout.readexactly(LENGTH_BYTES))
                ended = _decode(await self._process.stdout.readexactly(length))
                waiting = self._waiting.get(ended.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(ended)
        self.has_ended = True
        status = await self._process.wait()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(OSError(f"the process that tries metadata has ended (exit status {status})"))
