"""`baton service upgrade`: ends processes of a launcher one after another, each when the one before is ready again.

The launcher starts each process again, from the version of Baton that is installed then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from services.launcher.bus_client import first_status
from services.launcher.system.machine import service_processes
from services.launcher.system.process_plan import MODULES
from shared.bus.nats_credentials import Access
from shared.bus.port import Bus
from shared.contracts.channels import Party
from shared.contracts.control import ServicePhase

READY_S_MAX = 3600.0
"""Longest wait for a worker, which may have to download a model."""
RESTART_S_MAX = 900.0
"""Longest wait for a process to drain and to end."""


class RestartStopped(Exception):
    """A process did not come back, and those after it were not restarted; the message names it."""


@dataclass(frozen=True, kw_only=True)
class RunningProcess:
    """A process that a launcher of this machine keeps."""

    name: str
    """The name in `baton up`: for a worker, its worker id."""
    service: Party
    instance: str
    """The name in its status; empty if the process makes one itself, because it is the only one of its service."""
    nats_url: str
    access: Access
    process: psutil.Process

    def end(self) -> None:
        """Let it drain, and wait for its end. Raises RestartStopped."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.terminate()
        try:
            self.process.wait(RESTART_S_MAX)
        except psutil.TimeoutExpired:
            raise RestartStopped(f"{self.name} has not ended after {RESTART_S_MAX:.0f} s") from None


def running_processes(state_dir: str) -> list[RunningProcess]:
    """The processes of the `baton up` or `baton join` with this state directory, by service and name."""
    found: dict[str, RunningProcess] = {}
    for process, service, env in service_processes():
        if env.get("BATON_STATE_DIR") == state_dir:
            each = _running_process(process, service, env)
            found.setdefault(each.name, each)  # What a process has forked looks like it, and is younger.
    order = list(MODULES)
    return sorted(found.values(), key=lambda each: (order.index(each.service), each.name))


def _running_process(process: psutil.Process, service: Party, env: dict[str, str]) -> RunningProcess:
    instance = env.get("WORKER_WORKER_ID" if service is Party.WORKER else f"{service.value.upper()}_INSTANCE", "")
    return RunningProcess(
        name=instance or service.value,
        service=service,
        instance=instance,
        nats_url=env["BATON_NATS_URL"],
        access=Access(
            party=service, nkey_file=env.get("BATON_NATS_NKEY_FILE", ""), ca_file=env.get("BATON_NATS_CA_FILE", "")
        ),
        process=process,
    )


async def restart_in_turn(
    bus: Bus, processes: Sequence[RunningProcess], show: Callable[[str], None], ready_s_max: float = READY_S_MAX
) -> None:
    """End each and wait until the launcher's next one is ready. Raises RestartStopped, BusError."""
    for number, each in enumerate(processes, 1):
        show(f"Restarting {each.name} ({number} of {len(processes)}): it drains first.")
        await asyncio.to_thread(each.end)
        await _until_ready(bus, each, ready_s_max)
        show(f"{each.name} is ready.")


async def _until_ready(bus: Bus, ended: RunningProcess, ready_s_max: float) -> None:
    """Statuses are repeated every two seconds, and the old process publishes none any more."""
    settled = {ServicePhase.READY, ServicePhase.FAILED}
    service, instance = ended.service.value, ended.instance
    status = await first_status(bus, service, instance, ready_s_max, lambda status: status.phase in settled)
    if status is None:
        raise RestartStopped(f"{ended.name} is not ready after {ready_s_max:.0f} s")
    if status.phase is ServicePhase.FAILED:
        raise RestartStopped(f"{ended.name} failed: {status.detail}")
