"""Restarts the workers of a host one after another, each when the one before serves again."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Sequence

from services.launcher.service_units.systemd import WORKER_TEMPLATE
from shared.bus.port import Bus, Envelope
from shared.contracts.channels import SERVICE_STATUS
from shared.contracts.control import ServicePhase, ServiceStatus

READY_S_MAX = 3600.0
"""For a worker, which may have to download a model."""
RESTART_S_MAX = 900.0
"""For systemd to stop a worker, which drains, and to start it."""


class UpgradeStopped(Exception):
    """A worker did not come back, and the ones after it were left as they are; the message names it."""


class Systemctl:
    """systemd's command line, for the system's or the user's service manager."""

    def __init__(self, *, user: bool, program: str = "systemctl") -> None:
        self._program = [program, *(["--user"] if user else [])]

    def run(self, *arguments: str) -> str:
        """Its output. Raises UpgradeStopped."""
        try:
            done = subprocess.run(
                [*self._program, *arguments], capture_output=True, text=True, timeout=RESTART_S_MAX, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UpgradeStopped(f"{' '.join(arguments)}: {error}") from error
        if done.returncode:
            raise UpgradeStopped(f"{' '.join(arguments)}: {done.stderr.strip() or done.returncode}")
        return done.stdout.strip()

    def restart(self, unit: str) -> int:
        """Returns the pid of the new process; systemd has waited for the end of the old one. Raises UpgradeStopped."""
        self.run("restart", unit)
        return int(self.run("show", "--property", "MainPID", "--value", unit) or 0)


async def restart_workers(
    bus: Bus,
    workers: Sequence[str],
    restart: Callable[[str], int],
    show: Callable[[str], None],
    ready_s_max: float = READY_S_MAX,
) -> None:
    """``restart`` gets a unit and returns its new pid, on a thread. Raises UpgradeStopped, BusError."""
    for number, worker_id in enumerate(workers, 1):
        show(f"Restarting {worker_id} ({number} of {len(workers)}): it drains first.")
        await _restart(bus, worker_id, restart, ready_s_max)
        show(f"{worker_id} is ready.")


async def _restart(bus: Bus, worker_id: str, restart: Callable[[str], int], ready_s_max: float) -> None:
    ended: dict[int, ServiceStatus] = {}
    heard = asyncio.Event()

    def on_status(status: ServiceStatus, _envelope: Envelope) -> None:
        if status.phase in {ServicePhase.READY, ServicePhase.FAILED}:
            ended[status.pid] = status
            heard.set()

    subscription = await bus.subscribe(SERVICE_STATUS, on_status, service="worker", instance=worker_id)
    try:
        pid = await asyncio.to_thread(restart, WORKER_TEMPLATE.replace("@", f"@{worker_id}"))
        earlier = ended.keys() - {pid}  # systemd may have to start it more than once, so any later process will do.
        async with asyncio.timeout(ready_s_max):
            while not ended.keys() - earlier:
                heard.clear()
                await heard.wait()
    except TimeoutError:
        raise UpgradeStopped(f"{worker_id} is not ready after {ready_s_max:.0f} s") from None
    finally:
        await subscription.close()
    if failed := [each for key, each in ended.items() if key not in earlier and each.phase is ServicePhase.FAILED]:
        raise UpgradeStopped(f"{worker_id} failed: {failed[0].detail}")
