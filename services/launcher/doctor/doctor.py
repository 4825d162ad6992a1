"""`baton doctor`: looks at installation, machine and running system, side by side, and says what it found."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from services.launcher.doctor import bus as doctor_bus
from services.launcher.doctor import machine as doctor_machine
from services.launcher.doctor.facts import InstallationFacts, SystemFacts
from services.launcher.doctor.findings import Examination, Finding, examination
from services.launcher.doctor.installation import about_installation, about_machine
from services.launcher.doctor.services import about_access, about_bus, about_services
from services.launcher.doctor.workers import about_workers
from shared.runtime.settings import CommonSettings


@dataclass(frozen=True, kw_only=True)
class Patient:
    """What is to be looked at."""

    common: CommonSettings
    nats_url: str
    is_expected: bool
    """Somebody says that a system runs there."""
    launcher_pid: int = 0
    """Of the `baton up` of this machine."""
    load_engine: bool = True


async def examine(patient: Patient) -> Examination:
    """Everything that there is to find."""
    async with asyncio.TaskGroup() as looking:
        here = looking.create_task(
            doctor_machine.look(
                patient.common,
                patient.nats_url,
                load_engine=patient.load_engine,
                is_running=patient.launcher_pid > 0,
            ),
            name="look-at-machine",
        )
        heard = looking.create_task(
            doctor_bus.listen(patient.nats_url, is_expected=patient.is_expected, launcher_pid=patient.launcher_pid),
            name="listen",
        )
    system = heard.result()
    return examination(findings(here.result(), system), is_running=system.is_running)


def findings(here: InstallationFacts, system: SystemFacts) -> Iterator[Finding]:
    """Of everything."""
    yield from about_installation(here, is_running=system.is_running)
    yield from about_machine(here)
    yield from about_bus(system)
    yield from about_services(system)
    yield from about_workers(system)
    yield from about_access(system)
