"""Keeps the prefix index equal to the workers' caches: KV events, and a snapshot wherever they are not enough.

The scheme, per worker:

    joined ──────────────────────────► DEGRADED ──snapshot──► EXACT ──event──► EXACT
    EXACT ──gap, new epoch, digest that differs, dropped messages──► DEGRADED
    DEGRADED ──FAILURES_MAX snapshots failed──► FALLBACK ──snapshot──► EXACT

A worker numbers its KV events, and each load report has a digest (count and XOR) of its blocks. Placement
uses what is known of a DEGRADED worker meanwhile, and of a worker in FALLBACK its load alone.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from services.router.state.block_table import IS_COMPILED
from services.router.state.prefix_index import IndexState, PrefixIndex
from shared.bus.port import Bus, BusError, Envelope
from shared.contracts.channels import KV_EVENTS, KV_SNAPSHOT
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_events import AskKvSnapshot, KvDigest, KvEventBatch

log = logging.getLogger("baton.router")

SNAPSHOT_S_MAX: Final = 5.0
"""Time limit for a worker to send a snapshot."""
SNAPSHOT_GAP_S: Final = 0.05
"""Pause between two requests for a worker's snapshot, doubled after each failure."""
SNAPSHOT_GAP_S_MAX: Final = 5.0
ASKS_AT_ONCE_MAX: Final = 32
"""Concurrent snapshot requests. A starting router needs the snapshots of the whole fleet, and must read each reply
within ``SNAPSHOT_S_MAX``.
"""
FAILURES_MAX: Final = 3
"""Failed requests after which placement uses the worker's load alone; the router keeps trying."""


class KvFeed:
    """Keeps ``Fleet.index`` up to date. One task per worker that needs a snapshot, children of ``follow``."""

    def __init__(self, bus: Bus, index: PrefixIndex) -> None:
        self._bus = bus
        self._index = index
        self._wake = asyncio.Event()
        self._asking: set[tuple[WorkerId, Epoch]] = set()
        self._slots = asyncio.Semaphore(ASKS_AT_ONCE_MAX)
        self._latest: KvEventBatch | None = None
        """Applied when the next one arrives, or before anything else: meanwhile its blocks' memory is fetched."""
        self.snapshots = 0
        """Number of snapshots requested so far."""

    async def open(self) -> None:
        """Subscribe; the subscription is active on return."""
        if not IS_COMPILED:
            log.warning("the prefix index runs in Python, several times slower: no compiler when Baton was installed")
        await self._bus.subscribe(KV_EVENTS, self._on_batch, on_dropped=self.doubt_all, in_batches=True)

    async def follow(self) -> None:
        """Request snapshots where they are needed, until cancelled."""
        async with asyncio.TaskGroup() as asking:
            while True:
                await self._wake.wait()
                self._wake.clear()
                for worker_id in self._index.wanting():
                    epoch = self._index.entries[worker_id].epoch
                    if (worker_id, epoch) not in self._asking:
                        self._asking.add((worker_id, epoch))
                        asking.create_task(self._ask_until_exact(worker_id, epoch), name=f"kv-snapshot {worker_id}")

    def worker_joined(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """Add a worker, or a new epoch of one."""
        self._index.join(worker_id, epoch)
        self._wake.set()

    def check(self, worker_id: WorkerId, epoch: Epoch, digest: KvDigest) -> None:
        """Compare the index with the digest in a load report; on a difference, request a snapshot."""
        self._apply_latest()
        if self._index.check(worker_id, epoch, digest):
            self._wake.set()

    def doubt_all(self) -> None:
        """Request snapshots of all workers, because events may have been missed."""
        for worker_id in list(self._index.entries):
            self._index.doubt(worker_id)
        self._wake.set()

    def _on_batch(self, batch: KvEventBatch, _envelope: Envelope) -> None:
        latest, self._latest = self._latest, batch
        try:  # noqa: SIM105  # ``suppress`` would be three calls of Python.
            self._index.expect(batch)
        except ValueError:
            pass  # ``apply`` raises it again.
        if latest is None:
            asyncio.get_running_loop().call_soon(self._apply_latest)
        else:
            self._apply(latest)

    def _apply_latest(self) -> None:
        latest, self._latest = self._latest, None
        if latest is not None:
            self._apply(latest)

    def _apply(self, batch: KvEventBatch) -> None:
        try:
            wanted = self._index.apply(batch)
        except ValueError as error:
            log.warning("KV events of %s cannot be read: %s", batch.worker_id, error)
            self._index.doubt(batch.worker_id)
            wanted = True
        if wanted:
            self._wake.set()

    async def _ask_until_exact(self, worker_id: WorkerId, epoch: Epoch) -> None:
        failures, gap_s = 0, SNAPSHOT_GAP_S
        try:
            while self._is_wanting(worker_id, epoch):
                if not await self._ask(worker_id, epoch):
                    failures += 1
                    gap_s = min(2 * gap_s, SNAPSHOT_GAP_S_MAX)
                    if failures == FAILURES_MAX and self._is_wanting(worker_id, epoch):
                        self._index.give_up(worker_id)
                    await asyncio.sleep(gap_s)
        finally:
            self._asking.discard((worker_id, epoch))

    def _is_wanting(self, worker_id: WorkerId, epoch: Epoch) -> bool:
        """Whether this epoch is the worker's newest, and its snapshot is needed."""
        entry = self._index.entries.get(worker_id)
        return entry is not None and entry.epoch == epoch and entry.state is not IndexState.EXACT

    async def _ask(self, worker_id: WorkerId, epoch: Epoch) -> bool:
        try:
            ask = AskKvSnapshot(worker_id=worker_id, epoch=epoch)
            async with self._slots:
                self.snapshots += 1
                snapshot = await self._bus.ask(KV_SNAPSHOT, ask, timeout_s=SNAPSHOT_S_MAX)
            return self._index.restore(snapshot)
        except (BusError, ValueError) as error:
            log.info("no KV snapshot from %s: %s", worker_id, error)
            return False
