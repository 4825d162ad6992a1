"""Workers that fetch prefixes by command."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from connector.messages import EngineCall, EngineNotification, FetchEnded
from shared.contracts.channels import WORKER_RECORDS
from shared.contracts.kv_exchange import FetchedKv, FetchKv, unpack_full_hashes
from shared.contracts.workers import Role, WorkerPhase
from tests.support.fleet_builders import record
from tests.support.memory_bus import MemoryHub
from tests.unit.worker.kv_exchange.fakes import OneWorker

BLOCK_BYTES = 7


class Stayer(OneWorker):
    """Fetches what it is told to, and has in ``held`` what it has."""

    def __init__(self, hub: MemoryHub, worker_id: str, role: Role = Role.BOTH) -> None:
        super().__init__(hub, worker_id)
        self.role = role
        self.held: set[bytes] = set()
        self.fetches: list[FetchKv] = []
        self.takes: Callable[[int], int] = lambda wanted: wanted
        """How many blocks it has room for."""
        self.engine.answer = self._answer

    async def say(self, phase: WorkerPhase = WorkerPhase.READY) -> None:
        worker_records = await self.bus.key_value_store(WORKER_RECORDS)
        await worker_records.put(msgspec.structs.replace(record(self.worker_id, phase, self.epoch), role=self.role))

    def _answer(self, call: EngineCall) -> EngineNotification:
        return EngineNotification(
            fetched=[FetchEnded(fetch_id=one.fetch_id, result=self._fetch(one.fetch)) for one in call.fetches]
        )

    def _fetch(self, fetch: FetchKv) -> FetchedKv:
        hashes = unpack_full_hashes(fetch.hashes)
        held = next((at for at, block in enumerate(hashes) if block not in self.held), len(hashes))
        if not fetch.sources:
            return FetchedKv(held=held)
        self.fetches.append(fetch)
        fetched = self.takes(len(hashes) - held)
        self.held.update(hashes[: held + fetched])
        return FetchedKv(held=held, fetched=fetched, bytes=fetched * BLOCK_BYTES)
