"""Why a process died, as a sentence, and when it is started again."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

ANSI = re.compile(r"\x1b\[[0-9;]*m")
EXCEPTION = re.compile(
    r"(?:^|[\s\]])((?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Dead|Down|Refused|Failed|Lost|TooLarge|Killed)): (.+)"
)
"""``ValueError: text``, at any position of a log line."""
WRAPPER = re.compile(r"See root cause above|unhandled errors in a TaskGroup|Engine core proc died|Failed core proc")
"""Exceptions that only refer to another one."""
VALIDATION = re.compile(r"\d+ validation errors? for \w+")
VALIDATION_TEXT = re.compile(r"^\s+Value error, (.+?)(?: \[type=|$)")
"""pydantic prints the cause on the line after the exception."""
REFUSAL = re.compile(r"^(?:router|orchestrator|collector|worker): (.+)")
"""Last line of a service that refuses to start, for example because of a wrong setting."""
OUT_OF_MEMORY = re.compile(
    r"out of memory|Cannot allocate memory|std::bad_alloc|MemoryError|No available memory for the cache blocks",
    re.IGNORECASE,
)
SIGKILL = 9
LAST_LINES_MAX = 8
TEXT_CHARS_MAX = 600
DOUBLINGS_MAX = 16


def why_it_died(lines: Sequence[str], exit_code: int, detail: str = "") -> str:
    """One or two sentences. ``detail`` is the detail of its last status, if that was FAILED."""
    plain = [plain_line(line) for line in lines]
    root = root_exception(plain)
    memory = next((line.strip() for line in reversed(plain) if OUT_OF_MEMORY.search(line)), "")
    if memory:
        return cut(f"Out of memory: {root or memory}")
    if VALIDATION.search(detail or root):
        wrong = next((found[1] for line in plain if (found := VALIDATION_TEXT.search(line))), "")
        return cut(wrong or detail or root)
    if detail and not WRAPPER.search(detail):
        return cut(detail)
    if root:
        return cut(root)
    if plain and (refusal := REFUSAL.search(plain[-1])):
        return cut(refusal[1])
    if exit_code == -SIGKILL:
        return "It was killed (SIGKILL), by a user or by the kernel because memory ran out."
    if exit_code < 0:
        return f"It was ended by signal {-exit_code}."
    return f"It exited with code {exit_code}; its log gives no reason."


def plain_line(line: str) -> str:
    """A log line without colours; of a JSON line, its message and exception."""
    line = ANSI.sub("", line.rstrip("\n"))
    if line.startswith("{"):
        try:
            fields: dict[str, Any] = json.loads(line)
        except ValueError:
            return line
        return " ".join(str(fields[key]) for key in ("message", "msg", "event", "error", "exception") if key in fields)
    return line


def root_exception(lines: Sequence[str]) -> str:
    """The last exception with a cause; wrappers that only refer to another one are skipped."""
    for line in reversed([part for whole in lines for part in whole.splitlines()]):
        found = EXCEPTION.search(line)
        if found and not WRAPPER.search(line):
            return f"{found[1].rsplit('.', 1)[-1]}: {found[2].strip()}"
    return ""


def last_lines(lines: Sequence[str]) -> list[str]:
    """The log lines to show beside the reason."""
    return [cut(line) for line in map(plain_line, lines) if line.strip()][-LAST_LINES_MAX:]


def cut(text: str) -> str:
    """At most ``TEXT_CHARS_MAX`` characters of it."""
    return text if len(text) <= TEXT_CHARS_MAX else text[:TEXT_CHARS_MAX] + "…"


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Seconds."""

    backoff_s_first: float = 0.5
    backoff_s_max: float = 30.0
    settled_s: float = 300.0
    """After so long without a death the next pause is the first one again."""


@dataclass(frozen=True)
class Restart:
    """Start it again after a pause."""

    pause_s: float
    attempt: int
    """1 after a first death."""


@dataclass
class RestartHistory:
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    deaths: int = 0
    died_at: float = -math.inf

    def died(self, now: float) -> Restart:
        self.deaths = 1 if now - self.died_at >= self.policy.settled_s else self.deaths + 1
        self.died_at = now
        pause_s = self.policy.backoff_s_first * 2.0 ** min(self.deaths - 1, DOUBLINGS_MAX)
        return Restart(pause_s=min(pause_s, self.policy.backoff_s_max), attempt=self.deaths)
