"""Phase PROBING: a worker tests its KV exchange before it gets traffic, and again before it takes another role."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from services.worker.lifecycle.self_test import (
    Attempt,
    Outcome,
    PartnerKind,
    Result,
    as_text,
    next_partner,
    outcome_of,
    partners,
    pause_s,
)
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.workers import Role, WorkerPhase, WorkerRecord

log = logging.getLogger("baton.worker")

REGISTRY_S_MAX = 10.0
"""Time limit for the first read of the registry, after which the worker reports that it waits for it."""

PATIENCE_S = 3.0
"""Time after which the next partner is tried beside one that has not answered. A self-test takes some 0.1 s."""

Results = dict[PartnerKind, list[Attempt]]


class Peers(Protocol):
    """The workers that may exchange KV with this one (see ``PeerWatch``)."""

    @property
    def records(self) -> list[WorkerRecord]:
        """As registered."""

    def on_records(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` when a worker has joined, changed or left."""

    async def all_read(self) -> None:
        """Wait until every registered worker is known."""


class SelfTests(Protocol):
    """See ``SelfTestHandler``."""

    async def try_with(self, partner: WorkerRecord) -> Result:
        """Test each direction that is possible."""


class Prober:
    def __init__(self, worker_id: WorkerId, peers: Peers, self_tests: SelfTests, *, lends: bool = True) -> None:
        """``lends``: whether other workers can read this one's KV by block hash, which takes prefix caching."""
        self._worker_id = worker_id
        self._peers = peers
        self._self_tests = self_tests
        self._lends = lends
        self._changed = asyncio.Event()
        self._seen: set[tuple[WorkerId, Epoch, Role, WorkerPhase]] = set()
        peers.on_records(self._on_records)

    async def until_passed(self, report: Callable[[str], Awaitable[None]]) -> str:
        """Repeat until no kind of partner fails; ``report`` gets the failures of each round. Returns a note for the
        registry.
        """
        rounds = 0
        while True:
            self._changed.clear()
            if await self._registry_read(report):
                results = await self.test(PartnerKind)
                text = as_text(results)
                if not failed(results):
                    return text
                rounds += 1
                await report(text)
                await self._pause(pause_s(rounds))

    async def test(self, kinds: Iterable[PartnerKind]) -> Results:
        """One round with each of these kinds of partner, side by side."""
        kinds = list(kinds)
        async with asyncio.TaskGroup() as tasks:
            testing = [tasks.create_task(self._test_with(kind), name=f"probe-{kind.value}") for kind in kinds]
        return {kind: task.result() for kind, task in zip(kinds, testing, strict=True)}

    async def _test_with(self, kind: PartnerKind) -> list[Attempt]:
        """One partner after another, and the next one also beside those that take long: a partner whose connection is
        half open answers nothing until all time limits are over.
        """
        attempts: list[Attempt] = []
        trying: dict[asyncio.Task[Result], WorkerId] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                able = partners(self._worker_id, self._peers.records, kind, lends=self._lends)
                if partner := next_partner(able, attempts, list(trying.values())):
                    task = tasks.create_task(self._self_tests.try_with(partner), name=f"probe-{partner.worker_id}")
                    trying[task] = partner.worker_id
                if not trying:
                    return attempts
                done, _ = await asyncio.wait(trying, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
                attempts += [_attempt(trying.pop(task), task.result()) for task in done]
                if any(attempt.result.outcome is Outcome.PASSED for attempt in attempts):
                    for task in trying:
                        task.cancel()
                    return attempts

    def _on_records(self) -> None:
        """Ignores changes of notes: two workers that fail with each other would wake each other without a pause."""
        seen = {(it.worker_id, it.epoch, it.role, it.phase) for it in self._peers.records}
        if seen != self._seen:
            self._seen = seen
            self._changed.set()

    async def _registry_read(self, report: Callable[[str], Awaitable[None]]) -> bool:
        try:
            async with asyncio.timeout(REGISTRY_S_MAX):
                await self._peers.all_read()
        except TimeoutError:
            await report("the registry cannot be read, so partners for a KV self-test are unknown")
            return False
        return True

    async def _pause(self, seconds: float) -> None:
        """Ends early when a worker joins, changes or leaves."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass


def _attempt(partner: WorkerId, result: Result) -> Attempt:
    if result.outcome is not Outcome.PASSED:
        log.warning("KV self-test with %s %s: %s", partner, result.outcome.value, result.failure)
    return Attempt(partner, result)


def failed(results: Results) -> bool:
    return any(outcome_of(attempts) is Outcome.FAILED for attempts in results.values())
