"""The lock of what installs into this checkout, or compiles in it: two at once would write the same files."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = Path(__file__).resolve().parent.parent / ".baton" / "setup.lock"
WAIT_S_MAX = 3600.0
"""An engine's packages take half an hour on a slow network."""
RETRY_S = 0.2


class Busy(Exception):
    """Another process has had the checkout for too long; the message says which."""


@contextmanager
def alone(wait_s_max: float = WAIT_S_MAX) -> Iterator[None]:
    """Nothing else installs or compiles in this checkout until the block ends. The lock ends with the process, too.
    Raises Busy.
    """
    LOCK.parent.mkdir(exist_ok=True)
    with LOCK.open("a+", encoding="utf-8") as lock:
        deadline, is_waiting = time.monotonic() + wait_s_max, False
        while not _is_taken(lock.fileno()):
            holder = LOCK.read_text(encoding="utf-8").strip() or "another process"
            if time.monotonic() > deadline:
                raise Busy(f"{holder} has installed or compiled in this checkout for over {wait_s_max:g} s: end it")
            if not is_waiting:
                print(f"setup: waiting for {holder}, which installs or compiles in this checkout", flush=True)
                is_waiting = True
            time.sleep(RETRY_S)
        lock.truncate(0)
        lock.write(f"{_command(os.getppid())} (pid {os.getpid()})")
        lock.flush()
        yield


def _is_taken(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _command(pid: int) -> str:
    """As it was typed."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").replace("\0", " ").strip()
    except (OSError, UnicodeDecodeError):
        return "a process"
