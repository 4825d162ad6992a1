"""Each long `make` target runs: campaigns in full with tonight's seed, benchmarks in a short form."""

from __future__ import annotations

import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tests.support.replay_worlds import conversations, write_mooncake

SEED = datetime.now(UTC).strftime("%j")
TARGETS = {
    "chaos": {"ARGS": f"--seed {SEED}"},
    "fuzz": {"ARGS": f"--seed {SEED}"},
    "bench-router": {"ARGS": "--quick --out {out}/router.md"},
    "bench-kv": {"ARGS": "--quick --out {out}/kv.md"},
    "bench-placement": {"ARGS": "--entries 200000 --python-entries 50000 --repeat 1"},
    "bench-replay": {"TRACE": "{trace}", "OUT": "{out}"},
    "bench-planner": {"TRACE": "{trace}", "ARGS": "--hours 0.1"},
    "bench-telemetry": {"ARGS": "--rounds 4 --out {out}/telemetry.md"},
    "bench-fleet": {"ARGS": "--times 1 --no-page"},
}
RUN_S_MAX = 3000
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


def test_every_benchmark_of_the_makefile_is_run():
    targets = re.findall(r"^(bench-[a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)

    assert set(targets) <= TARGETS.keys()
