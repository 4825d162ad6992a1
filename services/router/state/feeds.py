"""Bus subscriptions that keep the router's state: workers, KV events, reservations, the default mode.

Routers publish reservations, so that they do not all choose a worker that looks idle to each of them. The default mode
applies to requests that name none: placement decides, unless the operator has set a mode.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from services.router.placement.placer import Fleet
from services.router.placement.request_facts import Mode
from services.router.placement.request_fields import default_mode_of
from services.router.state.block_table import IS_COMPILED
from services.router.state.cluster_view import ClusterView
from services.router.state.prefix_index import IndexState, PrefixIndex
from services.router.state.quarantine import Quarantine
from services.router.state.reservations import ReservationBook
from services.router.state.worker_speeds import WorkerSpeeds
from services.router.state.worker_view import Sent
from services.router.tokenize.prompts import Prompts
from shared.bus.leg_inbox import LegInbox
from shared.bus.port import Bus, BusDown, BusError, Envelope, StoredValue
from shared.contracts.channels import (
    DEFAULT_MODE,
    KV_EVENTS,
    KV_SNAPSHOT,
    LOAD,
    RESERVATIONS,
    WORKER_LOST,
    WORKER_RECORDS,
)
from shared.contracts.ids import Epoch, RouterId, WorkerId
from shared.contracts.inference import StartLeg
from shared.contracts.kv_events import AskKvSnapshot, KvDigest, KvEventBatch
from shared.contracts.load import WorkerLoad
from shared.contracts.routers import ANNOUNCE_S, Reservations
from shared.contracts.workers import WITHOUT_ENGINE, Role, WorkerLost, WorkerRecord
from shared.runtime.clock import Clock
from shared.runtime.waiting import REGISTRY, Waits

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
BATCH_S: Final = 0.005
"""Pause between two messages with reservations. Placements in the pause travel together."""
QUARANTINED_HEARD_MAX: Final = 64
"""Requests that one message of another router can quarantine here."""
SWEEP_S: Final = 1.0
"""Interval at which workers that are neither registered nor heard are dropped."""
RETRY_S: Final = 2.0
"""Pause after the default mode could not be read; the last known mode applies until then."""


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


class ReservationFeed:
    """Writes other routers' reservations into ``ClusterView``, and publishes this router's. A single router publishes
    heartbeats only.
    """

    def __init__(
        self, router_id: RouterId, bus: Bus, clock: Clock, cluster: ClusterView, quarantine: Quarantine
    ) -> None:
        self.book = ReservationBook(router_id)
        self._quarantine = quarantine
        self._bus = bus
        self._clock = clock
        self._cluster = cluster
        self._wake = asyncio.Event()

    async def open(self) -> None:
        """Subscribe; the subscriptions are active on return."""
        await self._bus.subscribe(RESERVATIONS, self._on_reservations)

    def leg_started(self, start: StartLeg, context_tokens: int) -> None:
        """A leg was sent to its worker."""
        if not self.book.alone and start.epoch is not None:
            self.book.note(start.worker_id, start.epoch, max(0, start.expected_tokens), context_tokens, start.sequences)
            self._wake.set()

    def quarantined(self, digest: bytes, for_s: float) -> None:
        """Tell the other routers to refuse a request for a while, too."""
        self.book.note_quarantined(digest, for_s)
        self._wake.set()

    async def follow(self) -> None:
        """Publish until cancelled: after a reservation, at most once per ``BATCH_S``, and once per ``ANNOUNCE_S``."""
        while True:
            self._wake.clear()
            self.book.forget_silent(self._clock.now())
            await self._publish()
            await asyncio.sleep(BATCH_S)
            try:
                async with asyncio.timeout(ANNOUNCE_S - BATCH_S):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _publish(self) -> None:
        """Reservations that cannot be sent are dropped: they would be out of date after the outage."""
        try:
            await self._bus.publish(RESERVATIONS, self.book.message())
        except BusDown:
            log.debug("reservations were not sent: NATS is down")

    def _on_reservations(self, message: Reservations, _envelope: Envelope) -> None:
        if not self.book.knows(message.router_id):
            self._wake.set()  # The other router does not know this one either.
        now = self._clock.now()
        if message.router_id != self.book.router_id:
            for quarantined in message.quarantined[:QUARANTINED_HEARD_MAX]:
                self._quarantine.heard(quarantined.digest, quarantined.for_s, now)
        for one in self.book.hear(message, now):
            sent = Sent(now, one.tokens, one.context_tokens, one.legs)
            self._cluster.others_started(one.worker_id, one.epoch, sent)


class FleetFeed:
    """Keeps ``Fleet.cluster`` up to date."""

    def __init__(  # noqa: PLR0913  # wiring
        self,
        *,
        bus: Bus,
        clock: Clock,
        fleet: Fleet,
        inbox: LegInbox,
        speeds: WorkerSpeeds,
        fleet_changed: Callable[[float], None],
        reservations: ReservationFeed,
        prompts: Prompts,
        kv: KvFeed,
        waits: Waits,
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._fleet = fleet
        self._inbox = inbox
        self._speeds = speeds
        self._fleet_changed = fleet_changed
        """Called with the delay in seconds after which a scheduling pass should run."""
        self._reservations = reservations
        self._prompts = prompts
        self._kv = kv
        self._waits = waits

    async def open(self) -> None:
        """Subscribe; the subscriptions are active on return."""
        self._fleet.cluster.is_whole = False
        await self._bus.subscribe(LOAD.read_as(WorkerLoad), self._on_load, in_batches=True)
        await self._bus.subscribe(WORKER_LOST, self._on_lost)

    async def follow_registry(self) -> None:
        """Watch the workers' records until cancelled; waits for JetStream."""
        open_store = partial(self._bus.key_value_store, WORKER_RECORDS)
        store = await self._waits.until(REGISTRY, open_store)
        async for entry in store.watch():
            if entry is None:
                self._fleet.cluster.is_whole = True
            else:
                self._on_record(entry)

    async def sweep(self) -> None:
        """Drop vanished workers, and old measurements, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self._speeds.sweep()
            for record in self._fleet.cluster.sweep(self._clock.now(), self._fleet.policy.silent_s_max):
                self._fleet.index.drop(record.worker_id)
                self._speeds.gone(record.worker_id)
                self._inbox.worker_lost(record.worker_id, record.epoch)
                self._prompts.workers_changed()
                log.info("worker %s is gone", record.worker_id)
            self._fleet_changed(0.0)  # A worker that falls silent causes no event.

    def _on_record(self, entry: StoredValue[WorkerRecord]) -> None:
        record = entry.value
        if record is None:
            self._fleet.cluster.unregister(WorkerId(entry.key))
            return
        known = self._fleet.cluster.workers.get(record.worker_id)
        is_new = self._fleet.cluster.record(record, self._clock.now())
        self._fleet_changed(0.0)
        if not is_new:
            return
        self._prompts.workers_changed()
        self._speeds.joined(record)
        if known is not None and known.record.epoch < record.epoch:
            # The worker restarted before its silence was noticed.
            self._inbox.worker_lost(record.worker_id, known.record.epoch)
        if known is None or known.record.epoch < record.epoch:
            log.info("worker %s: %s of %s, %s", record.worker_id, record.role, record.models, record.phase)
        if record.phase not in WITHOUT_ENGINE:  # Such a worker does not reply.
            if record.role is not Role.STORE:  # A store has neither engine nor tokenizer.
                self._prompts.worker_seen(record)
            if not record.attached:  # What its server has cached is not known.
                self._kv.worker_joined(record.worker_id, record.epoch)

    def _on_load(self, load: WorkerLoad, _envelope: Envelope) -> None:
        if self._fleet.cluster.report(load, self._clock.now()):
            self._prompts.workers_changed()
        self._speeds.load(load)
        self._fleet_changed(self._reservations.book.lag_s())
        if load.digest is not None:
            self._kv.check(load.worker_id, load.epoch, load.digest)

    def _on_lost(self, lost: WorkerLost, _envelope: Envelope) -> None:
        self._fleet.cluster.lose(lost.worker_id, lost.epoch)
        self._inbox.worker_lost(lost.worker_id, lost.epoch)


class DefaultModeFeed:
    """Keeps ``mode`` equal to the operator's setting."""

    def __init__(self, bus: Bus) -> None:
        self.mode = Mode.AUTO
        self._bus = bus

    async def follow(self) -> None:
        """Watch the setting until cancelled."""
        while True:
            try:
                store = await self._bus.key_value_store(DEFAULT_MODE)
                async for entry in store.watch():
                    if entry is not None:
                        self._set(default_mode_of(entry.value))
            except BusError as error:
                log.debug("the default mode cannot be read: %s", error)
            await asyncio.sleep(RETRY_S)

    def _set(self, mode: Mode) -> None:
        if mode is not self.mode:
            log.info("default mode: %s", mode.value)
        self.mode = mode
