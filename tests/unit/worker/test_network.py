"""A worker without others on other hosts is reached on loopback only, and every worker says where it is reached."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import psutil
import pytest

from services.worker.network import network_addresses, own_address, ucx_defaults, uses_tcp


@pytest.mark.parametrize(
    ("nats_url", "address"),
    [
        ("nats://127.0.0.1:4222", "127.0.0.1"),
        ("tls://user:secret@127.0.0.1", "127.0.0.1"),
        ("127.0.0.1:4222,127.0.0.2:4222", "127.0.0.1"),
        ("tls://[::1]:4222", "::1"),
    ],
)
async def test_a_worker_whose_nats_is_on_loopback_is_reached_there(nats_url: str, address: str):
    if address == "::1" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")

    assert await own_address(nats_url) == address


def networks() -> list[str]:
    """Addresses of this machine in networks."""
    families = psutil.net_if_addrs().values()
    found = [one.address for family in families for one in family if one.family is socket.AF_INET]
    return [address for address in found if not address.startswith("127.")]


async def test_a_worker_whose_nats_others_can_reach_is_reached_there_too():
    if not (here := networks()):
        pytest.skip("this machine has no network")

    assert await own_address(f"tls://{here[0]}:4222") == here[0]
    assert await own_address(f"tls://127.0.0.1:4222,{here[0]}:4222") == here[0]


async def test_a_server_without_an_address_is_an_error():
    with pytest.raises(OSError, match=r"(?i)name|address"):
        await own_address("tls://no-such-host.invalid:4222")


@pytest.mark.parametrize(
    ("kv_host", "environ", "devices"),
    [
        ("127.0.0.1", {}, "lo"),
        ("::1", {}, "lo"),
        ("127.0.0.1", {"UCX_TLS": "tcp,self"}, "lo"),
        ("127.0.0.1", {"UCX_TLS": "^rc"}, "lo"),
        ("10.0.0.1", {}, None),
        ("gpu-1", {}, None),
        ("127.0.0.1", {"UCX_NET_DEVICES": "eth0"}, None),
        ("127.0.0.1", {"UCX_TLS": "rc,cuda_copy,cuda_ipc"}, None),
    ],
)
def test_ucx_is_confined_to_loopback_where_workers_are_reached_there(
    kv_host: str, environ: dict[str, str], devices: str | None
):
    assert ucx_defaults(kv_host, environ).get("UCX_NET_DEVICES") == devices


@pytest.mark.parametrize(
    ("transports", "expected"),
    [("", True), ("all", True), ("tcp,self", True), ("^rc", True), ("^tcp", False), ("^rc,tcp", False), ("rc", False)],
)
def test_transports_are_read_as_ucx_reads_them(transports: str, expected: bool):
    assert uses_tcp(transports) is expected


async def test_sockets_that_others_can_reach_are_found_and_those_on_loopback_are_not():
    before = await network_addresses()
    with ExitStack() as opened:
        opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        on_loopback = await network_addresses()
        opened.enter_context(socket.create_server(("0.0.0.0", 0)))  # the case that it finds
        assert await network_addresses() == ["0.0.0.0"]

    assert before == on_loopback == []
