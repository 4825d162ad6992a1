"""NUMA nodes of the machine."""

from __future__ import annotations

from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")


def node_of(core: int) -> str:
    """Name of the core's NUMA node; empty if the system does not tell."""
    return next((path.name for path in (CPUS / f"cpu{core}").glob("node*")), "")
