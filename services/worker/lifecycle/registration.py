"""What other services see of a worker: its record in the registry, with its phase, its role and a note for operators.

The record is renewed while the process runs, and removed when it ends. A changed role survives a crash of the process.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import fields, replace

import msgspec

from services.worker.engines.port import EngineAdapters, EngineFacts, EngineHealth, NamedWeights
from services.worker.legs.server import LegServer
from services.worker.load_reports import LoadPublisher
from shared.bus.outage import Outage
from shared.bus.port import Bus, BusError, KeyValueStore, StoredValue, WrongRevision
from shared.contracts.channels import WORKER_RECORDS
from shared.contracts.control import ServicePhase
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.workers import WORKER_RECORD_TTL_S, LoraAdapter, Role, WorkerPhase, WorkerRecord
from shared.runtime.service import Service, WrongConfiguration
from shared.runtime.state_folder import saved_role_file

log = logging.getLogger("baton.worker")

RENEWALS_PER_TTL = 3
RETRY_S = 1.0
"""Pause after a write that failed: NATS is away, or no orchestrator has made the registry yet."""
EPOCH_MAX = 2**53
"""Bound of valid epochs. No clock comes near it, and greater numbers do not fit everywhere."""


async def new_epoch(bus: Bus, worker_id: WorkerId, wall_ms: int) -> Epoch:
    """The epoch of a process that starts now. Other services ignore epochs older than the newest they know, and the
    machine's clock may have been set back: while the registry has the earlier epoch, the new one is greater.
    """
    try:
        records = await bus.key_value_store(WORKER_RECORDS)
        before = await records.get(worker_id)
    except BusError as error:
        log.info("the registry cannot be asked for the earlier epoch: %s", error)
        return Epoch(wall_ms)
    if before is None or before.value is None:
        return Epoch(wall_ms)
    if before.value.epoch > EPOCH_MAX:
        log.warning("the registry has an impossible epoch of this worker, which is ignored: %d", before.value.epoch)
        return Epoch(wall_ms)
    return Epoch(max(wall_ms, before.value.epoch + 1))


class IdTaken(WrongConfiguration):
    """A process that began later has the same worker id. Both would take legs, and neither would get its answers."""

    def __init__(self, other: WorkerRecord) -> None:
        super().__init__(
            f"another process is worker {other.worker_id} now: it began later, on {other.host or 'an unknown host'} "
            f"(pid {other.pid}). This one stops. Give each worker an id of its own (WORKER_WORKER_ID), or run one only."
        )


class Registration:
    """Writes the record on each change and often enough that it never expires. Raises IdTaken.

    Every renewal writes the whole record, so that a registry that lost its memory soon has it back.
    """

    def __init__(self, bus: Bus, record: WorkerRecord) -> None:
        self.record = record
        self._bus = bus
        self._records: KeyValueStore[WorkerRecord] | None = None
        self._revision = 0
        """Revision of the last written record; a renewal over another one shows that another process writes it."""
        self._is_over = False
        """Whether the record was removed, or belongs to another process."""
        self._writing = asyncio.Lock()
        self._outage = Outage(log)
        self._is_changed = asyncio.Event()
        bus.on_reconnect(self._is_changed.set)

    async def update(self, record: WorkerRecord) -> None:
        """Write this record now; if NATS is unreachable, after the reconnect."""
        self.record = record
        await self._write()

    async def follow(self) -> None:
        while True:
            is_written = await self._write()
            self._is_changed.clear()
            try:
                async with asyncio.timeout(WORKER_RECORD_TTL_S / RENEWALS_PER_TTL if is_written else RETRY_S):
                    await self._is_changed.wait()
            except TimeoutError:
                pass

    async def remove(self) -> None:
        """The worker ends. Nothing writes the record afterwards; a second call changes nothing."""
        async with self._writing:
            if self._is_over:
                return
            self.record = msgspec.structs.replace(self.record, phase=WorkerPhase.GONE)
            self._is_over = True
            try:
                if self._records is not None and self._revision:
                    await self._records.delete(self.record.worker_id, self._revision)
            except BusError as error:
                log.info("the record was not removed, it will expire: %s", error)

    async def _write(self) -> bool:
        async with self._writing:
            if self._is_over:
                return True
            try:
                if self._records is None:
                    self._records = await self._bus.key_value_store(WORKER_RECORDS)
                self._revision = await self._put(self._records)
            except BusError as error:
                self._outage.failed("the registry could not be written", error)
                return False
            self._outage.over()
            return True

    async def _put(self, records: KeyValueStore[WorkerRecord]) -> int:
        if self._revision:
            try:
                return await records.update(self.record, self._revision)
            except WrongRevision:
                self._must_be_newest(await records.get(self.record.worker_id))
        return await records.put(self.record)

    def _must_be_newest(self, found: StoredValue[WorkerRecord] | None) -> None:
        """The record is also not as it was last written if it has expired, or the reply to a write was lost."""
        other = found.value if found is not None else None
        if other is not None and _began(other) > _began(self.record):
            self._is_over, self._revision = True, 0
            raise IdTaken(other)


def _began(record: WorkerRecord) -> tuple[Epoch, str, int]:
    return record.epoch, record.host, record.pid


SERVICE_PHASES = {
    WorkerPhase.PROBING: ServicePhase.STARTING,
    WorkerPhase.READY: ServicePhase.READY,
    WorkerPhase.DRAINING: ServicePhase.DRAINING,
}


class WorkerStatus:
    """Changes it in one place, so that the registry, the load reports, the leg server and the service status agree."""

    def __init__(
        self,
        service: Service,
        registration: Registration,
        load: LoadPublisher,
        server: LegServer,
        facts: EngineFacts,
        saved_role: SavedRole,
        adapters: EngineAdapters | None = None,
    ) -> None:
        self._service = service
        self._registration = registration
        self._load = load
        self._server = server
        self._facts = facts
        self._saved_role = saved_role
        self._adapters = adapters
        self._leaving = ""

    @property
    def record(self) -> WorkerRecord:
        return self._registration.record

    @property
    def phase(self) -> WorkerPhase:
        return self._server.phase

    async def enter(self, phase: WorkerPhase, note: str = "") -> None:
        self._server.phase = phase
        self._load.changed()
        record = full_record(self.record, self._facts, phase, note)
        await self._registration.update(msgspec.structs.replace(record, adapters=self._loaded()))
        self._service.set_phase(SERVICE_PHASES[phase], detail(phase, note))

    async def probing(self, failure: str = "") -> None:
        """The KV self-test runs; ``failure`` is that of its last round."""
        await self.enter(WorkerPhase.PROBING, failure)

    async def ready(self, note: str) -> None:
        """It takes legs; ``note`` is what the operator should know of its start."""
        await self.enter(WorkerPhase.READY, "; ".join(filter(None, (self._saved_role.note, note))))

    async def draining(self, *, sleeps: bool) -> None:
        """The worker ends by order, so its next process starts with the role of its settings, unless it only sleeps."""
        if not sleeps:
            self._saved_role.forget()
        await self.enter(WorkerPhase.DRAINING)

    async def gone(self) -> None:
        """The worker has nothing left to do but to end its engine."""
        await self._registration.remove()

    async def away(self, fault: str) -> None:
        """Its engine cannot serve now. Running legs go on."""
        await self.enter(WorkerPhase.PROBING, fault)

    async def change_role(self, role: Role, note: str) -> None:
        """Be placed for other legs from now on, also after a crash."""
        self._saved_role.save(role)
        self._load.role = role
        self._load.changed()
        await self._registration.update(msgspec.structs.replace(self.record, role=role, note=note))

    async def weights_changed(self, named: NamedWeights) -> None:
        """The engine has other weights: routers pair it anew, and compute other block hashes."""
        self._facts = replace(self._facts, fingerprint=named.fingerprint, hashing=named.hashing)
        record = msgspec.structs.replace(self.record, fingerprint=named.fingerprint, hashing=named.hashing)
        await self._registration.update(record)

    async def adapters_changed(self, leaving: str = "") -> None:
        """Adapters were loaded or unloaded: routers must know. ``leaving``: one that will be unloaded."""
        self._leaving = leaving
        await self._registration.update(msgspec.structs.replace(self.record, adapters=self._loaded()))

    def _loaded(self) -> list[LoraAdapter]:
        loaded = self._adapters.loaded if self._adapters is not None else []
        return [adapter for adapter in loaded if adapter.name != self._leaving]


def detail(phase: WorkerPhase, note: str) -> str:
    if phase is WorkerPhase.PROBING:
        return f"probing: {note}" if note else "probing"
    return ""


FACTS_OF_WORKER = {"scores_tokens"}
"""Facts that nobody but the worker needs: a record has all others."""


def full_record(record: WorkerRecord, facts: EngineFacts, phase: WorkerPhase, note: str) -> WorkerRecord:
    told = {field.name for field in fields(facts)} - FACTS_OF_WORKER
    known = {name: getattr(facts, name) for name in told}
    return msgspec.structs.replace(record, **known | {"phase": phase, "note": note, "paths": sorted(facts.paths)})


class ChangedRole(msgspec.Struct, frozen=True, kw_only=True):
    """A role that was ordered at run time, as it is saved for a restart."""

    role: Role
    of_settings: Role


def refusal(before: Role, after: Role, phase: WorkerPhase, *, is_changing: bool, attached: bool = False) -> str:
    """Why the role may not change; empty when it may."""
    if attached and after is not before:
        return "it is attached to a server outside of Baton, which serves whole requests only"
    if Role.STORE in (before, after) and before is not after:
        return "a store has no engine, and an engine is no store"
    if phase is not WorkerPhase.READY:
        return f"it is {phase.value}"
    return "another change of its role is under way" if is_changing else ""


def role_at_start(of_settings: Role, saved: ChangedRole | None) -> tuple[Role, str]:
    """The role of a process that starts, and a note about it. If the role in the settings has changed since the order,
    the settings are newer and win.
    """
    if saved is None or saved.of_settings is not of_settings:
        return of_settings, ""
    return saved.role, f"{saved.role.value}, as ordered before the restart"


class SavedRole:
    """The role of this process and, after a crash, of the next one. If the folder is not writable, the next process has
    the role of its settings.
    """

    def __init__(self, state_dir: str, worker_id: str, of_settings: Role) -> None:
        self._file = saved_role_file(state_dir, worker_id)
        self._of_settings = of_settings
        self.role, self.note = role_at_start(of_settings, self._read())
        if self.role is of_settings:
            self.forget()  # It was saved under other settings.
        else:
            log.info("the role is %s; the settings say %s", self.note, of_settings.value)

    def save(self, role: Role) -> None:
        """Remember it for the next process."""
        if role is self._of_settings:
            self.forget()
            return
        draft = self._file.with_suffix(".draft")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(msgspec.json.encode(ChangedRole(role=role, of_settings=self._of_settings)))
            draft.replace(self._file)
        except OSError as error:
            log.warning("the role %s will be lost if this process crashes: %s", role.value, error)

    def forget(self) -> None:
        """The next process starts with the role of its settings."""
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            log.warning("the saved role cannot be removed, the next process may start with it: %s", error)

    def _read(self) -> ChangedRole | None:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=ChangedRole)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            log.warning("the saved role cannot be read: %s", error)
            return None


async def follow_health(health: EngineHealth, status: WorkerStatus, note: str) -> None:
    """Until cancelled: PROBING while the engine has a fault, which is added to the ``note``, READY otherwise."""
    changed = asyncio.Event()
    health.on_changed(changed.set)
    shown: str | None = None
    while True:
        changed.clear()
        fault = health.fault
        if fault != shown:
            shown = fault
            await (status.away(f"{note}: {fault}") if fault else status.ready(note))
        await changed.wait()
