"""Assigns CPU cores or GPUs to the workers of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

GPU_MEMORY_SHARE = 0.9
"""Share of a GPU's memory for all engines on it together: vLLM's default for one engine."""
SPARE_CORES_MIN = 2
"""With at least this many more cores than workers, one core is left to NATS and the services."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """The cores or GPU of one worker."""

    env: Mapping[str, str] = field(default_factory=dict)
    engine_args: str = ""
    text: str = ""
    """Such as "core 0"."""


def share_cores(cores: Sequence[int], count: int, running: int) -> tuple[list[Device], list[str]]:
    """Split the cores into equal ranges, one per worker; the second value has warnings about shared cores.

    ``running`` workers already use the whole machine, so a worker that joins shares their cores.
    """
    if running or len(cores) < count:
        shared = [on_cores([cores[(running + index) % len(cores)]]) for index in range(count)]
        return shared, [f"{running + count} engines share {len(cores)} CPU cores, so each is slower."]
    usable = list(cores[1:]) if len(cores) >= count + SPARE_CORES_MIN else list(cores)
    each, rest = divmod(len(usable), count)
    devices = []
    for index in range(count):
        size = each + (1 if index < rest else 0)
        devices.append(on_cores(usable[:size]))
        usable = usable[size:]
    return devices, []


def on_cores(cores: Sequence[int]) -> Device:
    """The device of a CPU engine."""
    listed = ",".join(str(core) for core in cores)
    text = f"core {listed}" if len(cores) == 1 else f"{len(cores)} cores"
    return Device(env={"WORKER_CPU_CORES": listed}, text=text)


def share_gpus(gpus: Sequence[str], count: int, running: int) -> tuple[list[Device], list[str]]:
    """One GPU per worker, round robin. With fewer GPUs than workers, engines share GPUs and their memory."""
    engines = running + count
    per_gpu = -(-engines // len(gpus))
    share = f"--gpu-memory-utilization {GPU_MEMORY_SHARE / per_gpu:.2f}" if per_gpu > 1 else ""
    devices = []
    for index in range(count):
        gpu = gpus[(running + index) % len(gpus)]
        devices.append(Device(env={"CUDA_VISIBLE_DEVICES": gpu}, engine_args=share, text=f"GPU {gpu}"))
    if per_gpu == 1:
        return devices, []
    each = f"{GPU_MEMORY_SHARE / per_gpu:.0%}"
    return devices, [f"{engines} engines share {len(gpus)} GPU(s): each may take {each} of a GPU's memory."]
