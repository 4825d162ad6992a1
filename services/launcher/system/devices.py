"""Which cores or GPU each worker on this machine computes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

GPU_MEMORY_SHARE = 0.9
"""Of a GPU's memory, what all engines on it may take together: vLLM's own default for one engine."""
SPARE_CORES_MIN = 2
"""With at least so many cores more than workers, one is left to NATS, the router and the other services."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A worker's part of the machine."""

    env: Mapping[str, str] = field(default_factory=dict)
    engine_args: str = ""
    words: str = ""
    """For a person: "core 0"."""


def share_cores(cores: Sequence[int], count: int, running: int) -> tuple[list[Device], list[str]]:
    """Cut the cores into equal runs, one per worker. Engines that share a core slow each other down: that is said.

    ``running`` workers have taken all of the machine already, so one that joins shares.
    """
    if running or len(cores) < count:
        shared = [on_cores([cores[(running + index) % len(cores)]]) for index in range(count)]
        return shared, [f"{running + count} engines share {len(cores)} CPU cores: expect each to be slower."]
    usable = list(cores[1:]) if len(cores) >= count + SPARE_CORES_MIN else list(cores)
    each, rest = divmod(len(usable), count)
    devices = []
    for index in range(count):
        size = each + (1 if index < rest else 0)
        devices.append(on_cores(usable[:size]))
        usable = usable[size:]
    return devices, []


def on_cores(cores: Sequence[int]) -> Device:
    """A CPU engine's part."""
    listed = ",".join(str(core) for core in cores)
    words = f"core {listed}" if len(cores) == 1 else f"{len(cores)} cores"
    return Device(env={"WORKER_CPU_CORES": listed}, words=words)


def share_gpus(gpus: Sequence[str], count: int, running: int) -> tuple[list[Device], list[str]]:
    """One GPU per worker, in turn. With fewer GPUs than workers they share memory too, which is said."""
    engines = running + count
    per_gpu = -(-engines // len(gpus))
    share = f"--gpu-memory-utilization {GPU_MEMORY_SHARE / per_gpu:.2f}" if per_gpu > 1 else ""
    devices = []
    for index in range(count):
        gpu = gpus[(running + index) % len(gpus)]
        devices.append(Device(env={"CUDA_VISIBLE_DEVICES": gpu}, engine_args=share, words=f"GPU {gpu}"))
    if per_gpu == 1:
        return devices, []
    each = f"{GPU_MEMORY_SHARE / per_gpu:.0%}"
    return devices, [f"{engines} engines share {len(gpus)} GPU(s): each may take {each} of a GPU's memory."]
