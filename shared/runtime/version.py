"""The installed version of Baton."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "baton-serve"


@cache
def baton_version() -> str:
    """The version of the installed package; empty if it is not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return ""
