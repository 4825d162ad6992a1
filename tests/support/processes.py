"""Service processes for tests: started with settings, told to stop or killed, never left behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
STOP_S_MAX = 60.0
FREEZE_S_MAX = 60.0
RUN_S = 0.005
"""How long a slowed process runs before it is stopped."""
SAMPLES_MAX = 5


class ServiceProcess:
    """One ``python -m services.<name>``. ``log`` is a file with what it said."""

    def __init__(self, name: str, log: Path, settings: dict[str, str], files_max: int = 0) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"services.{name}"],
                cwd=ROOT,
                env={**os.environ, **settings},
                stdout=out,
                stderr=out,
            )
        if files_max:
            resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (files_max, files_max))

    def stop(self) -> int:
        """SIGTERM, then the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S_MAX)

    def kill(self) -> None:
        """SIGKILL; harmless when it is over."""
        self.process.kill()
        self.process.wait(STOP_S_MAX)


def freeze(pid: int) -> None:
    """Stop the process; returns when all of its threads are stopped. On a busy machine this takes some milliseconds,
    because the stop begins when the thread that gets the signal runs: the others may serve a read meanwhile.
    """
    os.kill(pid, signal.SIGSTOP)
    ends = time.monotonic() + FREEZE_S_MAX
    while any(state != "T" for state in _thread_states(pid)):
        assert time.monotonic() < ends, f"{pid} does not stop"
        time.sleep(0.001)


@contextmanager
def slowed(pid: int, share: float) -> Iterator[None]:
    """Lets the process run for ``share`` of the time until the block ends, as if it ran on a slower processor."""
    over = threading.Event()
    stopped_s = RUN_S * (1 / share - 1)

    def stop_and_go() -> None:
        while stopped_s and not over.wait(RUN_S):
            os.kill(pid, signal.SIGSTOP)
            over.wait(stopped_s)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stop_and_go, name=f"slows {pid}")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _thread_states(pid: int) -> Iterator[str]:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # It has ended.
            yield (thread / "stat").read_text().rpartition(") ")[2][0]


@contextmanager
def service_process(name: str, directory: Path, *, files_max: int = 0, **settings: str) -> Iterator[ServiceProcess]:
    """A service until the block ends; ``settings`` are environment variables. What it said is shown if the block fails."""
    one = ServiceProcess(name, directory / f"{name}-{os.urandom(3).hex()}.log", settings, files_max)
    try:
        yield one
    except BaseException:
        print(one.log.read_text()[-4000:])
        raise
    finally:
        one.kill()


def quietest_cpu(groups: Sequence[Sequence[psutil.Process]], *, enough: float, sample_s: float = 2.0) -> float:
    """The CPU, in cores, of the group that used most, the smallest of a few samples: other load disturbs some
    samples, and polling shows in each. Ends at the first sample below ``enough``.
    """
    least = inf
    for _ in range(SAMPLES_MAX):
        before = [sum(map(_cpu_s, group)) for group in groups]
        time.sleep(sample_s)  # what is measured is this time
        used = [sum(map(_cpu_s, group)) - begun for group, begun in zip(groups, before, strict=True)]
        least = min(least, max(used) / sample_s)
        if least < enough:
            break
    return least


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
