"""Fills in the templates of this folder. A unit or a container runs one host of a fleet: `baton up` or `baton join`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePosixPath

from services.launcher.fleet.fleet_file import HostPart
from services.launcher.system.process_plan import STOP_SPARE_S, ProcessPlan, Stage, stop_s

PLACE = re.compile(r"@([a-z_]+)@")
COMPILERS = {
    "NUMBA_CACHE_DIR": "numba",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
    "VLLM_CONFIG_ROOT": "vllm-config",
}
"""Folders of what compilers keep. Their defaults are in a home folder, which the image does not have for every user."""
GPU_DEVICES = "AddDevice=nvidia.com/gpu=all\nAddDevice=-/dev/infiniband"
"""All GPUs as CDI names them, and RDMA. ``cuda_ipc`` needs that both engines see both GPUs."""
LOCKED_MEMORY = "\nPodmanArgs=--ulimit=memlock=-1:-1"
"""The limit of locked memory, which only root can lift."""


class CannotWriteService(Exception):
    """A value cannot be written into a file of services; the message says which."""


@dataclass(frozen=True, kw_only=True)
class HostService:
    """What runs on one host, and as whom."""

    command: Sequence[str]
    """The command that runs the host until SIGTERM, which lets it drain."""
    upgrade: Sequence[str]
    """The command that restarts its workers one after another."""
    variables: Mapping[str, str]
    """The environment of the command; its processes inherit it."""
    variables_file: str
    """Absolute path of the file for the variables."""
    stop_s: float
    """Seconds from SIGTERM to SIGKILL."""
    of_system: bool
    """False for a unit of a user's own service manager."""


@dataclass(frozen=True, kw_only=True)
class Container:
    """What a container needs besides its command."""

    image: str
    state_dir: str
    models: str
    """Folder of the Hugging Face cache; absolute."""
    reads: Sequence[str]
    """Further paths of the host: folders of keys and models, the fleet file."""
    uid: int
    gid: int
    has_gpus: bool


def filled(template: str, **values: str) -> str:
    """The template with a value for each ``@name@``."""
    text = (files(__package__) / template).read_text(encoding="utf-8")
    return PLACE.sub(lambda found: values[found[1]], text)


def systemd_unit(host: HostService, user: str) -> str:
    """``baton.service``. Raises CannotWriteService."""
    return filled(
        "baton.service" if host.of_system else "baton-user.service",
        user=user,
        variables=in_unit(host.variables_file),
        command=command_line(host.command),
        upgrade=command_line(host.upgrade),
        stop_s=f"{host.stop_s:.0f}",
    )


def quadlet(host: HostService, container: Container) -> str:
    """``baton.container``. Raises CannotWriteService."""
    return filled(
        "baton.container",
        image=in_unit(container.image),
        command=command_line(host.command),
        variables=in_unit(host.variables_file),
        user=f"User={container.uid}\nGroup={container.gid}" if host.of_system else "UserNS=keep-id",
        volumes="\n".join(f"Volume={in_unit(each)}" for each in _volumes(container)),
        devices=(GPU_DEVICES + (LOCKED_MEMORY if host.of_system else "")) if container.has_gpus else "",
        upgrade=command_line(host.upgrade),
        stop_s=f"{host.stop_s:.0f}",
        systemd_stop_s=f"{host.stop_s + STOP_SPARE_S:.0f}",
        wanted_by="multi-user.target" if host.of_system else "default.target",
    )


def compose_file(host: HostService, container: Container) -> str:
    """``baton.compose.yaml``, with the variables. Raises CannotWriteService."""
    gpus = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    return filled(
        "baton.compose.yaml",
        image=_in_compose(container.image),
        command=_in_compose(list(host.command)),
        variables=_in_compose(container_variables(host, container)),
        user=_in_compose(f"{container.uid}:{container.gid}"),
        volumes=_in_compose(_volumes(container)),
        devices=_in_compose({"resources": {"reservations": {"devices": [gpus]}}} if container.has_gpus else {}),
        limits=_in_compose({"memlock": -1} if container.has_gpus else {}),
        stop_s=f"{host.stop_s:.0f}",
    )


def container_variables(host: HostService, container: Container) -> dict[str, str]:
    """The variables of the host's processes, and where programs of the image keep what they load and compile."""
    cache = f"{container.state_dir}/cache"
    own = {name: f"{cache}/{folder}" for name, folder in COMPILERS.items()}
    return {
        **host.variables, **own, "XDG_CACHE_HOME": cache, "HF_HOME": container.models,
        "HOME": "/tmp", "PYTHONUNBUFFERED": "1",  # noqa: S108  # a tmpfs of the container
    }  # fmt: skip


def quoted_variables(variables: Mapping[str, str]) -> str:
    """A file of variables as systemd reads it. Raises CannotWriteService."""
    return "".join(f"{name}={_quoted_value(name, value)}\n" for name, value in sorted(variables.items()))


def plain_variables(variables: Mapping[str, str]) -> str:
    """A file of variables as Podman reads it: quotes would be part of the values. Raises CannotWriteService."""
    return "".join(f"{name}={one_line(name, value)}\n" for name, value in sorted(variables.items()))


def folders_read(variables: Mapping[str, str]) -> list[str]:
    """Folders of the files that variables name. A file that is replaced would stay the old one in a container."""
    named = [value for name, value in variables.items() if name.endswith("_FILE") and value.startswith("/")]
    return sorted({str(PurePosixPath(each).parent) for each in named})


def host_stop_s(part: HostPart, inherited: Mapping[str, str], *, is_head: bool) -> float:
    """How long a host may take to stop: its workers, then on the head host routers, other services and NATS."""
    env = {**part.env, **inherited}
    stages = [("worker", Stage.WORKERS)]
    if is_head:
        stages += [("router", Stage.SERVICES), ("collector", Stage.SERVICES), ("nats", Stage.NATS)]
    return sum(stop_s(ProcessPlan(name=name, stage=stage, command=()), env) for name, stage in stages)


def in_unit(text: str) -> str:
    """A text without quotes whose percent signs mean themselves. Raises CannotWriteService."""
    return one_line(text, text).replace("%", "%%")


def command_line(command: Sequence[str]) -> str:
    """A command as ``ExecStart=`` reads it. Raises CannotWriteService."""
    return " ".join(_quoted_argument(each) for each in command)


def one_line(name: str, text: str) -> str:
    """The text, which a line of a file can hold. Raises CannotWriteService."""
    if any(each in text for each in "\n\r\0"):
        raise CannotWriteService(f"{name} has more than one line")
    return text


def _quoted_argument(text: str) -> str:
    escaped = in_unit(text).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return escaped if re.fullmatch(r"[\w./:@=,+-]+", escaped) else f'"{escaped}"'


def _quoted_value(name: str, value: str) -> str:
    escaped = re.sub(r'([\\"`$])', r"\\\1", one_line(name, value))
    return f'"{escaped}"'


def _volumes(container: Container) -> list[str]:
    reads = [
        each for each in dict.fromkeys(container.reads) if not PurePosixPath(each).is_relative_to(container.state_dir)
    ]
    written = (container.state_dir, container.models)
    return [_volume(each, "rw") for each in written] + [_volume(each, "ro") for each in reads]


def _volume(path: str, mode: str) -> str:
    if ":" in path or " " in path:
        raise CannotWriteService(f"{path}: a container cannot have a folder with a colon or a space in its path")
    return f"{path}:{path}:{mode}"


def _in_compose(value: object) -> str:
    """As JSON, which YAML contains; compose would replace ``$NAME``."""
    return json.dumps(value).replace("$", "$$")
