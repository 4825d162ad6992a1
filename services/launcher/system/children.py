"""Child processes: each has its own process group and log file, and none outlives the launcher; why one died, as a
sentence, and when it is started again.

A child writes to its log file itself, opened for appending, so that a stalled launcher delays no child. A file
that has grown too large is copied and truncated; lines written between the two are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from services.launcher.system import guard
from services.launcher.system.process_plan import ProcessPlan, Stage
from services.launcher.system.watchdog import STILL_S_MAX, Watchdog
from shared.runtime.waiting import first_of

KILL_S_MAX = 10.0
"""A process ends within this time after SIGKILL, unless it hangs in the kernel."""
LAST_WORDS_S = 1.0
"""Time for a process that is killed to write to its log where each of its threads is."""
log = logging.getLogger("baton.launcher")

FILE_BYTES_MAX = 16 * 1024 * 1024
"""Size above which a file is rotated."""
FILES_MAX = 4
"""Number of files of each process: the current one and older ones, NAME.log.1 being the newest of these."""
ROTATE_S = 1.0
"""Pause between two looks at the sizes."""
TAIL_BYTES_MAX = 256 * 1024
TAIL_LINES_MAX = 400


@dataclass
class Child:
    """A running process and its group."""

    plan: ProcessPlan
    process: asyncio.subprocess.Process
    log: Path
    why_ended: str = ""
    """Why the launcher has killed it; empty if it has not."""

    @property
    def pid(self) -> int:
        return self.process.pid

    async def stop(self, *, grace_s: float, hurry: asyncio.Event) -> bool:
        """SIGTERM, then SIGKILL for the whole group after ``grace_s`` or on ``hurry``. True if it ended by itself."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        await first_of(self.process.wait(), hurry.wait(), within_s=grace_s)
        by_itself = self.process.returncode is not None
        self.kill_group()
        await asyncio.wait_for(self.process.wait(), KILL_S_MAX)
        return by_itself

    async def kill(self, why: str) -> None:
        """Kill it and what it has started. If it can, it says in its log where each of its threads is."""
        self.why_ended = why
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGQUIT)
        await first_of(self.process.wait(), asyncio.sleep(LAST_WORDS_S))
        self.kill_group()

    def kill_group(self) -> None:
        """Kill the processes that it has started and left behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class ChildStarter:
    """Starts children and reports them to the guard, which ends them if this process is killed, and to the watchdog."""

    def __init__(self, logs: Path, environment: Mapping[str, str], guard_pipe: BinaryIO, watchdog: Watchdog) -> None:
        self.logs = logs
        self.environment = environment
        self.watchdog = watchdog
        self._guard_pipe = guard_pipe

    def log_of(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    async def start(self, plan: ProcessPlan) -> Child:
        """Start one process. Its output is appended to ``<logs>/<name>.log``. Raises OSError."""
        log = self.log_of(plan.name)
        make_private(log.parent)  # A user may have removed the state directory.
        with _opened(log, os.O_APPEND) as output:
            process = await asyncio.create_subprocess_exec(
                *plan.command,
                env={**self.environment, "PYTHONUNBUFFERED": "1", **plan.env, **self.watchdog.variables(plan.stage)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._guard_pipe.write(f"+{process.pid}\n".encode())
        self.watchdog.watch(process.pid, plan.stage)
        return Child(plan, process, log)

    def forget(self, child: Child) -> None:
        """The child has ended: kill the rest of its group."""
        child.kill_group()
        self.watchdog.forget(child.pid)
        with contextlib.suppress(BrokenPipeError):
            self._guard_pipe.write(f"-{child.pid}\n".encode())


def make_private(folder: Path) -> None:
    """The folder, for its owner only: logs of engines may have words of their clients."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):  # It is another user's, who may have it so.
        folder.chmod(0o700)


def _opened(file: Path, how: int) -> BinaryIO:
    """For writing, by its owner only."""
    opened = os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | how, 0o600), "wb")
    with contextlib.suppress(PermissionError):
        os.fchmod(opened.fileno(), 0o600)
    return opened


@contextlib.contextmanager
def open_child_starter(
    logs: Path, environment: Mapping[str, str], still_s_max: Mapping[Stage, float] = STILL_S_MAX
) -> Iterator[ChildStarter]:
    """A starter with its guard process and its watchdog, for the running loop."""
    make_private(logs)
    command = [sys.executable, "-I", "-S", guard.__file__]
    with (
        Watchdog(still_s_max) as watchdog,
        subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, bufsize=0) as watcher,
    ):
        assert watcher.stdin is not None
        yield ChildStarter(logs, environment, watcher.stdin, watchdog)  # type: ignore[arg-type]  # unbuffered: a raw FileIO


def rotate(current: Path, *, bytes_max: int = FILE_BYTES_MAX) -> None:
    """Rotate the file if it is larger than ``bytes_max``. On a full disk its content is dropped. Raises OSError."""
    if not current.exists() or current.stat().st_size <= bytes_max:
        return
    try:
        for number in range(FILES_MAX - 1, 1, -1):
            with contextlib.suppress(FileNotFoundError):
                older(current, number - 1).replace(older(current, number))
        with current.open("rb") as source, _opened(older(current, 1), os.O_TRUNC) as copy:
            shutil.copyfileobj(source, copy)
    except OSError as error:
        log.warning("%s was cut without a copy: %s", current, error)
        with contextlib.suppress(OSError):
            older(current, 1).unlink()
    os.truncate(current, 0)


def older(current: Path, number: int) -> Path:
    """The rotated file; 1 is the newest."""
    return current.with_name(f"{current.name}.{number}")


def tail(current: Path) -> list[str]:
    """The last lines, at most ``TAIL_LINES_MAX`` in ``TAIL_BYTES_MAX``, also those that were just rotated."""
    end = _end_of(current, TAIL_BYTES_MAX)
    end = _end_of(older(current, 1), TAIL_BYTES_MAX - len(end)) + end
    return end.decode(errors="replace").splitlines(keepends=True)[-TAIL_LINES_MAX:]


def remove(folder: Path) -> None:
    """Delete the log files of an earlier system."""
    for pattern in ("*.log", "*.log.[0-9]"):
        for file in folder.glob(pattern):
            file.unlink()


def _end_of(file: Path, bytes_max: int) -> bytes:
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, opened.seek(0, os.SEEK_END) - bytes_max))
            return opened.read(bytes_max)
    except OSError:  # It is gone, or cannot be read.
        return b""


ANSI = re.compile(r"\x1b\[[0-9;]*m")
EXCEPTION = re.compile(
    r"(?:^|[\s\]])((?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Dead|Down|Refused|Failed|Lost|TooLarge|Killed)): (.+)"
)
"""Finds ``ValueError: text`` at any position of a log line."""
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
    """If a process lives for this long, the next pause is the first one again."""


@dataclass(frozen=True)
class Restart:
    """Start it again after a pause."""

    pause_s: float
    attempt: int
    """Number of the start; 1 after a first death."""


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
