"""Facts about this machine: cores, GPUs, the nats-server binary, ports."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from services.launcher.system.process_plan import MODULES, Machine, PlanRefused, RequiredPort
from shared.contracts.channels import Party
from shared.numa import node_of
from shared.sockets import family_of

NVIDIA_SMI_S_MAX = 30.0
SERVICE = re.compile(rf"(?:\w+\.)?services\.({'|'.join(MODULES)})")
"""A module that a service runs as: an installation has it inside a package, a checkout and earlier versions do not."""
PORT_MAX = 65535
COMMAND_CHARS_MAX = 80
NATS_SERVER_VARIABLE = "BATON_NATS_SERVER"
"""Path of a nats-server binary to use instead of the packaged one."""
KEYS_VARIABLE = "ROUTER_KEYS_FILE"
CONSOLE_KEYS_VARIABLE = "COLLECTOR_ADMIN_KEY_FILE"
API_KEY_VARIABLE = "BATON_API_KEY"
"""API key that the launcher itself sends to routers."""
FOR_THE_LAUNCHER = {NATS_SERVER_VARIABLE, API_KEY_VARIABLE, "BATON_ENGINE", "BATON_PYTHON"}
"""BATON_* variables of `make` and `baton` only; services reject unknown variables."""


def describe_machine() -> Machine:
    """The facts that a plan needs."""
    cores = physical_cores()
    return Machine(
        python=sys.executable,
        nats_server=find_nats_server(),
        cores=cores,
        nodes={core: node_of(core) for core in cores},
        **(gpu_facts() if has_distribution("vllm") else {}),
    )


def inherited_environment() -> dict[str, str]:
    """The environment of all children. The routers' key file is also the console's, unless that has its own."""
    ours = {name: value for name, value in os.environ.items() if name not in FOR_THE_LAUNCHER}
    keys = ours.get(KEYS_VARIABLE, "")
    return {CONSOLE_KEYS_VARIABLE: keys, **ours} if Path(keys).is_file() else ours


def key_headers() -> dict[str, str]:
    """Authorization header for requests to routers; empty without a key."""
    key = os.environ.get(API_KEY_VARIABLE, "")
    return {"authorization": f"Bearer {key}"} if key else {}


def find_nats_server() -> str:
    """The binary that the user named, the one beside this Python, or one on the PATH; empty if there is none."""
    if named := os.environ.get(NATS_SERVER_VARIABLE):
        if found := shutil.which(named):
            return found
        raise PlanRefused(f"{NATS_SERVER_VARIABLE} is {named!r}, which is not an executable file.")
    beside = Path(sys.executable).with_name("nats-server")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("nats-server") or ""


def physical_cores() -> tuple[int, ...]:
    """The first logical CPU of each physical core that this process may use."""
    allowed = sorted(os.sched_getaffinity(0))
    seen: set[str] = set()
    first = []
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        name = siblings.read_text() if siblings.exists() else str(cpu)
        if name not in seen:
            seen.add(name)
            first.append(cpu)
    return tuple(first)


def gpu_facts() -> dict[str, Any]:
    """The GPU fields of ``Machine``."""
    found = gpus()
    if not found:
        return {}
    # With indexes of the user's own the order may be another one than nvidia-smi's.
    own = os.environ.get("CUDA_VISIBLE_DEVICES") and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    topology = "" if own or len(found) == 1 else nvidia_smi("topo", "-m")
    return {"gpus": found, "gpus_used": gpus_of_workers(), "gpu_topology": topology}


def gpus() -> tuple[str, ...]:
    """GPU indexes as nvidia-smi lists them, within CUDA_VISIBLE_DEVICES if that is set."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return tuple(visible.split(","))
    return tuple(nvidia_smi("--query-gpu=index", "--format=csv,noheader").split())


def nvidia_smi(*arguments: str) -> str:
    """What it prints; empty if it cannot."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=NVIDIA_SMI_S_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def gpus_of_workers() -> tuple[str, ...]:
    """GPUs of all workers that this user's launchers have started on this machine."""
    visible = (env.get("CUDA_VISIBLE_DEVICES", "") for _, party, env in service_processes() if party is Party.WORKER)
    return tuple(sorted({gpu for each in visible for gpu in each.split(",")} - {""}))


def service_processes() -> Iterator[tuple[psutil.Process, Party, dict[str, str]]]:
    """Baton's services on this machine with their variables, the oldest process first: those that this user can see."""
    for process in sorted(psutil.process_iter(["create_time"]), key=lambda each: each.info["create_time"] or 0.0):
        with contextlib.suppress(psutil.Error, OSError):
            command = process.cmdline()
            for before, name in itertools.pairwise(command):
                if before == "-m" and (found := SERVICE.fullmatch(name)):
                    yield process, Party(found[1]), process.environ()


def has_distribution(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def require_vllm() -> None:
    """Raises PlanRefused when vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise PlanRefused(
            "vLLM is not installed. `make setup BATON_ENGINE=cpu` (or cuda) installs it, without a checkout "
            "`pip install 'baton_serve-....whl[cpu]'` (or [cuda]); `baton up --engine simulated` runs without it."
        )


def find_model(model: str) -> str:
    """A local path as an absolute path; a Hugging Face id unchanged. Raises PlanRefused."""
    if not model.startswith(("/", "./", "../", "~")):
        return model
    path = Path(model).expanduser().absolute()
    if not (path / "config.json").is_file():
        wrong = "has no config.json, so it is not a Hugging Face model" if path.exists() else "does not exist"
        raise PlanRefused(f"The model folder {path} {wrong}.")
    return str(path)


def taken_ports(ports: tuple[RequiredPort, ...]) -> list[str]:
    """One sentence for each port that is in use."""
    return [
        f"Port {port.port} for {port.purpose} is in use{holder(port.host, port.port)}: "
        f"choose another with {port.option}."
        for port in ports
        if not is_free(port.host, port.port)
    ]


def is_free(host: str, port: int) -> bool:
    """Whether a server can listen there now. Raises PlanRefused for a port that needs privileges."""
    with socket.socket(family_of(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except PermissionError as error:
            raise PlanRefused(f"Port {port} cannot be used by this user: {error.strerror}.") from error
        except OSError:
            return False
    return True


@contextlib.contextmanager
def claimed(port: int) -> Iterator[None]:
    """Reserve this port: with SO_REUSEPORT, routers of two systems could share it. Raises PlanRefused."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as claim:
        try:
            claim.bind(f"\0baton-port-{port}")
        except OSError as error:
            raise PlanRefused(
                f"Port {port} for the OpenAI API is in use by another `baton up`: choose another with --port."
            ) from error
        yield


def free_ports(host: str, above: int, count: int) -> tuple[int, ...]:
    """The next free ports above ``above``. Raises PlanRefused."""
    found = tuple(itertools.islice((port for port in range(above + 1, PORT_MAX + 1) if is_free(host, port)), count))
    if len(found) < count:
        raise PlanRefused(f"There are fewer than {count} free ports above {above}: choose another with --port.")
    return found


def holder(host: str, port: int) -> str:
    """`` by pid N (COMMAND)`` of the process that keeps others from listening there, or empty.

    One that listens on another address of this machine does not. Only root sees the processes of other users.
    """
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status != psutil.CONN_LISTEN or not connection.pid or not connection.laddr:
                continue
            if connection.laddr.port == port and _overlaps(connection.laddr.ip, host):
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return f" by pid {connection.pid} ({textwrap.shorten(command, COMMAND_CHARS_MAX)})"
    except psutil.Error:
        pass
    return ""


def _overlaps(listening: str, host: str) -> bool:
    """Whether a server at the address ``listening`` keeps another from ``host`` on the same port."""
    any_address = {"0.0.0.0", "::"}
    return listening in any_address or host in any_address or listening == _address(host)


def _address(host: str) -> str:
    """``host`` as an IP address; unchanged if it has none."""
    try:
        return host if ":" in host else socket.gethostbyname(host)
    except OSError:
        return host
