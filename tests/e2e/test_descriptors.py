"""A router whose file descriptors are used up by idle connections."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.simulated_system import simulated_system

pytestmark = [pytest.mark.nats, pytest.mark.slow]

FILES_MAX = 128
IDLE = 150
REQUESTS = 40
SHOWN_S_MAX = 60.0


def of_router(collector_url: str) -> dict[str, float]:
    """The router's process metrics."""
    text = httpx.get(f"{collector_url}/metrics", timeout=SHOWN_S_MAX).text
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("baton_process_") and sample.labels["service"] == "router"
    }


def test_idle_connections_make_room_and_the_lack_of_descriptors_is_counted_and_logged_once(tmp_path, nats_server):
    with simulated_system(tmp_path, nats_server, router_files_max=FILES_MAX) as system, ExitStack() as idle:
        where = urlsplit(system.router_url)
        for _ in range(IDLE):
            idle.enter_context(socket.create_connection((where.hostname, where.port)))
        ends = time.monotonic() + SHOWN_S_MAX
        while (shown := of_router(system.collector_url)).get("baton_process_open_fds", 0) < 0.9 * FILES_MAX:
            assert time.monotonic() < ends, shown
            time.sleep(0.2)
        statuses = [system.complete(f"{number}").status_code for number in range(REQUESTS)]
        while shown["baton_process_refused_connections_total"] < REQUESTS:
            assert time.monotonic() < ends, shown
            time.sleep(0.2)
            shown = of_router(system.collector_url)
        said = system.processes["router"].log.read_text()

    assert statuses == [200] * REQUESTS
    assert shown["baton_process_max_fds"] == FILES_MAX
    assert shown["baton_process_resident_memory_bytes"] > 1e6
    assert shown["baton_process_cpu_seconds_total"] > 0
    assert shown["baton_process_event_loop_lag_seconds"] >= 0
    assert said.count("file descriptors are in use") == 1
