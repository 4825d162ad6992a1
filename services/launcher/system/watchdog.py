"""Finds processes of `baton up` whose event loop stands still: they are stopped (SIGSTOP), in an endless loop, or in a
call that does not return. Their sockets still take connections, which nobody serves.

Each service sends heartbeats (``shared/runtime/heartbeat.py``) while it is ready or drains. What it does before, such
as loading a model, may hold its loop for as long as it takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Self

import psutil

from services.launcher.system.process_plan import Stage
from shared.runtime.heartbeat import ADDRESS, BEAT, LIMIT_US, PAUSE

STILL_S_MAX = MappingProxyType({Stage.SERVICES: 10.0, Stage.WORKERS: 60.0})
"""Silence after which a process is killed. Routers place requests on other workers long before, and a worker that is
killed without need loads its model again. NATS is not watched.
"""
STEP_S = 1.0
MESSAGE_BYTES_MAX = 1024
CREDENTIALS = struct.Struct("3i")
"""The kernel's word on who has sent a message: process, user, group."""


@dataclass
class Silence:
    limit_s: float
    lasts_s: float | None = None
    """None: it is not watched, since its first heartbeat has not come, or it has asked for a pause."""


class Silences:
    """How long each process has said nothing, counted in steps of the launcher. A step that comes late counts as one: a
    machine that was suspended, or that had no CPU left for the launcher either, ends nobody.
    """

    def __init__(self) -> None:
        self._of: dict[int, Silence] = {}

    def watch(self, pid: int, limit_s: float) -> None:
        self._of[pid] = Silence(limit_s)

    def forget(self, pid: int) -> None:
        self._of.pop(pid, None)

    def heard(self, pid: int, message: bytes) -> None:
        if silence := self._of.get(pid):
            lines = message.splitlines()
            if BEAT in lines:
                silence.lasts_s = 0.0
            elif PAUSE in lines:
                silence.lasts_s = None

    def step(self) -> dict[int, float]:
        """``STEP_S`` have passed for the launcher. Returns the processes that are silent for longer than their limit
        now, with that, once.
        """
        too_long = {}
        for pid, silence in self._of.items():
            if silence.lasts_s is not None:
                silence.lasts_s += STEP_S
                if silence.lasts_s > silence.limit_s:
                    too_long[pid] = silence.limit_s
                    silence.lasts_s = None
        return too_long


class Watchdog:
    """The socket to which processes send their heartbeats, as a context of the running loop."""

    def __init__(self, still_s_max: Mapping[Stage, float] = STILL_S_MAX) -> None:
        self._still_s_max = still_s_max
        self._silences = Silences()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("")  # The kernel chooses a name in its abstract namespace.

    def __enter__(self) -> Self:
        asyncio.get_running_loop().add_reader(self._socket, self._read)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def variables(self, stage: Stage) -> dict[str, str]:
        """The variables that ask a process for heartbeats."""
        if stage not in self._still_s_max:
            return {}
        name = self._socket.getsockname()[1:].decode()
        return {ADDRESS: f"@{name}", LIMIT_US: f"{self._still_s_max[stage] * 1e6:.0f}"}

    def watch(self, pid: int, stage: Stage) -> None:
        if stage in self._still_s_max:
            self._silences.watch(pid, self._still_s_max[stage])

    def forget(self, pid: int) -> None:
        self._silences.forget(pid)

    def step(self) -> dict[int, str]:
        """Call it each ``STEP_S``. Returns the processes whose loop has stood still for too long, and what to say."""
        return {pid: why_still(pid, limit_s) for pid, limit_s in self._silences.step().items()}

    def _read(self) -> None:
        while True:
            try:
                message, control, _flags, _sender = self._socket.recvmsg(
                    MESSAGE_BYTES_MAX, socket.CMSG_SPACE(CREDENTIALS.size)
                )
            except OSError:
                return
            for level, kind, data in control:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    self._silences.heard(CREDENTIALS.unpack(data)[0], message)


def why_still(pid: int, limit_s: float) -> str:
    """Why a process that was silent for too long is killed. Asks the kernel before it is."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if psutil.Process(pid).status() in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}:
            return f"It was stopped (SIGSTOP, or a debugger) for {limit_s:g} s, so it was killed."
    return f"Its event loop stood still for {limit_s:g} s, so it was killed. Its log says where each thread was."
