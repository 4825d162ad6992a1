"""Workers for tests: everything that a test does not care about has a value here."""

from __future__ import annotations

import msgspec

from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.load import LoadReport
from shared.contracts.message import WIRE_VERSION
from shared.contracts.workers import Fingerprint, HashScheme, LoraAdapter, Role, WorkerPhase, WorkerRecord

FINGERPRINT = Fingerprint(
    model="m", revision="r", dtype="float32", block_size=32, kv_layout="NHD", connector="none", engine_version="0"
)


def record(
    worker_id: str = "w1",
    phase: WorkerPhase = WorkerPhase.READY,
    epoch: int = 1,
    role: Role = Role.BOTH,
    models: tuple[str, ...] = ("m",),
    connector: str = FINGERPRINT.connector,
    revision: str = FINGERPRINT.revision,
    *,
    engine_version: str = FINGERPRINT.engine_version,
    adapters: tuple[LoraAdapter, ...] = (),
    attached: bool = False,
) -> WorkerRecord:
    return WorkerRecord(
        worker_id=WorkerId(worker_id),
        epoch=Epoch(epoch),
        role=role,
        phase=phase,
        engine="simulated",
        models=list(models),
        max_model_len=4096,
        fingerprint=msgspec.structs.replace(
            FINGERPRINT, connector=connector, revision=revision, engine_version=engine_version
        ),
        hashing=HashScheme(block_size=32),
        kv_tokens=3200,
        legs_max=16,
        host="h",
        pid=1,
        wire_version=WIRE_VERSION,
        adapters=list(adapters),
        attached=attached,
    )


def adapter(name: str = "sql", digest: str = "1") -> LoraAdapter:
    """A LoRA adapter with other files for each digest."""
    return LoraAdapter(name=name, digest=digest, hashed_as=f"sha256:{digest}")


def load(
    worker_id: str = "w1", epoch: int = 1, phase: WorkerPhase = WorkerPhase.READY, role: Role = Role.BOTH, **numbers
) -> LoadReport:
    return LoadReport(worker_id=WorkerId(worker_id), epoch=Epoch(epoch), role=role, phase=phase, **numbers)
