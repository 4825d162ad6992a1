"""Loads a peer's metadata, and reads with it, in a process that may die, before NIXL does so in this one.

NIXL and UCX believe what they parse. A memory type that does not exist, for example, is the index of an array: the
process that loads such metadata gets a segmentation fault. With a wrong key of a piece of memory, UCX may end the
process at a read or after it. The worker that sends it may have a valid key, so a
signature would not help. So each metadata is tried once by a process of its own, with bounds on its time, CPU time and
memory. That takes 0.5 to 0.8 s, nearly all of it CPU time to start, on a thread that connects.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from connector.transfer.agent import DeadlyMetadata, Region, Spans, TransferFailed, failing

ROOT = Path(__file__).resolve().parents[2]
VERDICTS_MAX = 4096
"""Metadata whose trial is remembered, the newest."""
TRIAL_S_MAX = 30.0
"""Time limit for a whole trial, which a busy machine may make long."""
LOAD_S_MAX = 15
"""Time limit for loading and reading, which takes milliseconds."""
LOAD_CPU_S_MAX = 3
"""Bound on its CPU time."""
LOAD_BYTES_MAX = 1 << 30
"""Memory that loading may take."""
NICENESS = 5
TEXT_CHARS_MAX = 300
NOT_ITS_FAULT = {signal.SIGALRM, signal.SIGKILL, signal.SIGTERM}
"""Signals that say nothing about the metadata: the machine was busy, or without memory, or somebody sent them."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    metadata: bytes
    pieces: list[tuple[int, int, int]]
    """The rows of ``Spans``."""


_encode = msgspec.msgpack.Encoder().encode


class Ended(IntEnum):
    """How a trial ends that does not die."""

    LOADED = 0
    NOT_BEGUN = 3
    REFUSED = 4
    TOO_LARGE = 5


def trial_command(package: str) -> list[str]:
    """Command of a trial's process. ``package`` is that of nixl, whose own choice of a package imports torch."""
    return [sys.executable, "-m", __name__, package]


class Trials:
    """Tries each metadata once. Thread-safe."""

    def __init__(self, command: Sequence[str]) -> None:
        """``command`` gets a packed ``Trial`` on its standard input, and ends as ``Ended`` or by a signal."""
        self._command = command
        self._lock = threading.Lock()
        self._verdicts: dict[bytes, TransferFailed | None] = {}
        """Results by the digest of the metadata; None: it may be loaded."""

    def check(self, metadata: bytes, pieces: Spans | None, *, believe_refusals: bool) -> None:
        """Raises DeadlyMetadata if using the metadata ends a process, or takes too much of the machine, and
        TransferFailed if it could not be tried, or, with ``believe_refusals``, if NIXL refused to load it.

        ``pieces`` of the peer's CPU memory are read; None: nothing is read. A process with GPU memory knows transports
        that a trial, which has none, does not.
        """
        trial = _encode(Trial(metadata=metadata, pieces=[] if pieces is None else pieces.tolist()))
        digest = sha256(trial).digest()
        with self._lock:
            is_known, verdict = digest in self._verdicts, self._verdicts.get(digest)
        if not is_known:
            verdict = self._try(trial)
            with self._lock:
                self._verdicts[digest] = verdict
                if len(self._verdicts) > VERDICTS_MAX:
                    del self._verdicts[next(iter(self._verdicts))]
        if isinstance(verdict, DeadlyMetadata) or (verdict is not None and believe_refusals):
            raise type(verdict)(str(verdict))

    def _try(self, trial: bytes) -> TransferFailed | None:
        """The result of a trial. Raises TransferFailed if it says nothing about the metadata."""
        environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        with failing("trying the peer's metadata"):
            done = subprocess.run(
                self._command, input=trial, capture_output=True, timeout=TRIAL_S_MAX, cwd=ROOT, env=environ, check=False
            )
        text = done.stdout[:TEXT_CHARS_MAX].decode(errors="replace")
        if done.returncode == Ended.LOADED:
            return None
        if done.returncode == Ended.REFUSED:
            return TransferFailed(text)
        if done.returncode == Ended.TOO_LARGE:
            return DeadlyMetadata("the peer's metadata takes too much memory")
        if done.returncode == Ended.NOT_BEGUN or -done.returncode in NOT_ITS_FAULT:
            raise TransferFailed(f"the peer's metadata was not tried (exit status {done.returncode}): {text}")
        return DeadlyMetadata(f"the peer's metadata ends a process (exit status {done.returncode})")


def main() -> None:
    """The process of a trial. Libraries write where nobody reads."""
    out = os.dup(1)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    signal.alarm(int(TRIAL_S_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    trial = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Trial)
    end, text = Ended.NOT_BEGUN, ""
    try:
        sys.modules["nixl"] = importlib.import_module(sys.argv[1])
        nixl_agent = importlib.import_module("connector.transfer.nixl_agent")
        agent = nixl_agent.make_agent(f"trial-{os.getpid()}", progress=False)
        _bound_loading()
        end = Ended.REFUSED
        peer = nixl_agent.load(agent, trial.metadata)
        end = Ended.LOADED
        if trial.pieces:
            _read(nixl_agent, agent, peer, trial.pieces)
        del agent
    except BaseException as error:
        is_memory = isinstance(error.__cause__, MemoryError) or isinstance(error, MemoryError)
        end, text = Ended.TOO_LARGE if is_memory and end is not Ended.NOT_BEGUN else end, str(error)
    with suppress(OSError):
        os.write(out, text.encode()[:TEXT_CHARS_MAX])
    os._exit(end)


def _read(nixl_agent: Any, agent: Any, peer: str, pieces: list[tuple[int, int, int]]) -> None:
    """Read the pieces as an engine does. Whether they can be read does not matter: the peer may have ended."""
    scratch = np.zeros(max(length for _, length, _ in pieces), dtype=np.uint8)
    region = Region(scratch.ctypes.data, len(scratch), "cpu", 0)
    reading = nixl_agent.ReadAgent(agent, nixl_agent.register(agent, [region]), peer)
    local = [(region.base, length, 0) for _, length, _ in pieces]
    with suppress(Exception):
        reading.copy(np.array(pieces, np.uint64), np.array(local, np.uint64), ("DRAM", "DRAM"))
    reading.end()


def _bound_loading() -> None:
    """Bounds on what comes on top of what the process has taken."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = int(used.ru_utime + used.ru_stime) + 1 + LOAD_CPU_S_MAX
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    taken = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    data = (int(taken.split()[1]) << 10) + LOAD_BYTES_MAX
    resource.setrlimit(resource.RLIMIT_DATA, (data, data))
    signal.alarm(LOAD_S_MAX)


if __name__ == "__main__":
    main()
