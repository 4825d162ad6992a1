"""What `baton doctor` has to say: findings, each with what it means and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

SHOWN_MAX = 5
"""Of many of a kind, so many are named."""


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    """Nothing is wrong; somebody may want to know."""
    WARNING = "warning"
    """It works, though worse than it could, or not for long."""
    ERROR = "error"
    """It does not work."""


class Area(StrEnum):
    """What it is about; the groups of the picture, in this order."""

    INSTALLATION = "Installation"
    MACHINE = "This machine"
    BUS = "NATS"
    SERVICES = "Services"
    WORKERS = "Workers"
    ACCESS = "Who gets in"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    area: Area
    level: Level
    what: str
    """What is so, in one line."""
    why: str = ""
    """What that means."""
    todo: str = ""
    """What to do about it."""


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was found."""

    verdict: str
    """In words."""
    errors: int
    warnings: int
    findings: list[Finding]


def examination(findings: Iterable[Finding], *, is_running: bool) -> Examination:
    """All findings, grouped, and what they come to."""
    order = {area: number for number, area in enumerate(Area)}
    ordered = sorted(findings, key=lambda finding: order[finding.area])
    errors = sum(finding.level is Level.ERROR for finding in ordered)
    warnings = sum(finding.level is Level.WARNING for finding in ordered)
    return Examination(
        verdict=verdict(errors, warnings, is_running=is_running), errors=errors, warnings=warnings, findings=ordered
    )


def verdict(errors: int, warnings: int, *, is_running: bool) -> str:
    """The last line."""
    of = "the system" if is_running else "the installation"
    nothing_runs = "" if is_running else " Nothing runs here; `baton up` starts it."
    warned = many(warnings, "warning")
    if errors:
        also = f" and {warned}" if warnings else ""
        return f"{many(errors, 'error')}{also}: {of} does not work as it should.{nothing_runs}"
    if warnings:
        return f"{warned}: {of} works, with something to look after.{nothing_runs}"
    return f"All is well with {of}.{nothing_runs}"


def many(count: int, noun: str, plural: str = "") -> str:
    """``1 error``, ``2 errors``."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def named(names: Sequence[str]) -> str:
    """The first few of them, and how many more there are."""
    more = len(names) - SHOWN_MAX
    return ", ".join(names[:SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
