"""Asks each new epoch of a worker to tokenize probes, and logs an error when the router tokenizes them differently."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from services.router.placement.request_fields import RequestFacts, read_request
from services.router.state.fleet import Fleet
from services.router.tokenize.parity import NEVER, Parity, ParityBook, difference, probes
from services.router.tokenize.segments import Prompt
from services.router.tokenize.tokenizer import Lora, PromptTokenizer
from shared.bus.port import Bus, BusError
from shared.contracts.channels import TOKENS
from shared.contracts.control import AskTokens, ProbePrompt, TokensFound
from shared.contracts.ids import WorkerId
from shared.contracts.workers import WorkerPhase, WorkerRecord
from shared.runtime.clock import Clock

log = logging.getLogger("baton.router")

PROBE_S_MAX = 15.0
"""Time limit for a worker to tokenize the probes. Its engine may be busy, and other routers may have asked before."""
PROBES_AT_ONCE = 4
"""Workers asked at the same time, so that one that hangs does not delay the others."""
ROUND_S_MIN = 1.0
"""Shortest pause between two rounds, unless one is requested."""
ANSWERING = frozenset({WorkerPhase.PROBING, WorkerPhase.READY})
"""Phases in which a worker is probed, so that the result is known before the worker's first request."""


class Tokenizers(Protocol):
    """The tokenizers of this router: ``Prompts``."""

    async def whole(
        self, tokenizer: PromptTokenizer, facts: RequestFacts, lora: tuple[str, str] | None = None
    ) -> Prompt | None:
        """All of a probe's prompt; None when it cannot be known exactly now."""

    def tokenizer_of(self, fingerprint: str) -> PromptTokenizer | None:
        """None when there is none, or it is not fetched yet."""

    def doubt(self, record: WorkerRecord) -> None:
        """A worker tokenizes differently."""


class ParityWatch:
    """``follow`` keeps the book up to date; placement reads ``trusted``."""

    def __init__(self, bus: Bus, clock: Clock, fleet: Fleet, tokenizers: Tokenizers) -> None:
        self.book = ParityBook()
        self._bus = bus
        self._clock = clock
        self._fleet = fleet
        self._tokenizers = tokenizers
        self._slots = asyncio.Semaphore(PROBES_AT_ONCE)
        self._wake = asyncio.Event()

    def worker_seen(self, record: WorkerRecord) -> None:
        """The worker has registered, or renewed its record."""
        if self.book.seen(record.worker_id, record.epoch, record.fingerprint.key()):
            self._wake.set()

    def trusted(self, fingerprint: str) -> bool:
        """Whether no worker of this fingerprint is known to tokenize differently from this router."""
        return self.book.trusted(fingerprint)

    def tokenizer_changed(self, fingerprint: str) -> None:
        """The fingerprint's tokenizer was fetched: probe all its workers."""
        self.book.ask_all(fingerprint)
        self._wake.set()

    async def follow(self) -> None:
        """Probe the workers that are due, until cancelled."""
        while True:
            self._wake.clear()
            self.book.keep(self._fleet.cluster.workers)
            async with asyncio.TaskGroup() as asking:
                for worker_id in self.book.due(self._clock.now()):
                    asking.create_task(self._probe(worker_id), name=f"probe-tokens {worker_id}")
            next_at = self.book.next_at()
            try:
                async with asyncio.timeout(max(ROUND_S_MIN, next_at - self._clock.now()) if next_at < NEVER else None):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _probe(self, worker_id: WorkerId) -> None:
        view = self._fleet.cluster.workers.get(worker_id)
        tokenizer = None if view is None else self._tokenizers.tokenizer_of(view.record.fingerprint.key())
        if view is None or tokenizer is None or view.record.phase not in ANSWERING:
            self.book.leave(worker_id)
            return
        record = view.record
        async with self._slots:
            parity, why = await self._compare(record, tokenizer)
        if self.book.found(worker_id, record.epoch, parity, self._clock.now()):
            self._log_result(record, parity, why)

    def _log_result(self, record: WorkerRecord, parity: Parity, why: str) -> None:
        if parity is not Parity.DIFFERS:
            log.info("worker %s tokenizes like this router: %s", record.worker_id, parity.value)
            return
        message = "worker %s tokenizes differently from this router, so %s is placed by load alone: %s"
        log.error(message, record.worker_id, record.models[:1], why)
        self._tokenizers.doubt(record)

    async def _compare(self, record: WorkerRecord, tokenizer: PromptTokenizer) -> tuple[Parity, str]:
        loras = {adapter.name: (adapter.name, adapter.hashed_as) for adapter in record.adapters[:1]}
        asked = probes(
            record.models[0],
            block_size=record.hashing.block_size,
            max_model_len=record.max_model_len,
            adapter=next(iter(loras), ""),
        )
        try:
            ask = AskTokens(worker_id=record.worker_id, prompts=asked)
            found: TokensFound = await self._bus.ask(TOKENS, ask, timeout_s=PROBE_S_MAX)
        except BusError as error:
            log.info("%s does not reply to the tokenizer probes: %s", record.worker_id, error)
            return Parity.UNKNOWN, str(error)
        if found.epoch != record.epoch:
            return Parity.UNKNOWN, "another epoch of the worker replied"
        return await self._compare_prompts(tokenizer, asked, found, loras)

    async def _compare_prompts(
        self, tokenizer: PromptTokenizer, asked: list[ProbePrompt], found: TokensFound, loras: Mapping[str, Lora]
    ) -> tuple[Parity, str]:
        """Up to the first one that differs."""
        compared = 0
        for number, (probe, theirs) in enumerate(zip(asked, found.prompts, strict=False), 1):
            facts = read_request(probe.path, probe.body)
            ours = await self._tokenizers.whole(tokenizer, facts, loras.get(facts.model))
            if ours is None:
                continue  # The router does not tokenize such requests: they are placed by load alone.
            try:
                why = difference(theirs, ours.tokens, ours.hashes)
            except ValueError as error:
                return Parity.UNKNOWN, str(error)
            if why:
                return Parity.DIFFERS, f"probe {number} ({probe.path}): {why}"
            compared += not theirs.refusal
        return (Parity.AGREES, "") if compared else (Parity.UNKNOWN, "the engine refused every probe")
