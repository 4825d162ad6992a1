"""Stores that the conformance checks judge, as their authors run them: by the command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from services.worker.conformance.checks import CHECKS
from services.worker.conformance.reference import BLOCK_BYTES
from tests.support.nats_server import NatsServer
from tests.support.worker_processes import WorkerProcess, start_worker

THIRD_PARTY = Path(__file__).parent / "third_party"
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
