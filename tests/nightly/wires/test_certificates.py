"""NATS's certificate is renewed under load, or has expired when processes reconnect."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

from services.launcher.cluster.certificates import SERVER_DAYS, facts_of
from services.launcher.cluster.files import create
from services.launcher.cluster.folder import FOLDER, NKEY, SERVER, TRUSTED, InitRequest, folder_of
from shared.bus.nats_bus import connect_nats
from shared.bus.nats_credentials import Access
from shared.bus.port import BusDown
from shared.contracts.channels import Party
from shared.contracts.failures import Reason
from tests.e2e.conftest import START_S_MAX
from tests.nightly.wires.steady_load import OUTAGE_S, impatient, steady_load
from tests.support.system import System, baton, until

pytestmark = [pytest.mark.nats, pytest.mark.timeout(600)]

ARGUMENTS = ("--engine", "simulated", "--prefill", "1", "--decode", "1")
PROCESSES = {"router", "orchestrator", "collector", "prefill-1", "decode-1"}
EXPIRED = "its certificate has expired"
ALLOWED = (Reason.BUS_DOWN, Reason.NO_WORKER)
RENEWALS = 3


def nats_server(system: System) -> psutil.Process:
    def found() -> list[psutil.Process]:
        return [process for process in system.processes() if process.name() == "nats-server"]

    [server] = until(found, "nats-server runs")
    return server


def connected_until(system: System) -> float:
    """Connects as a router does: the end of the certificate that nats-server shows. Raises BusDown."""
    own = system.folder / FOLDER / folder_of(Party.ROUTER)
    access = Access(nkey_file=str(own / NKEY), ca_file=str(own / TRUSTED))

    async def connect() -> float:
        bus = await connect_nats(system.nats_url, name="router", access=access)
        await bus.close()
        return bus.counts.certificate_ends_at

    return asyncio.run(connect())


def expiry_is_shown(system: System) -> bool:
    try:
        connected_until(system)
    except BusDown as error:
        return EXPIRED in str(error)
    return False


def renew(system: System) -> None:
    """As an operator does."""
    folder = system.folder / FOLDER
    code, *said = baton("init", str(folder), "--renew")
    assert code == 0, said
    os.kill(nats_server(system).pid, signal.SIGHUP)
    ends_at = int(facts_of((folder / SERVER).read_bytes()).ends_at.timestamp())
    until(lambda: connected_until(system) == ends_at, "nats-server shows the new certificate")


def let_expire(system: System) -> None:
    """A certificate that was made long ago; nats-server has read it."""
    made_at = datetime.now(UTC) - timedelta(days=SERVER_DAYS + 1)
    create(system.folder / FOLDER, InitRequest(api_key=False, renew=True), made_at)
    os.kill(nats_server(system).pid, signal.SIGHUP)
    until(lambda: expiry_is_shown(system), "nats-server shows the certificate that has expired")


def complaints(system: System) -> dict[str, int]:
    logs = {name: (system.logs / f"{name}.log").read_text(errors="replace") for name in PROCESSES}
    return {name: log.count(EXPIRED) for name, log in logs.items()}


def others(system: System) -> set[int]:
    return {process.pid for process in system.processes() if process.name() != "nats-server"}


def test_a_renewal_costs_no_request_and_processes_recover_from_a_certificate_that_has_expired(tmp_path: Path):
    with (
        System(tmp_path / "state", *ARGUMENTS, env=impatient(tmp_path)) as system,
        steady_load(tmp_path, system.wait_ready(START_S_MAX).endpoint) as load,
    ):
        load.run_well()
        processes = others(system)
        for _ in range(RENEWALS):
            renew(system)
            load.run_well()

        let_expire(system)
        load.run_well()  # Connections that are established stay.
        assert set(complaints(system).values()) == {0}
        with load.fault(*ALLOWED):
            nats_server(system).kill()
            time.sleep(OUTAGE_S)  # what is measured is this time
            until(lambda: all(complaints(system).values()), f"each process says why: {complaints(system)}")
            renew(system)
        told = load.end()
        assert others(system) == processes
    assert any(each.code for each in told)
