"""What a worker is to others just now: its phase, its role, and what there is to note about it."""

from __future__ import annotations

import msgspec

from services.worker.engines.port import EngineFacts
from services.worker.legs.server import LegServer
from services.worker.lifecycle.registration import Registration
from services.worker.lifecycle.role import SavedRole
from services.worker.telemetry.publishers import LoadPublisher
from shared.contracts.control import ServicePhase
from shared.contracts.workers import Role, WorkerPhase, WorkerRecord
from shared.runtime.service import Service

SERVICE_PHASES = {
    WorkerPhase.PROBING: ServicePhase.STARTING,
    WorkerPhase.READY: ServicePhase.READY,
    WorkerPhase.DRAINING: ServicePhase.DRAINING,
}


class WorkerStatus:
    """One place to change it: the registry, the load reports, the leg server and the process's status say the same."""

    def __init__(
        self,
        service: Service,
        registration: Registration,
        load: LoadPublisher,
        server: LegServer,
        facts: EngineFacts,
        saved_role: SavedRole,
    ) -> None:
        self._service = service
        self._registration = registration
        self._load = load
        self._server = server
        self._facts = facts
        self._saved_role = saved_role

    @property
    def record(self) -> WorkerRecord:
        """As it is registered."""
        return self._registration.record

    @property
    def phase(self) -> WorkerPhase:
        """As its legs are served."""
        return self._server.phase

    async def report_load(self) -> None:
        """Tell how busy it is, for ever."""
        await self._load.follow(lambda: (self._server.phase, self._server.legs))

    async def enter(self, phase: WorkerPhase, note: str = "") -> None:
        """The next phase of its life."""
        self._server.phase = phase
        self._load.changed()
        await self._registration.say(full_record(self.record, self._facts, phase, note))
        self._service.set_phase(SERVICE_PHASES[phase], detail(phase, note))

    async def probing(self, why_not: str = "") -> None:
        """It proves itself; what has spoken against it so far."""
        await self.enter(WorkerPhase.PROBING, why_not)

    async def ready(self, note: str) -> None:
        """It takes legs; ``note`` is what its start has shown."""
        await self.enter(WorkerPhase.READY, "; ".join(filter(None, (self._saved_role.note, note))))

    async def leaving(self) -> None:
        """It goes because it was told to, so its next life begins as its settings say."""
        self._saved_role.forget()
        await self.enter(WorkerPhase.DRAINING)

    async def take_on(self, role: Role, note: str) -> None:
        """Be placed for other legs from now on, in the next life too if this one ends in a crash."""
        self._saved_role.take_on(role)
        self._load.role = role
        self._load.changed()
        await self._registration.say(msgspec.structs.replace(self.record, role=role, note=note))


def detail(phase: WorkerPhase, note: str) -> str:
    """What the process says that it does."""
    if phase is WorkerPhase.PROBING:
        return f"probing: {note}" if note else "probing"
    return ""


def full_record(record: WorkerRecord, facts: EngineFacts, phase: WorkerPhase, note: str) -> WorkerRecord:
    """The same worker, with what its engine says of itself."""
    return msgspec.structs.replace(
        record,
        phase=phase,
        note=note,
        engine=facts.engine,
        models=facts.models,
        max_model_len=facts.max_model_len,
        fingerprint=facts.fingerprint,
        hashing=facts.hashing,
        kv_blocks=facts.kv_blocks,
        legs_max=facts.legs_max,
        step_tokens_max=facts.step_tokens_max,
        prefix_caching=facts.prefix_caching,
    )
