"""On which cores the thread that copies may run.

An engine on CPU pins its model thread to a core, and threads begun from there are pinned with it. A copy beside the
model's own work then takes turns with it, although other cores may be idle.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")


def allow_cores(cores: Iterable[int]) -> None:
    """The calling thread may also run on those of these cores that are as near to its memory as its own."""
    own = os.sched_getaffinity(0)
    nodes = {node_of(core) for core in own}
    near = {core for core in cores if node_of(core) in nodes}
    with suppress(OSError):  # None of them may be used any more: it stays where it is.
        os.sched_setaffinity(0, own | near)


def node_of(core: int) -> str:
    """The NUMA node's name; empty where the system tells none."""
    return next((path.name for path in (CPUS / f"cpu{core}").glob("node*")), "")
