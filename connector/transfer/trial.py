"""``python -m connector.transfer.trial PACKAGE BACKEND`` loads peers' NIXL metadata in processes that may die.

It also reads with it. NIXL and UCX believe what they parse. A memory type that does not exist, for example, is the
index of an array: the process that loads such metadata gets a segmentation fault. With a wrong key of a piece of
memory, UCX may end the process at a read or after it. The worker that sends it may have a valid key, so a signature
would not help.

The process imports NIXL, and starts an agent once so that UCX is loaded, which takes most of the time. Then it forks a
child for each ``Trial`` on its standard input, several at a time, and says on its standard output how each ended. It
ends with its input. Messages are msgpack, after their length in ``LENGTH_BYTES``. ``PACKAGE`` is what ``nixl`` stands
for: on a machine without CUDA the choice that nixl makes takes seconds, because it imports torch. ``BACKEND`` is NIXL's
plug-in that moves the bytes.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import selectors
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from io import FileIO
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import msgspec
import numpy as np

from connector.transfer.agent import Region, Spans, TransferFailed, TransferState, failing
from connector.transfer.transports import read_transport, tell_transports

LENGTH_BYTES = 4
TRIAL_S_MAX = 45
"""Time limit for a child, which a busy machine may make slow. A trial takes some 50 ms of CPU time."""
LOAD_S_MAX = 30
"""Time limit for loading and reading, which take milliseconds."""
READ_S_MAX = 5.0
"""Time limit for the read of one rank, as for the first read of an engine."""
LOAD_CPU_S_MAX = 2
"""Bound on its CPU time, which is that of twenty-five ranks, in whole seconds and up to one more."""
FREED_CONTENTS = (0x5A, 0xFF)
"""Bytes in unused memory, each in a try of its own. UCX reads past the end of some forged addresses: what is there
decides whether it refuses them, fails later or ends the process, and an engine has other contents there.
"""
M_PERTURB = -6
"""A parameter of glibc's ``mallopt``."""
LOAD_BYTES_MAX = 1 << 30
"""Memory that loading may take."""
TEXT_CHARS_MAX = 300
TEXT_BYTES_MAX = 4 * TEXT_CHARS_MAX


class TrialRank(msgspec.Struct, frozen=True, array_like=True):
    """One rank of a peer."""

    metadata: bytes
    pieces: list[tuple[int, int, int]]
    """The rows of ``Spans`` to read, in CPU memory."""


class Trial(msgspec.Struct, frozen=True, array_like=True):
    number: int
    ranks: list[TrialRank]


class TrialEnded(msgspec.Struct, frozen=True, array_like=True):
    number: int
    status: int
    """An ``Ended``, or another exit status; the negative number of a signal that ended the child."""
    text: str
    """Why it was refused; of one that passed, what moved the bytes (``transport.read_transport``)."""


class Ended(IntEnum):
    """Exit status of a child that does not die."""

    PASSED = 0
    NOT_BEGUN = 3
    """The machine's fault: there is no agent to try with."""
    REFUSED = 4
    TOO_LARGE = 5


def main() -> None:
    """Serve until standard input ends. Libraries write where nobody reads."""
    asks, out = open(0, "rb", buffering=0), os.fdopen(os.dup(1), "wb")  # noqa: SIM115
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    Server(asks, out, *sys.argv[1:]).run()


@dataclass(slots=True)
class Child:
    number: int
    pid: int
    text: int
    """The end of a pipe that has what the child says."""


class Server:
    def __init__(self, asks: FileIO, out: BinaryIO, package: str, backend: str) -> None:
        self._asks = asks
        self._backend = backend
        self._out = out
        self._children: dict[int, Child] = {}
        """Children by the descriptor that is readable when they have ended."""
        self._nixl = import_nixl(package)
        with suppress(Exception):  # A child says what fails.
            self._nixl.make_agent("warm", progress=False, backend=backend)

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._asks, selectors.EVENT_READ)
            while True:
                for key, _events in selector.select():
                    if key.fileobj is not self._asks:
                        selector.unregister(key.fileobj)
                        self._reap(key.fd)
                    elif (trial := self._next()) is None:
                        return
                    else:
                        selector.register(self._fork(trial), selectors.EVENT_READ)

    def _next(self) -> Trial | None:
        """None: there will be no more."""
        length = self._read(LENGTH_BYTES)
        packed = self._read(int.from_bytes(length)) if length else b""
        return msgspec.msgpack.decode(packed, type=Trial) if packed else None

    def _read(self, count: int) -> bytes:
        """Empty at the end of the input. Not buffered: what waits must be seen by ``select``."""
        data = b""
        while len(data) < count:
            more = self._asks.read(count - len(data))
            if not more:
                return b""
            data += more
        return data

    def _fork(self, trial: Trial) -> int:
        text, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            for end in (self._asks.fileno(), self._out.fileno(), text):
                os.close(end)
            run_trial(self._nixl, self._backend, trial, write)
        os.close(write)
        descriptor = os.pidfd_open(pid)
        self._children[descriptor] = Child(trial.number, pid, text)
        return descriptor

    def _reap(self, descriptor: int) -> None:
        child = self._children.pop(descriptor)
        ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        # Where all processes share one core, Linux 6.18 may spin for 30 s and longer when it reaps a child, in
        # d_invalidate of the child's directory in /proc. So the status is read without that, and a thread reaps.
        threading.Thread(target=os.waitpid, args=(child.pid, 0), name="reap", daemon=True).start()
        said = os.read(child.text, TEXT_BYTES_MAX).decode(errors="replace")
        os.close(descriptor)
        os.close(child.text)
        packed = msgspec.msgpack.encode(TrialEnded(child.number, status, said))
        self._out.write(len(packed).to_bytes(LENGTH_BYTES) + packed)
        self._out.flush()


def import_nixl(package: str) -> ModuleType:
    sys.modules["nixl"] = importlib.import_module(package)
    return importlib.import_module("connector.transfer.nixl_agent")


def run_trial(nixl: Any, backend: str, trial: Trial, out: int) -> None:
    """The child. Ends the process."""
    end, text = Ended.NOT_BEGUN, ""
    signal.alarm(TRIAL_S_MAX)
    try:
        told = tell_transports()
        first = nixl.make_agent(f"trial-{os.getpid()}", progress=False, backend=backend)
        bound_loading()
        end = Ended.REFUSED
        for number, (content, rank) in enumerate(product(FREED_CONTENTS, trial.ranks)):
            fill_freed_memory(content)
            name = f"trial-{os.getpid()}-{number}"
            agent = nixl.make_agent(name, progress=False, backend=backend) if number else first
            load_and_read(nixl, backend, agent, rank)
        end, text = Ended.PASSED, read_transport(told())
    except BaseException as error:
        is_memory = isinstance(error.__cause__, MemoryError) or isinstance(error, MemoryError)
        end, text = Ended.TOO_LARGE if is_memory and end is Ended.REFUSED else end, str(error)
    with suppress(OSError):
        os.write(out, text[:TEXT_CHARS_MAX].encode(errors="replace"))
    os._exit(end)


def fill_freed_memory(content: int) -> None:
    """From now on the C library writes this byte over memory that is freed, and its complement over memory that is
    allocated.
    """
    ctypes.CDLL(None).mallopt(M_PERTURB, content)


def load_and_read(nixl: Any, backend: str, agent: Any, rank: TrialRank) -> None:
    """As an engine does. Raises TransferFailed if NIXL refuses the metadata, has no memory there of that kind, or
    brings no bytes: a read that fails may end an engine, which would not keep the connection anyway.
    """
    peer = nixl.load(agent, rank.metadata, backend)
    if not rank.pieces:
        return
    scratch = np.zeros(max(length for _, length, _ in rank.pieces), dtype=np.uint8)
    region = Region(scratch.ctypes.data, len(scratch), "cpu", 0)
    reading = nixl.ReadAgent(agent, nixl.register(agent, [region], backend), peer, backend)
    remote: Spans = np.array(rank.pieces, np.uint64)
    local = np.array([(region.base, length, 0) for _, length, _ in rank.pieces], np.uint64)
    with failing("reading"):
        state = reading.copy(remote, local, ("DRAM", "DRAM"), READ_S_MAX)
    reading.end()
    if state is not TransferState.DONE:
        raise TransferFailed("reading: the peer's memory cannot be read")


def bound_loading() -> None:
    """Bounds on what comes on top of what the process has taken."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = int(used.ru_utime + used.ru_stime) + 1 + LOAD_CPU_S_MAX
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    taken = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    data = (int(taken.split()[1]) << 10) + LOAD_BYTES_MAX
    resource.setrlimit(resource.RLIMIT_DATA, (data, data))
    with suppress(OSError):  # Where memory is short, the kernel ends this process first.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    signal.alarm(LOAD_S_MAX)


if __name__ == "__main__":
    main()
