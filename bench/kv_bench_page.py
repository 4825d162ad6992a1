"""docs/benchmarks/kv.md, part by part: a new measurement replaces its part of the page."""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

MARK = "<!-- {} -->"
CONFIDENCE = 0.95
COLUMNS = 120


def table(head: str, rows: list[list[object]]) -> list[str]:
    """Markdown; also shown while the rest runs."""
    names = [name.strip() for name in head.split("|")]
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    print("\n".join(lines), file=sys.stderr)
    return [*lines, ""]


def ms(seconds: float) -> str:
    return "" if math.isnan(seconds) else f"{seconds * 1e3:.1f}"


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Distribution-free interval of the median with ``CONFIDENCE`` (sign test)."""
    ordered, count = sorted(values), len(values)
    tail, place = 0.0, 0
    for outside in range(count // 2):
        tail += math.comb(count, outside) / 2**count
        if 2 * tail > 1 - CONFIDENCE:
            break
        place = outside
    return ordered[place], ordered[count - 1 - place]


def with_interval(values: Sequence[float], form: str, scale: float = 1.0) -> str:
    """The median with its interval."""
    low, high = median_interval(values)
    return f"{median(values) * scale:{form}} ({low * scale:{form}} to {high * scale:{form}})"


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "?")
    return f"{len(os.sched_getaffinity(0))} x {model}, Python {platform.python_version()}"


def commit() -> str:
    described = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return described.stdout.strip() or "unknown"


@dataclass
class Measured:
    """One part of the page."""

    lines: list[str] = field(default_factory=list)
    said: str = ""
    """Date, machine and its load before."""


@contextmanager
def measuring() -> Iterator[Measured]:
    """Around the measurement of a part."""
    when, busy = datetime.now(UTC), os.getloadavg()[0]
    measured = Measured(said=f"Measured {when:%Y-%m-%d %H:%M} UTC, on {machine()}; load average before: {busy:.1f}.")
    yield measured


def page(head: list[str], parts: dict[str, Measured], order: Sequence[str], old: str) -> str:
    """The page: new measurements and the existing other parts."""
    kept = parts_of(old)
    texts = {name: "\n".join(wrapped(["", f"*{one.said}*", "", *one.lines])) for name, one in parts.items()}
    texts = {**kept, **texts}
    return "\n".join([*head, "", *(MARK.format(name) + texts[name] for name in order if name in texts)])


def wrapped(lines: Iterable[str]) -> Iterator[str]:
    """The lines of a page, in which prose breaks at ``COLUMNS``."""
    in_code = False
    for line in (line for text in lines for line in text.split("\n")):
        in_code ^= line.startswith("```")
        indent = "  " if line.startswith(("* ", "- ")) else ""
        keeps = in_code or len(line) <= COLUMNS or line.startswith(("|", "!", "#"))
        yield from (
            [line]
            if keeps
            else textwrap.wrap(line, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        )


def parts_of(text: str) -> dict[str, str]:
    """The parts of a page by their names."""
    _head, *pairs = re.split(r"<!-- (\w+) -->", text)
    return {name: body.rstrip("\n") + "\n" for name, body in zip(pairs[::2], pairs[1::2], strict=True)}
