"""Which Baton this is."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "baton-serve"


@cache
def baton_version() -> str:
    """As it was installed; empty when it runs from somewhere else."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return ""
