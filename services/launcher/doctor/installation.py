"""Findings about this installation and this machine, whether or not anything runs."""

from __future__ import annotations

from collections.abc import Iterator

from services.launcher.doctor.facts import Disk, Engine, InstallationFacts, Packages, Port
from services.launcher.doctor.findings import Area, Finding, Level, many, named
from shared.text.quantities import in_bytes

PYTHON = (3, 11)
"""The one that the packages are locked for."""
MIB, GIB = 1 << 20, 1 << 30
WORKER_BYTES = 2 * GIB
"""Memory that a worker with vLLM's CPU engine and the tiny model takes, and some."""
SHM_BYTES_MIN = 256 * MIB
"""The ranks of an engine and KV between engines of one machine go through /dev/shm; Docker gives 64 MiB."""
DISK_BYTES_MIN = 200 * MIB
DISK_BYTES_FEW = 5 * GIB
"""A small model, and a store's files."""
DAY_S = 86_400.0
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
    "ports": "Ports",
}
"""For a person."""
NEEDED_PLUGIN, STORE_PLUGIN = "UCX", "POSIX"


def about_installation(facts: InstallationFacts, *, is_running: bool) -> Iterator[Finding]:
    """Whether Baton could run here; ``is_running``: a system does, here or elsewhere."""
    for probe, why in facts.unknown.items():
        yield _finding(Level.NOTE, f"{PROBES.get(probe, probe)} could not be looked at: {why}.")
    if any(facts.python):
        yield _python(facts)
    if facts.packages is not None:
        yield _packages(facts.packages)
    yield from _engine(facts)
    yield _nats_server(facts, is_running=is_running)
    if facts.is_index_compiled is False:
        why = "Placing costs several times the CPU, which is enough for a few workers."
        todo = "Install a C compiler (apt-get install gcc), then `make setup`."
        yield _finding(Level.WARNING, "The prefix index runs in Python: it was not compiled.", why, todo)
    yield from _certificates(facts)
    yield from _exposed(facts)


def about_machine(facts: InstallationFacts) -> Iterator[Finding]:
    """Whether there is room for it."""
    yield from _memory(facts)
    yield from _gpus(facts)
    for disk in facts.disks:
        yield _disk(disk)
    yield from _ports(facts.ports)
    for nats_url, processes in facts.others.items():
        count = many(processes, "process", "processes")
        what = f"Another system runs here, on {nats_url or 'its default NATS'} ({count})."
        why = "It takes its part of cores and memory. This one knows nothing of it."
        yield Finding(area=Area.MACHINE, level=Level.NOTE, what=what, why=why)


def _python(facts: InstallationFacts) -> Finding:
    version = ".".join(map(str, facts.python))
    if facts.python[:2] == PYTHON:
        return _finding(Level.OK, f"Baton {facts.baton or 'of an unknown version'} on Python {version}")
    why = f"The packages are locked for Python {PYTHON[0]}.{PYTHON[1]}."
    return _finding(
        Level.ERROR,
        f"Python {version} runs this.",
        why,
        "make setup BATON_PYTHON=/path/to/python3.11, and .venv/bin/baton",
    )


def _packages(packages: Packages) -> Finding:
    if not packages.lock:
        return _finding(Level.NOTE, "Packages were not compared: no requirements/ lies beside this installation.")
    missing = [f"{one.name} {one.locked}" for one in packages.drift if not one.installed]
    other = [f"{one.name} {one.installed} (locked: {one.locked})" for one in packages.drift if one.installed]
    if missing:
        what = f"{many(len(missing), 'locked package')} missing: {named(missing)}."
        return _finding(Level.ERROR, what, "What needs them fails when it starts.", "make setup")
    if other:
        what = f"{many(len(other), 'package')} in another version than tested: {named(other)}."
        return _finding(Level.WARNING, what, "Baton was tested with the locked ones.", "make setup")
    return _finding(Level.OK, f"All {packages.count} locked packages are here in their versions ({packages.lock})")


def _engine(facts: InstallationFacts) -> Iterator[Finding]:
    if not facts.has_vllm:
        todo = "make setup BATON_ENGINE=cpu (or cuda) installs vLLM."
        yield _finding(Level.NOTE, "No vLLM: only simulated engines can run here (--engine simulated).", "", todo)
        return
    if facts.engine is None:
        if not any(probe == "engine" for probe in facts.unknown):
            yield _finding(Level.NOTE, "vLLM is installed; whether it loads was not tried.")
        return
    yield _vllm(facts.engine)
    yield from _nixl(facts.engine)


def _vllm(engine: Engine) -> Finding:
    if not engine.vllm_failure:
        built = f"for CUDA {engine.torch_cuda}" if engine.torch_cuda else "for CPU"
        return _finding(Level.OK, f"vLLM {engine.vllm} loads, built {built}")
    numa = "libnuma" in engine.vllm_failure
    todo = "apt-get install libnuma1 (or dnf install numactl-libs)" if numa else "make clean setup makes .venv anew."
    return _finding(Level.ERROR, "vLLM does not load.", engine.vllm_failure, todo)


def _nixl(engine: Engine) -> Iterator[Finding]:
    if engine.nixl_failure:
        why = f"Engines could not exchange KV. {engine.nixl_failure}"
        yield _finding(Level.ERROR, "NIXL does not load.", why, "make setup")
        return
    broken = {**dict.fromkeys((NEEDED_PLUGIN, STORE_PLUGIN), "it is not there"), **dict.fromkeys(engine.plugins, "")}
    broken |= engine.plugin_failures
    if broken[NEEDED_PLUGIN]:
        what = f"NIXL {engine.nixl} cannot use its {NEEDED_PLUGIN} plugin: {broken[NEEDED_PLUGIN]}."
        todo = "make clean setup; if NIXL_PLUGIN_DIR is set, it must name the folder with NIXL's plugins."
        yield _finding(Level.ERROR, what, "Engines could not exchange KV.", todo)
    else:
        yield _finding(Level.OK, f"NIXL {engine.nixl} moves KV with {NEEDED_PLUGIN}")
    if broken[STORE_PLUGIN]:
        what = f"NIXL's {STORE_PLUGIN} plugin cannot be used: {broken[STORE_PLUGIN]}."
        yield _finding(Level.NOTE, what, "Stores use plain file calls instead, which takes a little longer.")


def _nats_server(facts: InstallationFacts, *, is_running: bool) -> Finding:
    if facts.nats_server:
        return _finding(Level.OK, f"nats-server is there: {facts.nats_server}")
    todo = "make setup brings one; BATON_NATS_SERVER names another; --nats-url a NATS that runs already."
    level = Level.NOTE if is_running else Level.WARNING  # the system has one, perhaps on another machine
    return _finding(level, "No nats-server was found here.", "`baton up` cannot start its own.", todo)


def _certificates(facts: InstallationFacts) -> Iterator[Finding]:
    for one in facts.certificates:
        days = int(one.ends_in_s // DAY_S)
        if one.failure:
            what, why = f"The certificate {one.path} cannot be read.", one.failure
            yield Finding(area=Area.ACCESS, level=Level.ERROR, what=what, why=why, todo="baton init makes them.")
        elif one.ends_in_s <= 0:
            what, why = f"The certificate {one.path} has ended.", "Nobody can connect to NATS with it."
            yield Finding(area=Area.ACCESS, level=Level.ERROR, what=what, why=why, todo="baton init --renew")
        elif one.ends_in_s < CERTIFICATE_S_MIN:
            what = f"The certificate {one.path} ends in {many(days, 'day')}."
            why = "Nobody can connect to NATS then."
            yield Finding(area=Area.ACCESS, level=Level.WARNING, what=what, why=why, todo="baton init --renew")
        else:
            what = f"The certificate {one.path} holds for {many(days, 'day')}"
            yield Finding(area=Area.ACCESS, level=Level.OK, what=what)


def _exposed(facts: InstallationFacts) -> Iterator[Finding]:
    if facts.exposed:
        what = f"Other users may read {named(facts.exposed)}."
        why, todo = "Who has these keys may do what their owners may.", "chmod 600 (and make new ones if somebody has)"
        yield Finding(area=Area.ACCESS, level=Level.WARNING, what=what, why=why, todo=todo)


def _memory(facts: InstallationFacts) -> Iterator[Finding]:
    if facts.cores and facts.memory_bytes:
        free = f"{in_bytes(facts.memory_free_bytes)} of {in_bytes(facts.memory_bytes)} memory free"
        what = f"{many(facts.cores, 'core')}, {free}"
        if facts.memory_free_bytes < WORKER_BYTES:
            why = f"A worker with vLLM on CPU takes about {in_bytes(WORKER_BYTES)}; Linux ends who takes too much."
            todo = "Fewer workers, a smaller --kv-cache, or --engine simulated."
            yield Finding(area=Area.MACHINE, level=Level.WARNING, what=what, why=why, todo=todo)
        else:
            yield Finding(area=Area.MACHINE, level=Level.OK, what=what)
    if 0 < facts.shm_bytes < SHM_BYTES_MIN:
        what = f"Shared memory (/dev/shm) has only {in_bytes(facts.shm_bytes)}."
        why = "Ranks of one engine, and KV between engines of one machine, go through it."
        todo = "docker run --shm-size 1g; in compose: shm_size: 1gb."
        yield Finding(area=Area.MACHINE, level=Level.WARNING, what=what, why=why, todo=todo)


def _gpus(facts: InstallationFacts) -> Iterator[Finding]:
    if not facts.gpus:
        yield Finding(area=Area.MACHINE, level=Level.OK, what="No NVIDIA GPU: engines run on CPU")
        return
    names = named([f"{gpu.name} ({in_bytes(gpu.memory_bytes)})" for gpu in facts.gpus])
    what = f"{many(len(facts.gpus), 'GPU')}: {names}, driver {facts.gpus[0].driver}"
    usable = facts.engine is None or not facts.has_vllm or len(facts.engine.devices) >= len(facts.gpus)
    if usable:
        yield Finding(area=Area.MACHINE, level=Level.OK, what=what)
    elif facts.engine is not None and not facts.engine.torch_cuda:
        why = "vLLM here is the CPU build: the GPUs stay idle."
        yield Finding(area=Area.MACHINE, level=Level.WARNING, what=what, why=why, todo="make setup BATON_ENGINE=cuda")
    elif facts.engine is not None:
        why = f"PyTorch can use {len(facts.engine.devices)} of them. It was built for CUDA {facts.engine.torch_cuda}."
        todo = "nvidia-smi shows the driver's CUDA version; update the driver, or look at CUDA_VISIBLE_DEVICES."
        yield Finding(area=Area.MACHINE, level=Level.ERROR, what=what, why=why, todo=todo)


def _disk(disk: Disk) -> Finding:
    if disk.failure:
        what, why = f"{disk.path}, for {disk.what}, cannot be written.", disk.failure
        todo = "Give this user the folder, or name others: BATON_STATE_DIR, BATON_CACHE_DIR."
        return Finding(area=Area.MACHINE, level=Level.ERROR, what=what, why=why, todo=todo)
    free = f"{in_bytes(disk.free_bytes)} free for {disk.what} ({disk.path})"
    if disk.free_bytes < DISK_BYTES_FEW:
        level = Level.ERROR if disk.free_bytes < DISK_BYTES_MIN else Level.WARNING
        why = "When it is full NATS cannot keep the registry, and models cannot be fetched."
        todo = "Make room, or name other folders: BATON_STATE_DIR, BATON_CACHE_DIR."
        return Finding(area=Area.MACHINE, level=level, what=f"Only {free}.", why=why, todo=todo)
    return Finding(area=Area.MACHINE, level=Level.OK, what=free)


def _ports(ports: list[Port]) -> Iterator[Finding]:
    taken = [port for port in ports if not port.is_free]
    for port in taken:
        what = f"Port {port.number}, for {port.purpose}, is taken{port.holder}."
        todo = f"End that process, or choose another port: baton up {port.option} N"
        why = "`baton up` would not start."
        yield Finding(area=Area.MACHINE, level=Level.WARNING, what=what, why=why, todo=todo)
    if ports and not taken:
        numbers = ", ".join(str(port.number) for port in ports)
        yield Finding(area=Area.MACHINE, level=Level.OK, what=f"Ports {numbers} are free for `baton up`")


def _finding(level: Level, what: str, why: str = "", todo: str = "") -> Finding:
    return Finding(area=Area.INSTALLATION, level=level, what=what, why=why, todo=todo)
