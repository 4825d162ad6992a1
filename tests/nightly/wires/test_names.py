"""NATS is named by a host name that stops resolving while nats-server is restarted, and later has another address."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from shared.contracts.failures import Reason
from tests.e2e.conftest import START_S_MAX
from tests.nightly.wires.steady_load import OUTAGE_S, impatient, steady_load
from tests.support.nats_server import NatsServer
from tests.support.processes import ROOT
from tests.support.system import System, until

NAME = "nats.baton.test"
ADDRESS, OTHER = "127.0.0.1", "127.0.0.2"
ARGUMENTS = ("--engine", "simulated", "--prefill", "1", "--decode", "1", "--open")
PROCESSES = {"router", "orchestrator", "collector", "prefill-1", "decode-1"}
LOST, UNRESOLVED = "the connection to NATS was lost", f"the name {NAME} cannot be resolved"
ALLOWED = (Reason.BUS_DOWN, Reason.NO_WORKER)


def has_mount_namespaces() -> bool:
    try:
        return subprocess.run(["unshare", "-m", "true"], capture_output=True, timeout=60, check=False).returncode == 0
    except OSError:
        return False


pytestmark = [
    pytest.mark.nats,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not has_mount_namespaces(), reason="needs root, for a mount namespace with its own /etc/hosts"),
]


class Names:
    """An ``/etc/hosts`` of a test, and a ``baton`` whose processes read it and ask no name server."""

    def __init__(self, folder: Path) -> None:
        self._hosts = folder / "hosts"
        self.baton = folder / "baton"
        sources = folder / "nsswitch.conf"
        sources.write_text("passwd: files\ngroup: files\nhosts: files\n")
        python, hosts, switch = (shlex.quote(str(path)) for path in (sys.executable, self._hosts, sources))
        command = (
            f"mount --bind {hosts} /etc/hosts && mount --bind {switch} /etc/nsswitch.conf "
            f'&& exec {python} -m services.launcher.cli "$@"'
        )
        self.baton.write_text(
            f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT))} exec unshare -m sh -c {shlex.quote(command)} sh "$@"\n'
        )
        self.baton.chmod(0o700)

    def resolve(self, address: str) -> None:
        """Give the name this address; none if it is empty. The file stays the same one, which is mounted."""
        self._hosts.write_text("127.0.0.1 localhost\n" + (f"{address} {NAME}\n" if address else ""))


def reported(system: System, outages: int) -> bool:
    """Whether each process has said once in each outage that the name cannot be resolved. Some have two connections."""
    logs = {name: (system.logs / f"{name}.log").read_text(errors="replace") for name in PROCESSES}
    lost, said = ({name: log.count(text) for name, log in logs.items()} for text in (LOST, UNRESOLVED))
    assert all(said[name] <= lost[name] for name in PROCESSES), f"{said} times in {lost} outages"
    return said == lost and all(count >= outages and count % outages == 0 for count in lost.values())


def test_processes_reconnect_when_the_name_of_nats_has_an_address_again_and_when_it_has_another(tmp_path: Path):
    names = Names(tmp_path)
    names.resolve(ADDRESS)
    with ExitStack() as servers:
        nats = servers.enter_context(NatsServer(tmp_path))
        url = f"nats://{NAME}:{nats.port}"
        with (
            System(
                tmp_path / "state", *ARGUMENTS, nats_url=url, env=impatient(tmp_path), program=names.baton
            ) as system,
            steady_load(tmp_path, system.wait_ready(START_S_MAX).endpoint) as load,
        ):
            load.run_well()
            processes = {process.pid for process in system.processes()}
            for outage, address in enumerate((ADDRESS, OTHER), 1):
                with load.fault(*ALLOWED):
                    names.resolve("")
                    nats.kill()
                    nats = servers.enter_context(NatsServer(tmp_path, host=address, port=nats.port))
                    time.sleep(OUTAGE_S)  # what is measured is this time
                    until(partial(reported, system, outage), f"each process reports outage {outage}")
                    names.resolve(address)
            told = load.end()
            assert {process.pid for process in system.processes()} == processes
    assert any(each.code for each in told)
