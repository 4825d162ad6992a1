"""One door per third party."""

from __future__ import annotations

from fnmatch import fnmatch

import pytest

from tests.architecture.sources import sources

DOORS = {
    "nats": ("shared/bus/nats_*.py",),
    "vllm": ("services/worker/engines/vllm_*.py", "connector/*"),
    "nixl": ("connector/nixl_agent.py", "services/worker/engines/vllm_*.py"),
    "opentelemetry.sdk": ("shared/telemetry/setup.py",),
    "opentelemetry.exporter": ("shared/telemetry/setup.py",),
}


@pytest.mark.parametrize("party", DOORS)
def test_a_third_party_is_imported_at_its_door_only(party):
    elsewhere = [
        f"{source.path}:{line}"
        for source in sources()
        for module, line in source.imports()
        if (module + ".").startswith(party + ".") and not any(fnmatch(source.path, door) for door in DOORS[party])
    ]

    assert sorted(set(elsewhere)) == []


CONNECTOR_PORTS = ("connector.core", "connector.transfer_port", "connector.memory_agent", "connector.nixl_agent")
"""What a worker, or a simulated engine in one, may know of the connector: everything else needs vLLM around it."""


def test_the_connector_is_known_to_workers_only_and_by_its_core_and_its_agents():
    beyond = [
        f"{source.path}:{line} {module}"
        for source in sources()
        if not source.path.startswith("connector/")
        for module, line in source.imports()
        if (module + ".").startswith("connector.") and module != "connector"
        if not source.path.startswith("services/worker/")
        or not any((module + ".").startswith(port + ".") for port in CONNECTOR_PORTS)
    ]

    assert beyond == []
