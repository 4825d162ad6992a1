"""Facts that `baton doctor` collects, and the findings made of them: each has a meaning and a remedy.

A failed probe leaves its fact's default; ``unknown`` has the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from shared.contracts.control import RouterHealth, ServiceStatus
from shared.contracts.load import LoadReport
from shared.contracts.workers import FleetState, WorkerRecord
from shared.text.fleet_text import many


class Facts(msgspec.Struct, kw_only=True):
    """Base class. Every field has a default, because any probe may fail."""

    unknown: dict[str, str] = msgspec.field(default_factory=dict)
    """Name of a failed probe -> why it failed."""


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """A package that differs from the lock."""

    name: str
    locked: str
    installed: str = ""
    """The installed version; empty if the package is missing."""


class Packages(msgspec.Struct, frozen=True, kw_only=True):
    """The installed packages compared with their lock."""

    lock: str = ""
    """Name of the lock: services, engine-cpu, engine-cuda or engine-cuda-0.33; empty when none is beside this
    installation.
    """
    count: int = 0
    drift: list[Package] = msgspec.field(default_factory=list)


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """Result of loading vLLM and NIXL in a separate process."""

    vllm: str = ""
    """Version of vLLM."""
    vllm_failure: str = ""
    vllm_refused: str = ""
    """Why workers do not start with this release."""
    torch_cuda: str = ""
    """The CUDA that PyTorch was built for; empty for a CPU build."""
    devices: list[str] = msgspec.field(default_factory=list)
    """GPUs that PyTorch can use."""
    nixl: str = ""
    nixl_failure: str = ""
    plugins: list[str] = msgspec.field(default_factory=list)
    plugin_failures: dict[str, str] = msgspec.field(default_factory=dict)
    """Plugins that Baton uses but that do not load -> why."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU as nvidia-smi reports it."""

    name: str
    driver: str = ""
    memory_bytes: int = 0


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """The file system of a folder that Baton writes to."""

    what: str
    path: str
    free_bytes: int = 0
    failure: str = ""
    """The reason why the folder is not writable."""


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """One that `baton up` would listen on."""

    number: int
    purpose: str
    option: str
    is_free: bool = True
    holder: str = ""
    """The process that holds the port, such as `` by pid 12 (...)``, when it can be found."""


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """A certificate for NATS."""

    path: str
    ends_in_s: float = 0.0
    """Seconds until the certificate expires; below 0 if it has expired."""
    failure: str = ""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of this machine whose engine was refused at its last start."""

    worker: str
    reason: str
    ago_s: float = 0.0


class InstallationFacts(Facts, kw_only=True):
    baton: str = ""
    python: tuple[int, int, int] = (0, 0, 0)
    packages: Packages | None = None
    has_vllm: bool = False
    engine: Engine | None = None
    """None if it was not loaded."""
    nats_server: str = ""
    """Path of the nats-server binary."""
    is_index_compiled: bool | None = None
    is_placement_compiled: bool | None = None
    is_tokenization_compiled: bool | None = None
    is_request_path_compiled: bool | None = None
    cores: int = 0
    memory_bytes: int = 0
    memory_free_bytes: int = 0
    shm_bytes: int = 0
    """Size of /dev/shm; 0 where there is none."""
    gpus: list[Gpu] = msgspec.field(default_factory=list)
    disks: list[Disk] = msgspec.field(default_factory=list)
    ports: list[Port] = msgspec.field(default_factory=list)
    """The ports of `baton up`; empty while the system runs."""
    others: dict[str, int] = msgspec.field(default_factory=dict)
    """NATS addresses of other systems whose processes run here, with how many."""
    certificates: list[Certificate] = msgspec.field(default_factory=list)
    refused: list[Refusal] = msgspec.field(default_factory=list)
    exposed: list[str] = msgspec.field(default_factory=list)
    """Files with secrets that other users can read."""


class HeardService(msgspec.Struct, frozen=True, kw_only=True):
    """A service's newest status."""

    status: ServiceStatus
    ahead_s: float = 0.0
    """The lead of the service's clock over this machine's. Message delay makes it smaller, never larger."""
    is_duplicate: bool = False
    """Whether two processes publish under this name."""


class HeardLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's newest load report."""

    report: LoadReport
    is_duplicate: bool = False
    """Whether two processes report as this worker."""


class RouterReply(msgspec.Struct, frozen=True, kw_only=True):
    """What a router replies over HTTP without an API key."""

    url: str
    ready: bool = False
    detail: str = ""
    requires_key: bool | None = None
    """Whether it requires API keys; None if that is not known."""
    failure: str = ""


class Nats(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that Baton reads of the INFO line that a nats-server sends to every client before authentication."""

    version: str = ""
    max_payload: int = 0
    jetstream: bool = False
    auth_required: bool = False
    tls_required: bool = False
    rtt_s: float = 0.0
    """Round trip over the connection that services use."""


class SystemFacts(Facts, kw_only=True):
    nats_url: str = ""
    is_expected: bool = False
    """A state file, an option or a variable says that a system runs."""
    launcher_pid: int = 0
    """Process id of `baton up` on this machine; 0 if it does not run."""
    nats: Nats | None = None
    """What nats-server reports; None if it does not respond."""
    failure: str = ""
    """The reason why there is no connection."""
    heard_s: float = 0.0
    """Seconds for which the command listened."""
    host: str = ""
    """This machine's name."""
    baton: str = ""
    """Version of the Baton that runs this command."""
    records: list[WorkerRecord] = msgspec.field(default_factory=list)
    services: list[HeardService] = msgspec.field(default_factory=list)
    loads: list[HeardLoad] = msgspec.field(default_factory=list)
    fleet: FleetState | None = None
    """What the orchestrator reports; None if none responds."""
    routers: list[RouterReply] = msgspec.field(default_factory=list)

    @property
    def is_running(self) -> bool:
        """Whether a system runs or should run."""
        return self.is_expected or bool(self.records or self.services or self.loads)


SHOWN_MAX = 5
"""Names that one finding lists; it counts the rest."""


class Level(StrEnum):
    """Severity."""

    OK = "ok"
    NOTE = "note"
    """Information; nothing is wrong."""
    WARNING = "warning"
    """Something works, but worse than it could, or will fail soon."""
    ERROR = "error"
    """Something does not work."""


class Area(StrEnum):
    """Groups of findings, in the order of the output."""

    INSTALLATION = "Installation"
    MACHINE = "This machine"
    BUS = "NATS"
    SERVICES = "Services"
    WORKERS = "Workers"
    ACCESS = "Access"

    def finding(self, level: Level, what: str, why: str = "", todo: str = "") -> Finding:
        """A finding in this group."""
        return Finding(area=self, level=level, what=what, why=why, todo=todo)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check."""

    area: Area
    level: Level
    what: str
    """The fact, in one line."""
    why: str = ""
    """The meaning of the fact."""
    todo: str = ""
    """The remedy."""


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    status: str
    """One of healthy, degraded (warnings) or unhealthy (errors)."""
    summary: str
    errors: int
    warnings: int
    findings: list[Finding]


def examination(findings: Iterable[Finding], *, is_running: bool, joined: Sequence[str] = ()) -> Examination:
    order = {area: number for number, area in enumerate(Area)}
    ordered = sorted(findings, key=lambda finding: order[finding.area])
    errors = sum(finding.level is Level.ERROR for finding in ordered)
    warnings = sum(finding.level is Level.WARNING for finding in ordered)
    status = "unhealthy" if errors else "degraded" if warnings else "healthy"
    return Examination(
        status=status,
        summary=_summary(errors, warnings, status, is_running=is_running, joined=joined),
        errors=errors,
        warnings=warnings,
        findings=ordered,
    )


def _summary(errors: int, warnings: int, status: str, *, is_running: bool, joined: Sequence[str]) -> str:
    """The last line of the output. ``joined``: see ``Scope``."""
    subject = "The system" if is_running else "The installation"
    nothing_runs = "" if is_running else " No system runs; `baton up` starts one."
    if joined and not is_running:
        nothing_runs = (
            f" This machine has joined as {named(joined)}: `baton doctor` on the head host examines the system."
        )
    counts = [many(count, noun) for count, noun in ((errors, "error"), (warnings, "warning")) if count]
    found = f": {', '.join(counts)}" if counts else ""
    return f"{subject} is {status}{found}.{nothing_runs}"


SLOWER_IN_PYTHON = "It uses several times the CPU, which is enough for a few workers."
PLACEMENT_IN_PYTHON = "A placement takes 1.5 ms with 100 workers and 14 ms with 1,000, instead of less than 0.1 ms."


def in_python(about: RouterHealth | InstallationFacts, of: str = "") -> str:
    """Which parts of the router are not compiled: ``The prefix index of router-1 runs in Python.``; else empty."""
    parts = {
        "prefix index": about.is_index_compiled,
        "placement": about.is_placement_compiled,
        "tokenization": about.is_tokenization_compiled,
        "request path": about.is_request_path_compiled,
    }
    names = [name for name, is_compiled in parts.items() if is_compiled is False]
    listed = " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
    return f"The {listed}{of} run{'s' * (len(names) == 1)} in Python." if names else ""


def cost_of_python(about: RouterHealth | InstallationFacts) -> str:
    """What it costs that these parts are not compiled."""
    return SLOWER_IN_PYTHON + (f" {PLACEMENT_IN_PYTHON}" if about.is_placement_compiled is False else "")


def named(names: Sequence[str]) -> str:
    """The first few names, and the number of the others."""
    more = len(names) - SHOWN_MAX
    return ", ".join(names[:SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
