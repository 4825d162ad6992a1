"""Restarts the workers of a host one after another, each when the one before serves again."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Callable, Mapping, Sequence

import psutil

from services.launcher.bus_client import first_status
from services.launcher.service_files.systemd import worker_unit
from services.launcher.system.machine import WORKER_MODULE
from shared.bus.port import Bus
from shared.contracts.control import ServicePhase

READY_S_MAX = 3600.0
"""For a worker, which may have to download a model."""
RESTART_S_MAX = 900.0
"""For a worker to drain and to end."""


class UpgradeStopped(Exception):
    """A worker did not come back, and the ones after it were left as they are; the message names it."""


class Systemctl:
    """systemd's command line, for the system's or the user's service manager."""

    def __init__(self, *, user: bool, program: str = "systemctl") -> None:
        self._program = [program, *(["--user"] if user else [])]

    def restart(self, worker_id: str) -> None:
        """Systemd waits for the end of the old process. Raises UpgradeStopped."""
        command = [*self._program, "restart", worker_unit(worker_id)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=RESTART_S_MAX, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UpgradeStopped(f"{' '.join(command)}: {error}") from error
        if done.returncode:
            raise UpgradeStopped(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


class RunningWorkers:
    """Workers of the `baton up` or `baton join` of a state directory, which starts each again when it has ended."""

    def __init__(self, state_dir: str) -> None:
        self._state_dir = state_dir

    def variables(self) -> list[Mapping[str, str]]:
        """Of each worker that runs here."""
        return [variables for _, variables in self._found()]

    def restart(self, worker_id: str) -> None:
        """It drains and ends. Raises UpgradeStopped."""
        for process, variables in self._found():
            if variables["WORKER_WORKER_ID"] == worker_id:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.terminate()
                _wait(process, worker_id)

    def _found(self) -> list[tuple[psutil.Process, Mapping[str, str]]]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                variables = process.environ() if WORKER_MODULE in process.cmdline() else {}
                if "WORKER_WORKER_ID" in variables and variables.get("BATON_STATE_DIR") == self._state_dir:
                    found.append((process, variables))
        return sorted(found, key=lambda each: each[1]["WORKER_WORKER_ID"])


def _wait(process: psutil.Process, worker_id: str) -> None:
    try:
        process.wait(RESTART_S_MAX)
    except psutil.TimeoutExpired:
        raise UpgradeStopped(f"{worker_id} has not ended after {RESTART_S_MAX:.0f} s") from None


async def restart_workers(
    bus: Bus,
    workers: Sequence[str],
    restart: Callable[[str], None],
    show: Callable[[str], None],
    ready_s_max: float = READY_S_MAX,
) -> None:
    """``restart`` gets a worker's id, on a thread, and returns when the old process has ended. Raises UpgradeStopped,
    BusError.
    """
    for number, worker_id in enumerate(workers, 1):
        show(f"Restarting {worker_id} ({number} of {len(workers)}): it drains first.")
        await asyncio.to_thread(restart, worker_id)
        await _until_ready(bus, worker_id, ready_s_max)
        show(f"{worker_id} is ready.")


async def _until_ready(bus: Bus, worker_id: str, ready_s_max: float) -> None:
    """Of the new process: the old one has ended, and statuses are repeated every two seconds."""
    ended = {ServicePhase.READY, ServicePhase.FAILED}
    status = await first_status(bus, "worker", worker_id, ready_s_max, lambda status: status.phase in ended)
    if status is None:
        raise UpgradeStopped(f"{worker_id} is not ready after {ready_s_max:.0f} s")
    if status.phase is ServicePhase.FAILED:
        raise UpgradeStopped(f"{worker_id} failed: {status.detail}")
