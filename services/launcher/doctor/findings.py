"""Findings of `baton doctor`: each has a meaning and a remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

SHOWN_MAX = 5
"""Names that one finding lists; it counts the rest."""


class Level(StrEnum):
    """Severity."""

    OK = "ok"
    NOTE = "note"
    """Information; nothing is wrong."""
    WARNING = "warning"
    """It works, but worse than it could, or will fail soon."""
    ERROR = "error"
    """It does not work."""


class Area(StrEnum):
    """Groups of findings, in the order of the output."""

    INSTALLATION = "Installation"
    MACHINE = "This machine"
    BUS = "NATS"
    SERVICES = "Services"
    WORKERS = "Workers"
    ACCESS = "Access"

    def finding(self, level: Level, what: str, why: str = "", todo: str = "") -> Finding:
        """A finding in this group."""
        return Finding(area=self, level=level, what=what, why=why, todo=todo)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check."""

    area: Area
    level: Level
    what: str
    """The fact, in one line."""
    why: str = ""
    """Its meaning."""
    todo: str = ""
    """The remedy."""


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    status: str
    """healthy, degraded (warnings) or unhealthy (errors)."""
    summary: str
    errors: int
    warnings: int
    findings: list[Finding]


def examination(findings: Iterable[Finding], *, is_running: bool, joined: Sequence[str] = ()) -> Examination:
    order = {area: number for number, area in enumerate(Area)}
    ordered = sorted(findings, key=lambda finding: order[finding.area])
    errors = sum(finding.level is Level.ERROR for finding in ordered)
    warnings = sum(finding.level is Level.WARNING for finding in ordered)
    return Examination(
        status=status_of(errors, warnings),
        summary=summary_of(errors, warnings, is_running=is_running, joined=joined),
        errors=errors,
        warnings=warnings,
        findings=ordered,
    )


def status_of(errors: int, warnings: int) -> str:
    """healthy, degraded or unhealthy."""
    return "unhealthy" if errors else "degraded" if warnings else "healthy"


def summary_of(errors: int, warnings: int, *, is_running: bool, joined: Sequence[str] = ()) -> str:
    """The last line of the output. ``joined``: see ``Scope``."""
    subject = "The system" if is_running else "The installation"
    nothing_runs = "" if is_running else " No system runs; `baton up` starts one."
    if joined and not is_running:
        nothing_runs = (
            f" This machine has joined as {named(joined)}: `baton doctor` on the head host examines the system."
        )
    counts = [many(count, noun) for count, noun in ((errors, "error"), (warnings, "warning")) if count]
    found = f": {', '.join(counts)}" if counts else ""
    return f"{subject} is {status_of(errors, warnings)}{found}.{nothing_runs}"


def many(count: int, noun: str, plural: str = "") -> str:
    """``1 error``, ``2 errors``."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


SLOWER_IN_PYTHON = "It uses several times the CPU, which is enough for a few workers."


def in_python(*, index: bool, placement: bool, of: str = "") -> str:
    """Which of the router's parts in C run in Python: ``The prefix index of router-1 runs in Python.``"""
    names = [name for name, compiled in (("prefix index", index), ("placement", placement)) if not compiled]
    return f"The {' and '.join(names)}{of} run{'s' * (len(names) == 1)} in Python."


def named(names: Sequence[str]) -> str:
    """The first few names, and the number of the others."""
    more = len(names) - SHOWN_MAX
    return ", ".join(names[:SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
