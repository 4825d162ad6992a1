"""Asks each new life of a worker how its engine tokenizes, and says loudly when the router would be wrong about it."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor
from typing import Protocol

from services.router.placement.request_fields import read_request
from services.router.state.fleet import Fleet
from services.router.tokenize.parity import NEVER, Parity, ParityBook, difference, probes
from services.router.tokenize.tokenizer import PromptTokenizer
from shared.bus.port import Bus, BusError
from shared.contracts.channels import TOKENS
from shared.contracts.control import AskTokens, TokensFound
from shared.contracts.ids import WorkerId
from shared.contracts.workers import WorkerPhase, WorkerRecord
from shared.runtime.clock import Clock

log = logging.getLogger("baton.router")

PROBE_S_MAX = 15.0
"""For a worker to tokenize the probes; its engine may be busy, and other routers may have asked before."""
PROBES_AT_ONCE = 4
"""Workers asked side by side, so that one that hangs does not keep the others waiting."""
LOOK_S = 1.0
"""Between two rounds that nobody asked for."""
ANSWERING = frozenset({WorkerPhase.PROBING, WorkerPhase.READY})
"""Phases in which a worker may be asked: everything is prepared before its first request."""


class TokenizerShelf(Protocol):
    """Where the tokenizers are."""

    @property
    def threads(self) -> Executor:
        """Where long prompts are tokenized."""

    def tokenizer_of(self, fingerprint: str) -> PromptTokenizer | None:
        """None when there is none, or none yet."""

    def doubt(self, record: WorkerRecord) -> None:
        """A worker tokenizes otherwise."""


class ParityWatch:
    """``follow`` keeps the book true. ``trusted`` is what placement asks."""

    def __init__(self, bus: Bus, clock: Clock, fleet: Fleet, shelf: TokenizerShelf) -> None:
        self.book = ParityBook()
        self._bus = bus
        self._clock = clock
        self._fleet = fleet
        self._shelf = shelf
        self._slots = asyncio.Semaphore(PROBES_AT_ONCE)
        self._wake = asyncio.Event()

    def worker_seen(self, record: WorkerRecord) -> None:
        """It has registered, or its record was renewed."""
        if self.book.seen(record.worker_id, record.epoch, record.fingerprint.key()):
            self._wake.set()

    def trusted(self, fingerprint: str) -> bool:
        """Whether no worker of this fingerprint is known to tokenize otherwise than this router."""
        return self.book.trusted(fingerprint)

    def tokenizer_changed(self, fingerprint: str) -> None:
        """It was fetched, for the first time or anew: all its workers are asked."""
        self.book.ask_all(fingerprint)
        self._wake.set()

    async def follow(self) -> None:
        """Ask who is to be asked, for ever."""
        while True:
            self._wake.clear()
            self.book.keep(self._fleet.cluster.workers)
            async with asyncio.TaskGroup() as asking:
                for worker_id in self.book.due(self._clock.now()):
                    asking.create_task(self._probe(worker_id), name=f"probe-tokens {worker_id}")
            next_at = self.book.next_at()
            try:
                async with asyncio.timeout(max(LOOK_S, next_at - self._clock.now()) if next_at < NEVER else None):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _probe(self, worker_id: WorkerId) -> None:
        view = self._fleet.cluster.workers.get(worker_id)
        tokenizer = None if view is None else self._shelf.tokenizer_of(view.record.fingerprint.key())
        if view is None or tokenizer is None or view.record.phase not in ANSWERING:
            self.book.leave(worker_id)
            return
        record = view.record
        async with self._slots:
            parity, why = await self._compare(record, tokenizer)
        if self.book.found(worker_id, record.epoch, parity, self._clock.now()):
            self._tell(record, parity, why)

    def _tell(self, record: WorkerRecord, parity: Parity, why: str) -> None:
        if parity is not Parity.DIFFERS:
            log.info("worker %s tokenizes as this router does: %s", record.worker_id, parity.value)
            return
        message = "worker %s does not tokenize as this router does, so %s is placed by load alone: %s"
        log.error(message, record.worker_id, record.models[:1], why)
        self._shelf.doubt(record)

    async def _compare(self, record: WorkerRecord, tokenizer: PromptTokenizer) -> tuple[Parity, str]:
        asked = probes(record.models[0], block_size=record.hashing.block_size, max_model_len=record.max_model_len)
        try:
            ask = AskTokens(worker_id=record.worker_id, prompts=asked)
            found: TokensFound = await self._bus.ask(TOKENS, ask, timeout_s=PROBE_S_MAX)
        except BusError as error:
            log.info("%s does not say how it tokenizes: %s", record.worker_id, error)
            return Parity.UNKNOWN, str(error)
        if found.epoch != record.epoch:
            return Parity.UNKNOWN, "another life of the worker answered"
        loop, compared = asyncio.get_running_loop(), 0
        for number, (probe, theirs) in enumerate(zip(asked, found.prompts, strict=False), 1):
            facts = read_request(probe.path, probe.body)
            ours = await loop.run_in_executor(self._shelf.threads, tokenizer.whole_prompt, facts)
            if ours is None:
                continue  # such requests are placed by load alone anyway
            try:
                why = difference(theirs, ours.tokens, ours.hashes)
            except ValueError as error:
                return Parity.UNKNOWN, str(error)
            if why:
                return Parity.DIFFERS, f"probe {number} ({probe.path}): {why}"
            compared += not theirs.refusal
        return (Parity.AGREES, "") if compared else (Parity.UNKNOWN, "the engine refused every probe")
