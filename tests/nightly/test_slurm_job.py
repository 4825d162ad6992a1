"""A fleet as a job of a real Slurm: two nodes serve, one worker after another restarts, and the job drains."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import SPEEDS
from tests.support.nats_server import free_port
from tests.support.processes import ROOT
from tests.support.slurm_cluster import SlurmCluster, why_not
from tests.support.system import baton, until

pytestmark = [pytest.mark.nats, pytest.mark.timeout(900), pytest.mark.skipif(bool(why_not()), reason=why_not())]

START_S_MAX = 240.0
UPGRADE_S_MAX = 400.0
STOP_S_MAX = 240.0
WORKERS = {"one-prefill-1", "two-decode-1", "two-decode-2"}
REQUEST_S_MAX = 120.0
TOKENS = 1500
SLOW = {"WORKER_SIMULATED": f"{SPEEDS},decode_base_s=0.01"}
"""So that the stream takes longer than the signal, and less than a drain."""


class Job:
    """The fleet of a file as a job."""

    def __init__(self, slurm: SlurmCluster, folder: Path) -> None:
        self.slurm, self.state = slurm, folder / "state"
        self.port, self.nats = free_port(), free_port()
        file = folder / "fleet.toml"
        file.write_text(
            f"""engine = "simulated"
nats = {{ port = {self.nats} }}
router = {{ port = {self.port} }}
collector = {{ port = {free_port()} }}
[env]
"""
            + "".join(f"{name} = {json.dumps(value)}\n" for name, value in SLOW.items())
            + """
[[host]]
name = "one"
cores = [1]
workers = [{ role = "prefill" }]
[[host]]
name = "two"
workers = [{ role = "decode", count = 2 }]
"""
        )
        code, out, err = baton(
            "service", "install", "--kind", "slurm", "--config", str(file), "--state-dir", str(self.state),
            "--out", str(folder),
        )  # fmt: skip
        assert code == 0, out + err
        [key] = re.findall(r"shown only once:\n(\S+)", err)
        self.id = slurm.run(
            "sbatch",
            "--parsable",
            "--time=30",
            str(folder / "baton.sbatch"),
            HEAD_ADDRESS="127.0.0.1",
            PYTHONPATH=str(ROOT),
        )
        headers = {"authorization": f"Bearer {key}"}
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=REQUEST_S_MAX, trust_env=False
        )

    @property
    def output(self) -> str:
        return (self.state / f"slurm-{self.id}.out").read_text()

    def ready(self) -> set[str]:
        url = f"tls://127.0.0.1:{self.nats}"
        code, out, _err = baton("workers", "--json", "--nats-url", url, "--state-dir", str(self.state))
        found = json.loads(out)["workers"] if code == 0 else []
        return {each["record"]["worker_id"] for each in found if each["phase"] == "ready"}

    def stream(self, begun: threading.Event) -> list[str]:
        body = {
            "model": "baton-tiny", "prompt": "Once upon a time", "max_tokens": TOKENS, "stream": True, "ignore_eos": True
        }  # fmt: skip
        with self.http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            lines = answer.iter_lines()
            first = next(lines)
            begun.set()
            return [line for line in (first, *lines) if line.startswith("data: ")]


@pytest.fixture
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("job")  # The path of a socket is short.
    with SlurmCluster(folder / "slurm") as slurm:
        job = Job(slurm, folder)
        try:
            yield job
        finally:
            job.http.close()
            if slurm.state_of(job.id) not in {"COMPLETED", "FAILED"}:
                slurm.run("scancel", job.id)
                until(lambda: slurm.run("squeue", "--noheader") == "", "the job has ended", STOP_S_MAX)


def test_a_job_serves_upgrades_its_workers_in_turn_and_drains(job: Job):
    until(lambda: job.ready() == WORKERS, "all workers are ready", START_S_MAX)
    upgraded = job.slurm.run(
        "srun", f"--jobid={job.id}", "--overlap", "--quiet", "--nodes=1", "--ntasks=1", "--nodelist=n2", sys.executable,
        "-m", "services.launcher", "service", "upgrade", "--state-dir", str(job.state / "hosts" / "two"),
        s_max=UPGRADE_S_MAX, PYTHONPATH=str(ROOT),
    )  # fmt: skip
    assert re.findall(r"(\S+) is ready", upgraded) == ["two-decode-1", "two-decode-2"]
    until(lambda: job.ready() == WORKERS, "all workers are ready again", START_S_MAX)

    events, begun = list[str](), threading.Event()
    client = threading.Thread(target=lambda: events.extend(job.stream(begun)))
    client.start()
    assert begun.wait(REQUEST_S_MAX)
    job.slurm.run("scancel", "--batch", "--signal=TERM", job.id)
    client.join()
    until(lambda: job.slurm.state_of(job.id) in {"COMPLETED", "FAILED"}, "the job has ended", STOP_S_MAX)

    assert job.slurm.state_of(job.id) == "COMPLETED", job.output
    assert (events[-1], len(events)) == ("data: [DONE]", TOKENS + 1)
    assert "killed" not in job.output
    stopped = re.findall(r"(\S+) +stopped", job.output)
    assert max(map(stopped.index, WORKERS)) < stopped.index("router") < stopped.index("nats")
