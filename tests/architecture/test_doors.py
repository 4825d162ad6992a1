"""One door per third party."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatch

import pytest

from tests.architecture.sources import ROOT, sources
from tests.architecture.test_purity import DECIDERS

DOORS = {
    "nats": ("shared/bus/nats_*.py",),
    "vllm": ("services/worker/engines/vllm/*", "connector/*"),
    "nixl": ("connector/transfer/nixl_*.py", "services/worker/engines/vllm/*"),
    "opentelemetry.sdk": ("shared/telemetry/setup.py",),
    "opentelemetry.exporter": ("shared/telemetry/setup.py",),
    "nkeys": ("shared/bus/nats_credentials.py",),
    "cryptography": ("services/launcher/cluster/certificates.py",),
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


KNOWN_TO_WORKERS = (
    *DECIDERS,
    "connector.worker.connections",
    "connector.worker.copier",
    "connector.worker.transfer_thread",
    "connector.transfer.agent",
    "connector.transfer.memory_agent",
    "connector.transfer.nixl_agent",
    "connector.transfer.nixl_files",
)
"""What also a simulated engine uses: it runs where there is no vLLM."""


def test_workers_alone_know_the_connector_and_only_what_runs_without_vllm():
    beyond = [
        f"{source.path}:{line} {module}"
        for source in sources()
        if not source.path.startswith(("connector/", "services/worker/engines/vllm/"))
        for module, line in source.imports()
        if (module + ".").startswith("connector.") and module != "connector"
        if not source.path.startswith("services/worker/")
        or not any((module + ".").startswith(port + ".") for port in KNOWN_TO_WORKERS)
    ]

    assert beyond == []


def test_a_simulated_worker_needs_neither_vllm_nor_torch_nor_nixl():
    without = "import sys; sys.modules.update(dict.fromkeys(('vllm', 'torch', 'nixl')))"

    done = subprocess.run(
        [sys.executable, "-c", f"{without}; import services.worker.service, services.worker.engines.simulated.engine"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
