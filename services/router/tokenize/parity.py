"""Records whether engines tokenize and hash prompts as the router does, and which workers to probe again.

One worker that differs makes its whole fingerprint untrusted: a prompt is tokenized before its worker is chosen.
``ParityWatch`` has each new epoch of a worker tokenize probes, and logs an error when the router's tokens differ.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from services.router.placement.fleet import Fleet
from services.router.request.facts import RequestFacts
from services.router.request.fields import read_request
from services.router.request.prompt import Prompt
from services.router.tokenize.probes import probes
from services.router.tokenize.tokenizer import Adapter, PromptTokenizer
from shared.bus.port import Bus, BusError
from shared.contracts.channels import TOKENS
from shared.contracts.control import AskTokens, ProbePrompt, PromptTokens, TokensFound
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_events import unpack_hashes
from shared.contracts.workers import WorkerPhase, WorkerRecord
from shared.runtime.clock import Clock

ASK_AGAIN_S = 30.0
"""Time after which a worker that differs, or did not reply, is probed again."""


class Parity(StrEnum):
    """The result for one epoch of a worker."""

    UNKNOWN = "unknown"
    """The worker was not probed yet, or does not reply."""
    AGREES = "agrees"
    DIFFERS = "differs"


class ParityState(NamedTuple):
    epoch: Epoch
    fingerprint: str
    parity: Parity
    ask_at: float
    """When to probe the worker next."""


NEVER = float("inf")


class ParityBook:
    """The parity state of every worker."""

    def __init__(self) -> None:
        self.states: dict[WorkerId, ParityState] = {}
        self._differing: frozenset[str] = frozenset()

    def seen(self, worker_id: WorkerId, epoch: Epoch, fingerprint: str) -> bool:
        """Returns whether to probe the worker: it is new, or in a new epoch."""
        known = self.states.get(worker_id)
        if known is not None and known.epoch >= epoch:
            return False
        self._put(worker_id, ParityState(epoch, fingerprint, Parity.UNKNOWN, 0.0))
        return True

    def keep(self, worker_ids: Iterable[WorkerId]) -> None:
        """Drop all other workers."""
        for worker_id in self.states.keys() - set(worker_ids):
            del self.states[worker_id]
        self._count()

    def due(self, now: float) -> list[WorkerId]:
        return [worker_id for worker_id, state in self.states.items() if state.ask_at <= now]

    def next_at(self) -> float:
        """When the next probe is due."""
        return min((state.ask_at for state in self.states.values()), default=NEVER)

    def found(self, worker_id: WorkerId, epoch: Epoch, parity: Parity, now: float) -> bool:
        """The result of a probe. Returns whether it changed the state and should be logged."""
        known = self.states.get(worker_id)
        if known is None or known.epoch != epoch:
            return False
        ask_at = NEVER if parity is Parity.AGREES else now + ASK_AGAIN_S
        if parity is Parity.UNKNOWN and known.parity is Parity.DIFFERS:
            parity = Parity.DIFFERS  # a missing reply does not clear a difference
        self._put(worker_id, known._replace(parity=parity, ask_at=ask_at))
        return parity is not known.parity

    def leave(self, worker_id: WorkerId) -> None:
        """It cannot be probed now; ``ask_all`` makes it due again."""
        known = self.states.get(worker_id)
        if known is not None:
            self.states[worker_id] = known._replace(ask_at=NEVER)

    def ask_all(self, fingerprint: str) -> None:
        """The fingerprint's tokenizer has changed."""
        for worker_id, state in self.states.items():
            if state.fingerprint == fingerprint:
                self.states[worker_id] = state._replace(ask_at=0.0)

    def parity(self, worker_id: WorkerId) -> Parity:
        known = self.states.get(worker_id)
        return Parity.UNKNOWN if known is None else known.parity

    def trusted(self, fingerprint: str) -> bool:
        """Whether no worker of the fingerprint differs."""
        return fingerprint not in self._differing

    def _put(self, worker_id: WorkerId, state: ParityState) -> None:
        self.states[worker_id] = state
        self._count()

    def _count(self) -> None:
        states = self.states.values()
        self._differing = frozenset(one.fingerprint for one in states if one.parity is Parity.DIFFERS)


def difference(theirs: PromptTokens, tokens: int, hashes: Sequence[int]) -> str:
    """How the engine's tokens differ from the router's; empty when they do not. Raises ValueError."""
    if theirs.refusal:
        return ""  # the engine refuses such requests in any case
    if len(theirs.tokens) != tokens:
        return f"{len(theirs.tokens)} tokens there, {tokens} here"
    there = list(unpack_hashes(theirs.hashes))
    if there != list(hashes):
        pairs = zip(there, hashes, strict=False)
        same = next((n for n, (one, two) in enumerate(pairs) if one != two), min(len(there), len(hashes)))
        return f"{len(there)} blocks there, {len(hashes)} here, of which the first {same} are the same"
    return ""


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
        self, tokenizer: PromptTokenizer, facts: RequestFacts, adapter: tuple[str, str] | None = None
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
        adapters = {one.name: (one.name, one.hashed_as) for one in record.adapters[:1]}
        asked = probes(
            record.model,
            block_size=record.hashing.block_size,
            max_model_len=record.max_model_len,
            adapter=next(iter(adapters), ""),
        )
        try:
            ask = AskTokens(worker_id=record.worker_id, prompts=asked)
            found: TokensFound = await self._bus.ask(TOKENS, ask, timeout_s=PROBE_S_MAX)
        except BusError as error:
            log.info("%s does not reply to the tokenizer probes: %s", record.worker_id, error)
            return Parity.UNKNOWN, str(error)
        if found.epoch != record.epoch:
            return Parity.UNKNOWN, "another epoch of the worker replied"
        return await self._compare_prompts(tokenizer, asked, found, adapters)

    async def _compare_prompts(
        self, tokenizer: PromptTokenizer, asked: list[ProbePrompt], found: TokensFound, adapters: Mapping[str, Adapter]
    ) -> tuple[Parity, str]:
        """Up to the first one that differs."""
        compared = 0
        for number, (probe, theirs) in enumerate(zip(asked, found.prompts, strict=False), 1):
            facts = read_request(probe.path, probe.body)
            ours = await self._tokenizers.whole(tokenizer, facts, adapters.get(facts.model))
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
