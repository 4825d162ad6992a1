"""What `baton up` starts: processes, ports, and the machine that they run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import msgspec

from shared.contracts.channels import Party

MODULES = {
    Party.ORCHESTRATOR: "services.orchestrator",
    Party.COLLECTOR: "services.collector",
    Party.ROUTER: "services.router",
    Party.WORKER: "services.worker",
}
"""What each service runs as, in the order in which they are restarted."""


class PlanRefused(Exception):
    """The requested system cannot be started; the message says what to do instead."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    python: str
    nats_server: str
    """Path of the binary; empty when there is none."""
    cores: tuple[int, ...]
    """One logical CPU per physical core that this process may use."""
    nodes: Mapping[int, str] = {}
    """NUMA node of each of ``cores``, where the system tells."""
    gpus: tuple[str, ...] = ()
    """GPU indexes; empty when the installed engine is the CPU one."""
    gpus_used: tuple[str, ...] = ()
    """GPUs of workers that run on this machine already."""
    gpu_topology: str = ""
    """Output of ``nvidia-smi topo -m``, if the indexes are in nvidia-smi's order."""


class Stage(IntEnum):
    """Processes start in this order and stop in reverse."""

    NATS = 0
    SERVICES = 1
    WORKERS = 2


@dataclass(frozen=True, kw_only=True)
class ProcessPlan:
    """One process to start."""

    name: str
    """A name that is unique in this system; for a worker, its worker id."""
    stage: Stage
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    """The place where it runs, such as "core 0"; with several models, the model too."""
    model: int = 0
    """A worker's model: index in ``UpOptions.models``."""
    group: str = ""
    """Processes of the same one wait for one another when they start."""
    is_extra: bool = False
    """The system continues if this process cannot be started."""
    keeps_trying: bool = False
    """A worker that is started again after a failed first start, as services are."""
    serves_requests: bool = True
    """False if requests are served without it, so that it is restarted even if its configuration is wrong."""


DRAIN_S = {Stage.WORKERS: 30.0, Stage.SERVICES: 30.0, Stage.NATS: 10.0}
"""Seconds for requests that run at SIGTERM, unless a variable ``*_DRAIN_S_MAX`` says otherwise."""
STOP_SPARE_S = 15.0
"""Seconds added to the drain deadline of a process, for its last status and its children."""


def stop_s(process: ProcessPlan, inherited: Mapping[str, str]) -> float:
    """From SIGTERM to SIGKILL: more than its drain deadline, which the plan or an inherited variable sets."""
    service = "WORKER" if process.stage is Stage.WORKERS else process.name.partition("-")[0].upper()
    given = {**inherited, **process.env}.get(f"{service}_DRAIN_S_MAX")
    try:
        drain_s = float(given or DRAIN_S[process.stage])
    except ValueError:  # With this setting it does not start.
        drain_s = DRAIN_S[process.stage]
    return drain_s + STOP_SPARE_S


@dataclass(frozen=True, kw_only=True)
class RequiredPort:
    """A port that must be free before anything starts."""

    host: str
    port: int
    option: str
    purpose: str


@dataclass(frozen=True, kw_only=True)
class SystemPlan:
    """Everything `baton up` starts."""

    processes: tuple[ProcessPlan, ...]
    ports: tuple[RequiredPort, ...]
    nats_url: str
    notes: tuple[str, ...] = ()
    """Warnings to print before the start."""

    def stage(self, stage: Stage) -> list[ProcessPlan]:
        return [process for process in self.processes if process.stage is stage]
