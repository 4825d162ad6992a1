"""Podman quadlets for the processes of one host: a ``.container`` file for each, from which Podman's generator makes a
unit with the name, order and restarts that the process has without containers.

Folders have the paths of the host, so that variables mean the same inside. Each container sees only what its process
reads: its own keys, and of workers the models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from services.launcher.service_files.host_services import (
    CannotWriteService,
    File,
    HostServices,
    one_line,
    variable_file,
)
from services.launcher.service_files.systemd import (
    RESTART_RULES,
    TARGET,
    command_line,
    in_unit,
    target,
    unit_of,
    unit_section,
)
from services.launcher.system.process_plan import ProcessPlan, Stage

SUFFIX = ".container"
CACHE, MODELS = "/cache", "/models"
COMPILERS = {
    "NUMBA_CACHE_DIR": "numba",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
    "VLLM_CONFIG_ROOT": "vllm-config",
}
"""Their default folders are in a home folder, which the image does not have for every user."""
ALL_GPUS = "nvidia.com/gpu=all"
"""As CDI names them. A worker computes on those in its CUDA_VISIBLE_DEVICES, which are numbers of the host's GPUs, and
``cuda_ipc`` needs that both engines see both GPUs.
"""
PODMAN_SPARE_S = 15
"""Added to Podman's own stop timeout, so that systemd does not kill Podman before."""
CONFINED = """\
Network=host
DropCapability=all
NoNewPrivileges=true
SecurityLabelDisable=true
ReadOnly=true
Tmpfs=/tmp:exec,mode=1777
LogDriver=journald
"""
"""Triton executes what it compiles into /tmp. SELinux would hide the host's folders and the GPUs from containers with
labels.
"""
SHARED_NAMESPACES = "PodmanArgs=--pid=host --ipc=host\n"
"""UCX copies between processes of one host (``cuda_ipc``, shared memory) only in common PID and IPC namespaces."""


@dataclass(frozen=True, kw_only=True)
class Containers:
    """What containers need besides the plan."""

    image: str
    state_dir: str
    models: str
    """Folder of the Hugging Face cache; absolute."""
    uid: int
    gid: int

    @property
    def cache(self) -> str:
        """What engines compile."""
        return f"{self.state_dir}/containers/cache"


def quadlet_files(host: HostServices, containers: Containers) -> list[File]:
    """The containers and their target. Raises CannotWriteService."""
    return [target(host), *(_container_file(host, each, containers) for each in host.processes)]


def plain_variable_files(host: HostServices) -> list[File]:
    """The variables of each process as Podman reads them: without quotes. Raises CannotWriteService."""
    return [
        File(name=variable_file(each.name), text=_plain_text(host, each), is_secret=True) for each in host.processes
    ]


def folders(host: HostServices, containers: Containers) -> list[str]:
    """Folders of the host that must exist, because containers write there."""
    own = [_storage(each, containers) for each in host.processes]
    return [*own, containers.cache, containers.models]


def _plain_text(host: HostServices, process: ProcessPlan) -> str:
    variables = {**host.variables(process), "HOME": "/tmp", "PYTHONUNBUFFERED": "1"}  # noqa: S108  # a tmpfs of its own
    if process.stage is Stage.WORKERS:
        variables |= {name: f"{CACHE}/{folder}" for name, folder in COMPILERS.items()}
        variables |= {"XDG_CACHE_HOME": CACHE, "HF_HOME": MODELS}
    return "".join(f"{name}={one_line(name, value)}\n" for name, value in sorted(variables.items()))


def _container_file(host: HostServices, process: ProcessPlan, containers: Containers) -> File:
    stop_s = host.stop_s([process])
    name = unit_of(process).removesuffix(".service")
    text = (
        unit_section(host, process, process.name)
        + f"\n[Container]\nImage={in_unit(containers.image)}\nContainerName=baton-{process.name}\n"
        f"Exec={command_line(process.command)}\nEnvironmentFile={in_unit(host.folder)}/{variable_file(process.name)}\n"
        + _user(host, containers)
        + CONFINED
        + "".join(f"Volume={each}\n" for each in _volumes(host, process, containers))
        + (SHARED_NAMESPACES if process.env.get("WORKER_ENGINE") == "vllm" else "")
        + _devices(host, process)
        + f"PodmanArgs=--stop-timeout={stop_s:.0f}\n"
        f"\n[Service]\nTimeoutStopSec={stop_s + PODMAN_SPARE_S:.0f}\nTimeoutStartSec=infinity\n"
        + RESTART_RULES
        + ("ExecReload=/usr/bin/podman kill --signal HUP baton-nats\n" if process.stage is Stage.NATS else "")
        + f"\n[Install]\nWantedBy={TARGET}\n"
    )
    return File(name=f"{name}{SUFFIX}", text=text)


def _user(host: HostServices, containers: Containers) -> str:
    """The owner of the files: without root, Podman maps that user to itself."""
    return f"User={containers.uid}\nGroup={containers.gid}\n" if host.user else "UserNS=keep-id\n"


def _devices(host: HostServices, process: ProcessPlan) -> str:
    """GPUs and RDMA of a worker that computes on GPUs. Without root, the limit of locked memory cannot be lifted."""
    if "CUDA_VISIBLE_DEVICES" not in process.env:
        return ""
    locked = "PodmanArgs=--ulimit=memlock=-1:-1\n" if host.user else ""
    return f"AddDevice={ALL_GPUS}\nAddDevice=-/dev/infiniband\n{locked}"


def _volumes(host: HostServices, process: ProcessPlan, containers: Containers) -> Iterator[str]:
    if process.stage is Stage.NATS:
        yield _volume(_storage(process, containers), mode="rw")
        yield _volume(str(PurePosixPath(_after(process, "--config")).parent))
        return
    yield from map(_volume, _folders_read(host, process))
    yield _volume(_storage(process, containers), process.env["BATON_STATE_DIR"], "rw")
    if process.stage is Stage.WORKERS:
        yield _volume(containers.cache, CACHE, "rw")
        yield _volume(containers.models, MODELS, "rw")


def _storage(process: ProcessPlan, containers: Containers) -> str:
    """The folder of the host to which the process writes."""
    own = f"{containers.state_dir}/containers/{process.name}"
    return _after(process, "--store_dir") if process.stage is Stage.NATS else own


def _folders_read(host: HostServices, process: ProcessPlan) -> list[str]:
    """Keys, and a model in a folder. Whole folders: a file that is replaced would stay the old one inside."""
    service = "WORKER_" if process.stage is Stage.WORKERS else f"{process.name.partition('-')[0].upper()}_"
    own = {name: value for name, value in host.variables(process).items() if name.startswith(("BATON_", service))}
    files = [value for name, value in own.items() if name.endswith("_FILE") and value.startswith("/")]
    models = [value for name, value in own.items() if name == "WORKER_MODEL" and value.startswith("/")]
    return sorted({*(str(PurePosixPath(each).parent) for each in files), *models})


def _after(process: ProcessPlan, flag: str) -> str:
    return process.command[process.command.index(flag) + 1]


def _volume(path: str, inside: str = "", mode: str = "ro") -> str:
    for each in (path, inside):
        if ":" in each or " " in each:
            raise CannotWriteService(f"{each}: a container cannot have a folder with a colon or a space in its path")
    return in_unit(f"{path}:{inside or path}:{mode}")
