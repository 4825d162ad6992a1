"""`baton doctor`: examines installation, machine and running system in parallel."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.launcher.doctor import bus as doctor_bus
from services.launcher.doctor import machine as doctor_machine
from services.launcher.doctor.findings import Examination, Finding, InstallationFacts, SystemFacts, examination
from services.launcher.doctor.installation import about_installation, about_machine
from services.launcher.doctor.services import about_access, about_bus, about_services
from services.launcher.doctor.workers import about_cores, about_workers
from shared.runtime.settings import CommonSettings


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What to examine."""

    common: CommonSettings
    nats_url: str
    is_expected: bool
    """A state file, an option or a variable says that a system runs there."""
    launcher_pid: int = 0
    """Process id of `baton up` on this machine; 0 if it does not run."""
    load_engine: bool = True
    joined: Sequence[str] = ()
    """Names under which this machine has joined systems of other hosts."""


async def examine(scope: Scope) -> Examination:
    """All findings."""
    async with asyncio.TaskGroup() as probes:
        here = probes.create_task(
            doctor_machine.probe(
                scope.common, scope.nats_url, load_engine=scope.load_engine, is_running=scope.launcher_pid > 0
            ),
            name="probe-machine",
        )
        heard = probes.create_task(
            doctor_bus.listen(scope.nats_url, is_expected=scope.is_expected, launcher_pid=scope.launcher_pid),
            name="listen",
        )
    system = heard.result()
    return examination(findings(here.result(), system), is_running=system.is_running, joined=scope.joined)


def findings(here: InstallationFacts, system: SystemFacts) -> Iterator[Finding]:
    yield from about_installation(here, is_running=system.is_running)
    yield from about_machine(here)
    yield from about_bus(system)
    yield from about_services(system)
    yield from about_workers(system)
    yield from about_cores(here, system)
    yield from about_access(system)
