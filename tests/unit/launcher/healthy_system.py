"""A healthy installation and system for `baton doctor`; each test changes one fact."""

from __future__ import annotations

import msgspec

from services.launcher.doctor.findings import (
    Engine,
    HeardLoad,
    HeardService,
    InstallationFacts,
    Nats,
    Packages,
    RouterReply,
    SystemFacts,
)
from shared.contracts.control import RouterHealth, ServicePhase, ServiceStatus
from shared.contracts.workers import FleetState, FleetWorker, Role, WorkerPhase, WorkerRecord
from tests.support.fleet_builders import load, record

GIB = 1 << 30
ROLES = {"p1": Role.PREFILL, "d1": Role.DECODE}


def installation(**changes: object) -> InstallationFacts:
    facts: dict[str, object] = {
        "baton": "0.1.0",
        "python": (3, 11, 7),
        "packages": Packages(lock="engine-cpu", count=152),
        "has_vllm": True,
        "engine": Engine(vllm="0.32.0", nixl="1.5.1", plugins=["POSIX", "UCX"]),
        "nats_server": "/bin/nats-server",
        "is_index_compiled": True,
        "is_placement_compiled": True,
        "is_tokenization_compiled": True,
        "is_request_path_compiled": True,
        "cores": 4,
        "memory_bytes": 16 * GIB,
        "memory_free_bytes": 12 * GIB,
        "shm_bytes": 8 * GIB,
    }
    return InstallationFacts(**(facts | changes))  # type: ignore[arg-type]


def service(kind: str, **changes: object) -> HeardService:
    facts: dict[str, object] = {
        "service": kind,
        "instance": f"{kind}-1",
        "phase": ServicePhase.READY,
        "version": "0.1.0",
        "host": "h",
        "at_ms": 1,
        "url": "http://127.0.0.1:8000" if kind == "router" else "",
        "router": RouterHealth() if kind == "router" else None,
    }
    return HeardService(status=ServiceStatus(**(facts | changes)))  # type: ignore[arg-type]


def living(one: WorkerRecord, phase: WorkerPhase = WorkerPhase.READY, since_s: float = 5.0) -> FleetWorker:
    return FleetWorker(record=one, phase=phase, since_s=since_s, silent_s=0.1)


def system(**changes: object) -> SystemFacts:
    records = [record(name, role=role) for name, role in ROLES.items()]
    facts: dict[str, object] = {
        "nats_url": "nats://127.0.0.1:4222",
        "is_expected": True,
        "launcher_pid": 7,
        "nats": Nats(
            version="2.11.4", max_payload=1 << 20, jetstream=True, auth_required=True, tls_required=True, rtt_s=0.001
        ),
        "heard_s": 2.5,
        "host": "h",
        "baton": "0.1.0",
        "records": records,
        "services": [service(kind) for kind in ("router", "orchestrator", "collector")],
        "loads": [HeardLoad(report=load(name, role=role)) for name, role in ROLES.items()],
        "fleet": FleetState(leader="orchestrator-1", term=1, workers=[living(one) for one in records]),
        "routers": [RouterReply(url="http://127.0.0.1:8000", ready=True, requires_key=False)],
    }
    return SystemFacts(**(facts | changes))  # type: ignore[arg-type]


def nats(**changes: object) -> Nats:
    return msgspec.structs.replace(system().nats, **changes)  # type: ignore[type-var]
