"""Which routers `baton up --routers N` starts, and that two systems cannot have one port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from services.launcher.system import machine
from services.launcher.system.options import ModelOptions, UpOptions
from services.launcher.system.plan import plan_system
from services.launcher.system.process_plan import Machine, PlanRefused, ProcessPlan
from services.launcher.system.session import endpoints

OPTIONS = UpOptions(models=(ModelOptions(prefill=1, decode=1),), state_dir="/state", port=9000)
MACHINE = Machine(python="python", nats_server="/bin/nats-server", cores=(0, 1))
LISTENER = """
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))):
    print("listening", flush=True)
    sys.stdin.read()
"""
TWO = {"routers": 2, "router_ports": (9002, 9003)}


def routers(**changes: object) -> list[ProcessPlan]:
    plan = plan_system(msgspec.structs.replace(OPTIONS, **changes), MACHINE)
    return [process for process in plan.processes if process.name.startswith("router")]


@contextmanager
def listener(host: str, port: int) -> Iterator[int]:
    """Pid of another process that listens there."""
    arguments = [sys.executable, "-c", LISTENER, host, str(port)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"listening\n"
        yield process.pid


def test_a_single_router_owns_the_port():
    [router] = routers()

    assert router.name == "router"
    assert router.env["ROUTER_PORT"] == "9000"
    assert not {"ROUTER_SHARED_PORT", "ROUTER_INSTANCE"} & router.env.keys()


def test_several_routers_share_the_port_and_each_has_its_own():
    several = routers(**TWO)

    assert [router.name for router in several] == ["router-1", "router-2"]
    assert [router.env["ROUTER_INSTANCE"] for router in several] == ["router-1", "router-2"]
    assert [router.env["ROUTER_PORT"] for router in several] == ["9002", "9003"]
    assert {router.env["ROUTER_SHARED_PORT"] for router in several} == {"9000"}


def test_several_routers_have_one_endpoint_and_separate_addresses():
    where = endpoints(msgspec.structs.replace(OPTIONS, host="0.0.0.0", **TWO))

    assert where.api == "http://127.0.0.1:9000"
    assert where.routers == {"router-1": "http://127.0.0.1:9002", "router-2": "http://127.0.0.1:9003"}


def test_join_accepts_no_routers():
    with pytest.raises(PlanRefused, match="--routers"):
        plan_system(msgspec.structs.replace(OPTIONS, join=True, routers=2), MACHINE)


def test_a_port_is_reserved_for_one_launcher():
    port = machine.free_ports("127.0.0.1", 20_000, 1)[0]
    with machine.claimed(port), pytest.raises(PlanRefused, match=f"Port {port}"), machine.claimed(port):
        pass
    with machine.claimed(port):
        pass


def test_a_port_shared_by_others_is_not_free():
    with socket.socket() as shared:
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        shared.bind(("127.0.0.1", 0))
        shared.listen()

        assert not machine.is_free("127.0.0.1", shared.getsockname()[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_the_holder_of_a_port_listens_where_another_server_would(host: str):
    """Another process may have the same port at another address."""
    with socket.create_server(("127.0.0.1", 0)) as ours, listener("127.0.0.2", ours.getsockname()[1]) as other:
        port = ours.getsockname()[1]
        holders = {f" by pid {os.getpid()} "} | ({f" by pid {other} "} if host == "0.0.0.0" else set())

        assert not machine.is_free(host, port)
        assert machine.holder(host, port).partition("(")[0] in holders


def test_who_listens_at_another_address_holds_no_port():
    port = machine.free_ports("127.0.0.1", 20_000, 1)[0]
    with listener("127.0.0.2", port):
        assert machine.is_free("127.0.0.1", port)
        assert machine.holder("127.0.0.1", port) == ""


def test_the_next_free_ports_are_found():
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        taken = stranger.getsockname()[1]

        found = machine.free_ports("127.0.0.1", taken - 1, 2)

    assert len(set(found)) == 2
    assert taken not in found
    assert min(found) > taken
