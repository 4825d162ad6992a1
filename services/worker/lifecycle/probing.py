"""Before a worker gets traffic, and when it takes on another role: self_tests with one partner of each kind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from services.worker.lifecycle.self_test import (
    Attempt,
    Finding,
    Kind,
    Outcome,
    as_text,
    next_partner,
    partners,
    pause_s,
    verdict,
)
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.workers import Role, WorkerPhase, WorkerRecord

log = logging.getLogger("baton.worker")

REGISTRY_S_MAX = 10.0
"""For everybody's records to be read once; then the worker says that it waits for that."""

Found = dict[Kind, list[Attempt]]
"""All attempts with each kind of partner."""


class Neighbours(Protocol):
    """Whom a worker may exchange KV with (see ``exchange.peers.PeerWatch``)."""

    @property
    def records(self) -> list[WorkerRecord]:
        """As they registered."""

    def on_records(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` when one has joined, changed or left."""

    async def all_read(self) -> None:
        """Wait until everybody who is registered is known."""


class SelfTests(Protocol):
    """See ``self_tests.SelfTestHandler``."""

    async def try_with(self, partner: WorkerRecord) -> Finding:
        """In both directions."""


class Prober:
    """One worker's transfer_report that it can exchange KV."""

    def __init__(
        self, worker_id: WorkerId, neighbours: Neighbours, self_tests: SelfTests, *, lends: bool = True
    ) -> None:
        """``lends``: whether other workers can read this one's KV by block hash, which takes prefix caching."""
        self._worker_id = worker_id
        self._neighbours = neighbours
        self._self_tests = self_tests
        self._lends = lends
        self._changed = asyncio.Event()
        self._seen: set[tuple[WorkerId, Epoch, Role, WorkerPhase]] = set()
        neighbours.on_records(self._look_again)

    async def until_proven(self, say: Callable[[str], Awaitable[None]]) -> str:
        """Try until nothing speaks against this worker; ``say`` is told what does. Answers what should be noted."""
        rounds = 0
        while True:
            self._changed.clear()
            if await self._registry_read(say):
                found = await self.prove(Kind)
                words = as_text(found)
                if not failed(found):
                    return words
                rounds += 1
                await say(words)
                await self._pause(pause_s(rounds))

    async def prove(self, kinds: Iterable[Kind]) -> Found:
        """Once, with each of these kinds of partner."""
        kinds = list(kinds)
        async with asyncio.TaskGroup() as tasks:
            trying = [tasks.create_task(self._prove_with(kind), name=f"probe-{kind.value}") for kind in kinds]
        return {kind: task.result() for kind, task in zip(kinds, trying, strict=True)}

    async def _prove_with(self, kind: Kind) -> list[Attempt]:
        attempts: list[Attempt] = []
        while partner := next_partner(
            partners(self._worker_id, self._neighbours.records, kind, lends=self._lends), attempts
        ):
            found = await self._self_tests.try_with(partner)
            attempts.append(Attempt(partner.worker_id, found))
            if found.outcome is not Outcome.PASSED:
                log.warning("a self_test with %s %s: %s", partner.worker_id, found.outcome.value, found.why)
        return attempts

    def _look_again(self) -> None:
        """Not for every word of another one's record, or two that fail with each other would never pause."""
        seen = {(it.worker_id, it.epoch, it.role, it.phase) for it in self._neighbours.records}
        if seen != self._seen:
            self._seen = seen
            self._changed.set()

    async def _registry_read(self, say: Callable[[str], Awaitable[None]]) -> bool:
        try:
            async with asyncio.timeout(REGISTRY_S_MAX):
                await self._neighbours.all_read()
        except TimeoutError:
            await say("the registry does not say who else is there")
            return False
        return True

    async def _pause(self, seconds: float) -> None:
        """Shorter if somebody joins, changes or leaves."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass


def failed(found: Found) -> bool:
    """Whether something speaks against this worker."""
    return any(verdict(attempts) is Outcome.FAILED for attempts in found.values())
