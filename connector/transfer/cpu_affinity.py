"""CPU affinity of the threads that copy.

On a CPU vLLM pins the model's thread to a core, and threads started from it inherit that. A copy would then share the
core with the model while other cores are idle.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")


def allow_cores(cores: Iterable[int]) -> None:
    """Let the calling thread also run on those of these cores that are in a NUMA node of its own cores."""
    own = os.sched_getaffinity(0)
    nodes = {node_of(core) for core in own}
    near = {core for core in cores if node_of(core) in nodes}
    with suppress(OSError):  # None of the cores may be used any more; the thread stays where it is.
        os.sched_setaffinity(0, own | near)


def leave_cores(cores: set[int]) -> None:
    """Move the calling thread off these cores, if it has others."""
    if others := os.sched_getaffinity(0) - cores:
        os.sched_setaffinity(0, others)


@contextmanager
def keep_cores() -> Iterator[None]:
    """Undo what a library does to the affinity of the calling thread, which later runs the model."""
    cores = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def node_of(core: int) -> str:
    """Name of the core's NUMA node; empty if the system does not tell."""
    return next((path.name for path in (CPUS / f"cpu{core}").glob("node*")), "")
