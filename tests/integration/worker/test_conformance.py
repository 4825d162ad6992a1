"""Baton's own store and somebody else's pass the conformance checks; stores with a fault fail the check of that fault."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from services.worker.conformance.checks import CHECKS
from services.worker.conformance.reference import BLOCK_BYTES
from tests.support.nats_server import NatsServer
from tests.support.worker_processes import WorkerProcess, start_worker

pytestmark = [
    pytest.mark.nats,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed"),
]

THIRD_PARTY = Path(__file__).parents[2] / "support" / "third_party"
BLOCKS = 96
JUDGED_S_MAX = 240.0


def start_store(nats: NatsServer, folder: Path, engine: str, files: int = 0) -> WorkerProcess:
    path = f"{Path.cwd()}:{THIRD_PARTY}"
    settings = {"store_memory_bytes": str(BLOCKS * BLOCK_BYTES), "store_files_bytes": str(files * BLOCK_BYTES)}
    environ = {"BATON_STATE_DIR": str(folder), "PYTHONPATH": path}
    return start_worker(
        nats.url, "s1", folder, environ=environ, role="store", model="conformance", engine=engine, **settings
    )


def failures(folder: Path, engine: str, *, answer_s: float = 15.0, files: int = 0) -> dict[str, str]:
    """What the command says, by check."""
    with NatsServer(folder) as nats:
        store = start_store(nats, folder, engine, files)
        try:
            command = [sys.executable, "-m", "services.worker.conformance", "s1", "--nats-url", nats.url]
            command += ["--answer-s", str(answer_s)]
            judged = subprocess.run(command, capture_output=True, text=True, timeout=JUDGED_S_MAX, check=False)
        finally:
            store.kill()
    lines = [line.split(maxsplit=1) for line in judged.stdout.splitlines()]
    assert len(lines) == len(CHECKS), judged.stdout + judged.stderr + store.log.read_text()
    failed = {said.partition(":")[0]: said.partition(": ")[2] for outcome, said in lines if outcome == "FAILED"}
    assert judged.returncode == bool(failed)
    return failed


@pytest.mark.parametrize(("engine", "files"), [("vllm", 0), ("vllm", 4 * BLOCKS), ("other", 0)])
def test_stores_pass(tmp_path: Path, engine: str, files: int):
    """The engine of Baton's own store does not matter."""
    assert failures(tmp_path, engine, files=files) == {}


@pytest.mark.parametrize(
    ("engine", "check", "why"),
    [
        ("other-drops", "keep", "changed while they were leased"),
        ("other-swaps", "bytes", "have other bytes than were inserted"),
        ("other-hides", "drop", "of which its snapshot has"),
    ],
)
def test_a_fault_fails_its_check(tmp_path: Path, engine: str, check: str, why: str):
    failed = failures(tmp_path, engine)

    assert why in failed[check]
    assert not {"describe", "unknown", "insert", "look up"} & set(failed)


def test_a_store_that_never_answers_fails(tmp_path: Path):
    failed = failures(tmp_path, "other-hangs", answer_s=3.0)

    assert "it did not answer" in failed["lease"]
    assert len(failed) >= len(CHECKS) - 2
