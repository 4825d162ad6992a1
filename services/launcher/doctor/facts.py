"""What `baton doctor` looked at, as plain facts. What could not be found out is missing, and ``unknown`` says why."""

from __future__ import annotations

import msgspec

from shared.contracts.control import ServiceStatus
from shared.contracts.load import LoadReport
from shared.contracts.workers import FleetState, WorkerRecord


class Facts(msgspec.Struct, kw_only=True):
    """Of one kind each; every one has a default, since any probe may fail."""

    unknown: dict[str, str] = msgspec.field(default_factory=dict)
    """What was to be looked at -> why that was not possible."""


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """One that is not as it was locked."""

    name: str
    locked: str
    installed: str = ""
    """Empty: it is missing."""


class Packages(msgspec.Struct, frozen=True, kw_only=True):
    """The environment against the lock that it was made from."""

    lock: str = ""
    """Which one: services, engine-cpu, engine-cuda; empty when there is none beside this installation."""
    count: int = 0
    drift: list[Package] = msgspec.field(default_factory=list)


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """What came of loading what engines are made of, in a process of its own."""

    vllm: str = ""
    """Its version."""
    vllm_failure: str = ""
    torch_cuda: str = ""
    """The CUDA that PyTorch was built for; empty: a CPU build."""
    devices: list[str] = msgspec.field(default_factory=list)
    """GPUs that PyTorch can use."""
    nixl: str = ""
    nixl_failure: str = ""
    plugins: list[str] = msgspec.field(default_factory=list)
    """NIXL's."""
    plugin_failures: dict[str, str] = msgspec.field(default_factory=dict)
    """Of those that we use: which do not start, and why."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """As nvidia-smi tells."""

    name: str
    driver: str = ""
    memory_bytes: int = 0


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """The file system of a folder that Baton writes to."""

    what: str
    path: str
    free_bytes: int = 0
    failure: str = ""
    """Why nothing can be written there."""


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """One that `baton up` would listen on."""

    number: int
    purpose: str
    option: str
    is_free: bool = True
    holder: str = ""
    """`` by pid 12 (...)``, when the system tells."""


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """One that the bus is kept private with."""

    path: str
    ends_in_s: float = 0.0
    """Below 0: it has ended."""
    failure: str = ""


class InstallationFacts(Facts, kw_only=True):
    """What is here, whether or not anything runs."""

    baton: str = ""
    python: tuple[int, int, int] = (0, 0, 0)
    packages: Packages | None = None
    has_vllm: bool = False
    engine: Engine | None = None
    """None: it was not loaded."""
    nats_server: str = ""
    """Path of the binary."""
    is_index_compiled: bool | None = None
    cores: int = 0
    memory_bytes: int = 0
    memory_free_bytes: int = 0
    shm_bytes: int = 0
    """Size of /dev/shm; 0 where there is none."""
    gpus: list[Gpu] = msgspec.field(default_factory=list)
    disks: list[Disk] = msgspec.field(default_factory=list)
    ports: list[Port] = msgspec.field(default_factory=list)
    """Empty while the system runs."""
    others: dict[str, int] = msgspec.field(default_factory=dict)
    """NATS addresses of other systems whose processes run here, with how many."""
    certificates: list[Certificate] = msgspec.field(default_factory=list)
    exposed: list[str] = msgspec.field(default_factory=list)
    """Files with secrets that other users may read."""


class HeardService(msgspec.Struct, frozen=True, kw_only=True):
    """What a process said of itself while we listened."""

    status: ServiceStatus
    ahead_s: float = 0.0
    """Of its newest clock reading before ours. The way here makes it smaller, never larger."""
    is_double: bool = False
    """Two processes go by this name."""


class HeardLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's newest load report."""

    report: LoadReport
    is_double: bool = False
    """Two processes speak as this worker."""


class RouterAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a router says over HTTP to somebody without a key."""

    url: str
    ready: bool = False
    detail: str = ""
    asks_for_key: bool | None = None
    """None: it could not be asked."""
    failure: str = ""


class Nats(msgspec.Struct, frozen=True, kw_only=True):
    """What the server says of itself to anybody who connects."""

    version: str = ""
    max_payload: int = 0
    jetstream: bool = False
    auth_required: bool = False
    tls_required: bool = False
    rtt_s: float = 0.0
    """From asking to an answer, over the connection that services use."""
    cluster: list[str] = msgspec.field(default_factory=list)


class SystemFacts(Facts, kw_only=True):
    """What was heard on the bus."""

    nats_url: str = ""
    is_expected: bool = False
    """Somebody said that a system runs: a state file, an option or a variable."""
    launcher_pid: int = 0
    """Of the `baton up` here; 0: there is none."""
    nats: Nats | None = None
    """None: it does not answer."""
    failure: str = ""
    """Why we are not connected."""
    heard_s: float = 0.0
    """For so long was listened."""
    host: str = ""
    """This machine."""
    baton: str = ""
    """Version of this command."""
    records: list[WorkerRecord] = msgspec.field(default_factory=list)
    services: list[HeardService] = msgspec.field(default_factory=list)
    loads: list[HeardLoad] = msgspec.field(default_factory=list)
    fleet: FleetState | None = None
    """None: no orchestrator answers."""
    routers: list[RouterAnswer] = msgspec.field(default_factory=list)

    @property
    def is_running(self) -> bool:
        """Whether there is a system to speak of."""
        return self.is_expected or bool(self.records or self.services or self.loads)
