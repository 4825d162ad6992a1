"""Engines and stores of others, which packages announce by entry points of the group ``baton.engines``.

Each names a ``port.StartEngine``; with the role store it gets the bus as well (see ``store.engine.store_with``).
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from shared.runtime.service import WrongConfiguration

GROUP = "baton.engines"


def plugged_engines() -> dict[str, EntryPoint]:
    """Those that are installed, by name."""
    return {point.name: point for point in entry_points(group=GROUP)}


def load_plugged(name: str) -> Any:
    """What the entry point of this name stands for. Raises WrongConfiguration if it cannot be loaded."""
    point = plugged_engines()[name]
    try:
        return point.load()
    except Exception as error:
        raise WrongConfiguration(
            f"WORKER_ENGINE={name}: the entry point {point.value} of {GROUP} cannot be loaded: "
            f"{type(error).__name__} {error}. Correct the package that announces it"
        ) from error
