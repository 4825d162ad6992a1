"""Feeds the prefix index from the bus: each worker's KV events, and a snapshot when events were missed."""

from __future__ import annotations

import asyncio
import logging

from services.router.state.native_block_table import IS_COMPILED
from services.router.state.prefix_index import IndexState, PrefixIndex
from shared.bus.port import Bus, BusError, Envelope
from shared.contracts.channels import KV_EVENTS, KV_SNAPSHOT
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_events import AskKvSnapshot, KvDigest, KvEventBatch

log = logging.getLogger("baton.router")

SNAPSHOT_S_MAX = 5.0
"""For a worker to send a snapshot."""
SNAPSHOT_GAP_S = 0.05
"""Between two requests for a worker's snapshot, doubled after each failure."""
SNAPSHOT_GAP_S_MAX = 5.0
ASKS_AT_ONCE_MAX = 32
"""Workers whose snapshots are requested at the same time: a starting router needs all of a fleet's, and must read each
reply within SNAPSHOT_S_MAX.
"""
FAILURES_MAX = 3
"""Failed requests after which a worker is placed by load alone; the router keeps trying."""


class KvFeed:
    """Keeps ``Fleet.index`` up to date. One task per worker that needs a snapshot, children of ``follow``."""

    def __init__(self, bus: Bus, index: PrefixIndex) -> None:
        self._bus = bus
        self._index = index
        self._wake = asyncio.Event()
        self._asking: set[WorkerId] = set()
        self._slots = asyncio.Semaphore(ASKS_AT_ONCE_MAX)
        self.snapshots = 0
        """Number of snapshots requested so far."""

    async def open(self) -> None:
        """Listen; live when it returns."""
        if not IS_COMPILED:
            log.warning("the prefix index runs in Python, several times slower: no compiler when Baton was installed")
        await self._bus.subscribe(KV_EVENTS, self._on_batch, on_dropped=self.doubt_all)
        self._bus.on_reconnect(self.doubt_all)

    async def follow(self) -> None:
        """Request snapshots where they are needed, until cancelled."""
        async with asyncio.TaskGroup() as asking:
            while True:
                await self._wake.wait()
                self._wake.clear()
                for worker_id in self._index.wanting():
                    if worker_id not in self._asking:
                        self._asking.add(worker_id)
                        asking.create_task(self._ask_until_exact(worker_id), name=f"kv-snapshot {worker_id}")

    def worker_joined(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """A worker, or a new epoch of one."""
        self._index.join(worker_id, epoch)
        self._wake.set()

    def check(self, worker_id: WorkerId, epoch: Epoch, digest: KvDigest) -> None:
        """Compare the index with the digest in a load report."""
        if self._index.check(worker_id, epoch, digest):
            self._wake.set()

    def doubt_all(self) -> None:
        """Events may have been missed."""
        for worker_id in list(self._index.entries):
            self._index.doubt(worker_id)
        self._wake.set()

    def _on_batch(self, batch: KvEventBatch, _envelope: Envelope) -> None:
        try:
            wanted = self._index.apply(batch)
        except ValueError as error:
            log.warning("KV events of %s cannot be read: %s", batch.worker_id, error)
            self._index.doubt(batch.worker_id)
            wanted = True
        if wanted:
            self._wake.set()

    async def _ask_until_exact(self, worker_id: WorkerId) -> None:
        failures, gap_s = 0, SNAPSHOT_GAP_S
        try:
            while worker_id in self._index.entries and self._index.state(worker_id) is not IndexState.EXACT:
                if not await self._ask(worker_id):
                    failures += 1
                    gap_s = min(2 * gap_s, SNAPSHOT_GAP_S_MAX)
                    if failures == FAILURES_MAX:
                        self._index.give_up(worker_id)
                    await asyncio.sleep(gap_s)
        finally:
            self._asking.discard(worker_id)

    async def _ask(self, worker_id: WorkerId) -> bool:
        try:
            ask = AskKvSnapshot(worker_id=worker_id)
            async with self._slots:
                self.snapshots += 1
                snapshot = await self._bus.ask(KV_SNAPSHOT, ask, timeout_s=SNAPSHOT_S_MAX)
            return self._index.restore(snapshot)
        except (BusError, ValueError) as error:
            log.info("no KV snapshot from %s: %s", worker_id, error)
            return False
