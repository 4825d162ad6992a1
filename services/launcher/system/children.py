"""Child processes: each has its own process group and log file, and none outlives the launcher."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from services.launcher.system import guard
from services.launcher.system.process_plan import ProcessPlan
from services.launcher.system.waiting import first_of

KILL_S_MAX = 10.0
"""A process ends within this time after SIGKILL, unless it hangs in the kernel."""


@dataclass
class Child:
    """A running process and its group."""

    plan: ProcessPlan
    process: asyncio.subprocess.Process
    log: Path
    started_at: float

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

    def kill_group(self) -> None:
        """Kill the processes that it has started and left behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class ChildStarter:
    """Starts children and reports them to the guard, which ends them if this process is killed."""

    def __init__(self, logs: Path, environment: Mapping[str, str], guard_pipe: BinaryIO) -> None:
        self.logs = logs
        self._environment = environment
        self._guard_pipe = guard_pipe

    def log_of(self, name: str) -> Path:
        """The log file of that process."""
        return self.logs / f"{name}.log"

    async def start(self, plan: ProcessPlan, now: float) -> Child:
        """Start one process. Its output is appended to ``<logs>/<name>.log``."""
        log = self.log_of(plan.name)
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *plan.command,
                env={**self._environment, "PYTHONUNBUFFERED": "1", **plan.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._guard_pipe.write(f"+{process.pid}\n".encode())
        return Child(plan, process, log, started_at=now)

    def forget(self, child: Child) -> None:
        """The child has ended: kill the rest of its group."""
        child.kill_group()
        with contextlib.suppress(BrokenPipeError):
            self._guard_pipe.write(f"-{child.pid}\n".encode())


@contextlib.contextmanager
def open_child_starter(logs: Path, environment: Mapping[str, str]) -> Iterator[ChildStarter]:
    """A starter with its guard process."""
    logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-I", "-S", guard.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, bufsize=0) as watcher:
        assert watcher.stdin is not None
        yield ChildStarter(logs, environment, watcher.stdin)  # type: ignore[arg-type]  # unbuffered: a raw FileIO
