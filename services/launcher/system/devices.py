"""Assigns CPU cores or GPUs to the workers of this machine; the GPUs of one engine are near each other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.launcher.system.process_plan import Machine, PlanRefused

GPU_MEMORY_SHARE = 0.9
"""Share of a GPU's memory for all engines on it together: vLLM's default for one engine."""
SPARE_CORES_MIN = 2
"""If there are at least this many more cores than ranks, one core is left to NATS and the services."""
RANKS = "WORKER_TENSOR_PARALLEL_SIZE"
STAGES = "WORKER_PIPELINE_PARALLEL_SIZE"
RANKS_ARE_BUSY = (
    "A rank that waits for another one of its engine keeps its core busy: engines on the same cores answer late, and "
    "on a busy machine requests fail."
)
A_CORE_FOR_EACH = "Give each rank a core of its own: start fewer workers, or fewer ranks and stages."
FAR = 1000
"""Distance between GPUs of which nothing is known."""
DISTANCES = {"PIX": 200, "PXB": 300, "PHB": 400, "NODE": 500, "SYS": 600, "SOC": 600}
"""nvidia-smi's words for the way between two GPUs, from one PCIe bridge to the link between CPU sockets; ``SOC`` is
the older word for ``SYS``.
"""
NVLINK = re.compile(r"NV(\d+)")
NVLINKS_MAX = 100
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
"""nvidia-smi underlines the table's head, also in a pipe."""
GPU = re.compile(r"GPU(\d+)")

NO_NODES: Mapping[int, str] = {}

Topology = Mapping[tuple[str, str], int]
"""Distance of two GPUs by their indexes; more NVLinks are nearer than fewer, and these nearer than PCIe."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """The cores or GPUs of one worker."""

    env: Mapping[str, str] = field(default_factory=dict)
    engine_args: str = ""
    text: str = ""
    """What the screen shows, such as "core 0"."""


def engines_for(machine: Machine, ranks: int) -> int:
    """With how many engines of so many ranks the machine serves most: as many as it has memories with devices of their
    own, which are GPUs, or the NUMA nodes of a CPU.

    An engine reads its weights once in each step, for all its requests. Two engines on one memory read them twice, each
    for half of the requests, and neither computes with the cores of the other while that one is idle.
    """
    if machine.gpus:
        free = [gpu for gpu in machine.gpus if gpu not in machine.gpus_used]
        return max(1, len(free) // ranks)
    return len(nodes_of(machine.cores, machine.nodes))


def nodes_of(cores: Sequence[int], nodes: Mapping[int, str]) -> list[list[int]]:
    """The cores of each NUMA node."""
    by_node: dict[str, list[int]] = {}
    for core in cores:
        by_node.setdefault(nodes.get(core, ""), []).append(core)
    return list(by_node.values())


def share_cores(
    cores: Sequence[int], ranks: Sequence[int], running: int, nodes: Mapping[int, str] = NO_NODES
) -> tuple[list[Device], list[str]]:
    """Split the cores, for each rank of each worker equally many; the second value has warnings about shared cores.
    Raises PlanRefused if two ranks of one engine would share a core: each would wait for the other.

    ``ranks``: of each worker. ``running`` workers already use the whole machine: one that joins shares their cores.
    ``nodes``: the NUMA node of each core. Where each node can have as many of the workers, no worker uses two.
    """
    by_node = nodes_of(cores, nodes)
    if len(by_node) > 1 and not running and len(set(ranks)) == 1 and len(ranks) % len(by_node) == 0:
        of_node = ranks[: len(ranks) // len(by_node)]
        if all(len(node) >= sum(of_node) for node in by_node):
            return [device for node in by_node for device in share_cores(node, of_node, 0)[0]], []
    if (most := max(ranks)) > len(cores):
        raise PlanRefused(f"A CPU engine with {most} ranks needs as many cores, but there are {len(cores)}.")
    if running or len(cores) < sum(ranks):
        shared, at = [], running
        for count in ranks:
            shared.append(on_cores([cores[(at + index) % len(cores)] for index in range(count)], count))
            at += count
        return shared, _shared(running + len(ranks), max(ranks), len(cores))
    usable = list(cores[1:]) if len(cores) >= sum(ranks) + SPARE_CORES_MIN else list(cores)
    each, rest = divmod(len(usable), sum(ranks))
    devices = []
    for count in ranks:
        # Ranks of one engine work in lockstep: a core more for one of them would not help.
        extra = 1 if count == 1 and rest else 0
        rest -= extra
        size = count * each + extra
        devices.append(on_cores(usable[:size], count))
        usable = usable[size:]
    return devices, []


def _shared(engines: int, ranks: int, cores: int) -> list[str]:
    """Warnings about so many engines, one of them with so many ranks, on too few cores."""
    notes = [f"{engines} engines share {cores} CPU cores, so each is slower."]
    if ranks > 1:
        notes.append(f"{RANKS_ARE_BUSY} {A_CORE_FOR_EACH}")
    return notes


def on_cores(cores: Sequence[int], ranks: int) -> Device:
    listed = ",".join(str(core) for core in cores)
    text = f"core {listed}" if len(cores) == 1 else f"{len(cores)} cores"
    if ranks == 1:
        return Device(env={"WORKER_CPU_CORES": listed}, text=text)
    return Device(env={"WORKER_CPU_CORES": listed, RANKS: str(ranks)}, text=f"{text}, {ranks} ranks")


def in_stages(device: Device, stages: int, hosts: int) -> Device:
    """The device, of which each of the engine's hosts has one, with the ranks of all shared out over pipeline stages;
    they are a multiple of these.
    """
    if hosts == 1 and (stages == 1 or RANKS not in device.env):  # Stores and attached workers have no engine.
        return device
    shared = ranks_in_stages(int(device.env.get(RANKS, "1")) * hosts, stages)
    text = device.text + (f", {stages} stages" if stages > 1 else "") + (f", {hosts} hosts" if hosts > 1 else "")
    return replace(device, env={**device.env, **shared}, text=text)


def ranks_in_stages(ranks: int, stages: int) -> dict[str, str]:
    """Settings of an engine with so many ranks over all stages."""
    of_stages = {STAGES: str(stages)} if stages > 1 else {}
    return {RANKS: str(ranks // stages), **of_stages} if ranks > 1 else {}


def share_gpus(machine: Machine, counts: Sequence[int], running: int) -> tuple[list[Device], list[str]]:
    """GPUs of their own for each worker, near ones together, from those that no running worker uses. If they do not
    suffice, engines with one GPU share GPUs and their memory, round robin. Raises PlanRefused for engines with several.

    ``counts``: GPUs of each worker.
    """
    free = [gpu for gpu in machine.gpus if gpu not in machine.gpus_used]
    if sum(counts) <= len(free):
        return own_gpus(machine, free, counts), []
    if max(counts) > 1:
        raise PlanRefused(too_few(machine, counts, len(free)))
    engines = running + len(counts)
    per_gpu = -(-engines // len(machine.gpus))
    each = GPU_MEMORY_SHARE / per_gpu
    share = f"--gpu-memory-utilization {each:.2f}" if per_gpu > 1 else ""
    gpus = [machine.gpus[(running + index) % len(machine.gpus)] for index in range(len(counts))]
    note = f"{engines} engines share {len(machine.gpus)} GPU(s): each may take {each:.0%} of a GPU's memory."
    return [on_gpus(machine, [gpu], share) for gpu in gpus], [note] if share else []


def own_gpus(machine: Machine, free: list[str], counts: Sequence[int]) -> list[Device]:
    """The largest engines choose first."""
    topology, left = parse_topology(machine.gpu_topology), list(free)
    chosen: dict[int, Device] = {}
    for index in sorted(range(len(counts)), key=lambda index: -counts[index]):
        gpus = nearest(left, counts[index], topology) if counts[index] > 1 else (left[0],)
        left = [gpu for gpu in left if gpu not in gpus]
        chosen[index] = on_gpus(machine, gpus)
    return [chosen[index] for index in range(len(counts))]


def on_gpus(machine: Machine, gpus: Sequence[str], engine_args: str = "") -> Device:
    env = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    if machine.gpu_topology:
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # nvidia-smi's order; CUDA's own default begins with the fastest GPU.
    if len(gpus) > 1:
        env[RANKS] = str(len(gpus))
    text = f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {','.join(gpus)}"
    return Device(env=env, engine_args=engine_args, text=text)


def too_few(machine: Machine, counts: Sequence[int], free: int) -> str:
    """So many GPUs wanted, so many there."""
    workers = " and ".join(f"{number} with {each}" for each, number in sorted(Counter(counts).items(), reverse=True))
    used = f", of which running workers use {len(machine.gpus) - free}" if free < len(machine.gpus) else ""
    return (
        f"{sum(counts)} GPUs are wanted (workers: {workers}), but there are {len(machine.gpus)}{used}. An engine with "
        "several GPUs shares none: start fewer workers, or give each fewer with --gpus-per-worker."
    )


def parse_topology(text: str) -> dict[tuple[str, str], int]:
    """Distances between GPUs. Other devices of the table, such as network cards, are left out, and so is what does not
    look like a row.
    """
    lines = [words for line in text.splitlines() if (words := ESCAPES.sub("", line).split())]
    columns = [found[1] for word in (lines[0] if lines else []) if (found := GPU.fullmatch(word))]
    distances: dict[tuple[str, str], int] = {}
    for line in lines[1:]:
        row = GPU.fullmatch(line[0])
        if row and len(line) > len(columns):  # The columns of the GPUs come first.
            distances |= {(row[1], column): _distance(word) for column, word in zip(columns, line[1:], strict=False)}
    return distances


def _distance(word: str) -> int:
    if word == "X":
        return 0
    if found := NVLINK.fullmatch(word):
        return NVLINKS_MAX - min(int(found[1]), NVLINKS_MAX - 1)
    return DISTANCES.get(word, FAR)


def nearest(gpus: Sequence[str], count: int, topology: Topology) -> tuple[str, ...]:
    """So many of these GPUs, whose greatest distance is smallest; of equal choices the first ones.

    Grows a set from each GPU, which is exact where nearness is transitive, as behind bridges, sockets and NVSwitch.
    """
    sets = [_grown(seed, gpus, count, topology) for seed in gpus]
    best = min(sets, key=lambda chosen: _spread(chosen, topology))
    return tuple(sorted(best, key=gpus.index))


def _grown(seed: str, gpus: Sequence[str], count: int, topology: Topology) -> list[str]:
    chosen = [seed]
    while len(chosen) < count:
        rest = [gpu for gpu in gpus if gpu not in chosen]
        chosen.append(min(rest, key=lambda gpu: _spread([*chosen, gpu], topology)))
    return chosen


def _spread(chosen: Sequence[str], topology: Topology) -> tuple[int, int]:
    """The greatest distance, and the sum of all."""
    distances = [topology.get((one, other), FAR) for index, one in enumerate(chosen) for other in chosen[index + 1 :]]
    return max(distances, default=0), sum(distances)
