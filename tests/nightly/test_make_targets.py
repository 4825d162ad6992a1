"""Each `make` target that documents name runs: campaigns in full with tonight's seed, benchmarks in a short form."""

from __future__ import annotations

import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from scripts.audit import NO_DATA
from tests.support.nats_server import free_port
from tests.support.processes import ROOT
from tests.support.replay_worlds import conversations, write_mooncake
from tests.support.system import until

SEED = datetime.now(UTC).strftime("%j")
TARGETS = {
    "check": {},
    "compose-test": {},
    "dist": {},
    "test-gpu": {},
    "chaos": {"ARGS": f"--seed {SEED}"},
    "fuzz": {"ARGS": f"--seed {SEED}"},
    "bench-router": {"ARGS": "--quick --out {out}/router.md"},
    "bench-worker": {"ARGS": "--quick --out {out}/worker.md"},
    "bench-kv": {"ARGS": "--quick --out {out}/kv.md"},
    "bench-placement": {"ARGS": "--entries 200000 --python-entries 50000 --repeat 1"},
    "bench-replay": {"ARGS": "--quick --only targets --runs {out}/runs"},
    "bench-planner": {"TRACE": "{trace}", "ARGS": "--hours 0.1"},
    "bench-role-shift": {"ARGS": "--quick"},
    "bench-telemetry": {"ARGS": "--rounds 4 --out {out}/telemetry.md"},
    "bench-fleet": {"ARGS": "--times 1 --no-page"},
    "bench-scale": {"ARGS": "--quick --out {out}/scale.md"},
    "bench-seeds": {"ARGS": "--quick --out {out}/seeds.md"},
    "bench-serving": {"ARGS": "--quick --out {out}/serving.md"},
    "gpu-proof": {"ON_CPU": "1", "ARGS": "--out {out}/gpu-proof.md"},
    "outside": {"ARGS": "--only vllm-pd,vllm-bench --scratch {out}/outside --page {out}/outside.md"},
}
HERE = {"up", "doctor", "down", "audit"}
"""Run by tests of their own below."""
ELSEWHERE = {"setup", "test", "nightly", "llama-server", "s3-server"}
"""Run by continuous integration or every night; setting up is a part of each, and the servers are of `make nightly`."""
FOR_AUTHORS = {"fix", "catalogue"}
"""These change the tree. What they do, `make check` compares with the tree."""
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md")
RUN_S_MAX = 3000
UP_S_MAX = 180.0
SHOWN_CHARS = 6000


@pytest.mark.parametrize("target", TARGETS)
def test_a_make_target_exits_0(target: str, tmp_path: Path):
    trace = write_mooncake(tmp_path / "trace.jsonl", conversations(60))
    variables = [f"{name}={value.format(out=tmp_path, trace=trace)}" for name, value in TARGETS[target].items()]

    done = subprocess.run(
        ["make", target, *variables], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=RUN_S_MAX, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout[-SHOWN_CHARS:]


def test_a_system_is_started_examined_and_stopped_by_make(tmp_path: Path):
    state = ["--state-dir", str(tmp_path / "state")]
    ports = ["--port", free_port(), "--collector-port", free_port(), "--nats-port", free_port()]
    log = tmp_path / "up.log"

    def command(target: str, *arguments: object) -> list[str]:
        return ["make", target, "ARGS=" + " ".join(map(str, arguments))]

    with log.open("wb") as out:
        up = subprocess.Popen(
            command("up", "--engine", "simulated", *ports, *state), cwd=ROOT, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            until(lambda: up.poll() is not None or "Baton is ready" in log.read_text(), "the system is ready", UP_S_MAX)
            examined = subprocess.run(
                command("doctor", "--quick", *state),
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=UP_S_MAX,
                check=False,
            )
            subprocess.run(command("down", *state), cwd=ROOT, timeout=UP_S_MAX, check=True, capture_output=True)
            ended = up.wait(UP_S_MAX)
        finally:
            up.terminate()
            up.wait(UP_S_MAX)

    assert examined.returncode == 0, examined.stdout + examined.stderr + log.read_text()
    assert ended == 0, log.read_text()


def test_no_locked_package_has_a_known_vulnerability():
    """Red when a package is found vulnerable, skipped where the advisory databases cannot be asked."""
    done = subprocess.run(["make", "audit"], cwd=ROOT, capture_output=True, text=True, timeout=RUN_S_MAX, check=False)
    if f"Error {NO_DATA}" in done.stderr:
        pytest.skip(f"no data on some or all packages: {(done.stdout or done.stderr).partition(chr(10))[0]}")

    assert done.returncode == 0, done.stdout[-SHOWN_CHARS:] + done.stderr[-SHOWN_CHARS:]


def test_every_target_that_documents_name_is_run():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):(?!=)", makefile, flags=re.MULTILINE))
    named: set[str] = set()
    for pattern in DOCUMENTS:
        for page in ROOT.glob(pattern):
            named.update(re.findall(r"\bmake ([a-z][a-z-]*)", page.read_text(encoding="utf-8")))
    run = TARGETS.keys() | HERE | ELSEWHERE | FOR_AUTHORS
    benchmarks = {target for target in targets if target.startswith("bench-")}

    assert (named & targets) | benchmarks <= run
    assert run <= targets
