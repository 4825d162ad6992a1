"""IPv6 addresses wherever an address becomes text or a socket is bound to it."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from services.launcher.fleet.fleet_file import read_fleet_file
from services.launcher.fleet.head import nats_url_of
from services.launcher.system.machine import is_free
from services.launcher.system.options import UpOptions
from services.launcher.system.session import endpoints
from services.worker.engines.simulated.kv_exchange import TcpAgent
from services.worker.engines.vllm.arguments import free_port
from shared.addresses import host_port, servers_of, url_of
from shared.bus.nats_client import without_password
from shared.http.server import PortTaken, listen

ROOT = Path(__file__).parents[3]
BY_HAND = re.compile(r"\{[^{}]*(?:host|address)[^{}]*\}:\{[^{}]*port[^{}]*\}")
"""An f-string that joins an address and a port."""

needs_ipv6 = pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")


@pytest.mark.parametrize(("host", "text"), [("::1", "[::1]:80"), ("10.0.0.1", "10.0.0.1:80"), ("gpu-1", "gpu-1:80")])
def test_an_address_and_a_port_can_be_told_apart(host, text):
    assert host_port(host, 80) == text
    assert (urlsplit(url_of("http", host, 80)).hostname, urlsplit(url_of("http", host, 80)).port) == (host, 80)


def test_the_addresses_of_a_system_on_ipv6_are_urls(tmp_path):
    where = endpoints(
        UpOptions(state_dir=tmp_path, host="fd00::7", collector_host="::1", port=8000, collector_port=8001)
    )

    assert where.api == "http://[fd00::7]:8000"
    assert where.metrics == "http://[::1]:8001/metrics"
    assert httpx.URL(where.console).host == "::1"


def test_a_fleet_file_may_have_ipv6_addresses():
    text = '[[host]]\nname = "one"\naddress = "fd00::7"\nworkers = [{ role = "both" }]\n'
    fleet = read_fleet_file(text)

    assert nats_url_of(fleet) == "tls://[fd00::7]:4222"


@pytest.mark.parametrize("folder", ["services", "shared", "connector", "replay"])
def test_no_module_joins_an_address_and_a_port_by_itself(folder):
    found = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in (ROOT / folder).rglob("*.py")
        if file.name != "addresses.py"
        for line in file.read_text().splitlines()
        if BY_HAND.search(line)
    ]

    assert found == []


def test_several_servers_of_nats_have_the_scheme_of_the_first_and_show_no_password():
    assert servers_of("tls://a:1, b:2,tls://c:3") == ["tls://a:1", "tls://b:2", "tls://c:3"]
    assert servers_of("a:1") == ["nats://a:1"]
    assert without_password("nats://u:secret@a:1,nats://u:secret@[::1]:2") == "nats://a:1,nats://[::1]:2"


@needs_ipv6
def test_sockets_are_bound_to_ipv6_addresses():
    with listen("::1", 0) as listener:
        port = listener.getsockname()[1]
        assert not is_free("::1", port)
        with pytest.raises(PortTaken, match=rf"\[::1\]:{port}"):
            listen("::1", port)
    assert free_port("::1") > 0


@needs_ipv6
def test_simulated_kv_travels_over_ipv6():
    holder, reader = TcpAgent("a", "::1"), TcpAgent("b", "::1")
    try:
        reader.connect(holder.metadata())
        assert list(reader._peers) == ["a"]
    finally:
        holder.close()
        reader.close()
