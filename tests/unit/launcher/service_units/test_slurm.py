"""The sbatch file: what the job asks for, which fleets it refuses, and that bash can read it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from services.launcher.fleet.fleet_file import WrongFleetFile, read_fleet_file
from services.launcher.service_files.slurm import SlurmJob, sbatch_file

FLEET = """
[[model]]
name = "A"
[[host]]
name = "one"
workers = [{ role = "prefill", count = 2 }, { role = "store" }]
[[host]]
name = "two"
workers = [{ role = "decode", count = 2, gpus_per_worker = 4 }]
"""


def written(fleet: str = FLEET, drain: str = "") -> str:
    job = SlurmJob(
        command=("/opt/my venv/python", "-m", "services.launcher"),
        fleet_file="/home/u/fleet.toml",
        state_dir="/home/u/state",
        inherited={"WORKER_DRAIN_S_MAX": drain} if drain else {},
    )
    return sbatch_file(read_fleet_file(fleet, "127.0.0.1"), job)


def asked(text: str) -> dict[str, str]:
    """Options of sbatch."""
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", text, re.MULTILINE))


def test_a_job_has_a_node_for_each_host_with_the_gpus_of_the_largest():
    options = asked(written())

    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == ("2", "1", "8")
    assert {"requeue", "exclusive"} <= options.keys()
    assert options["dependency"] == "singleton"


def test_simulated_engines_ask_for_no_gpu():
    assert "gpus-per-node" not in asked(written(f'engine = "simulated"\n{FLEET}'))


def test_the_signal_before_the_time_limit_leaves_time_to_drain():
    """The other host drains (45 s), then the head host: its workers, routers, collector and NATS."""
    assert asked(written())["signal"] == f"B:TERM@{45 * 2 + 45 * 2 + 25}"
    assert asked(written(drain="600"))["signal"] == f"B:TERM@{615 * 2 + 45 * 2 + 25}"


def test_a_job_asks_for_the_gpus_and_cores_that_hosts_name():
    """By number, so it needs as many as the highest number says. A host with cores uses no GPU."""
    named = FLEET.replace('name = "two"', 'name = "two"\ngpus = [0, 2, 9]')
    on_cores = FLEET.replace('name = "two"', 'name = "two"\ncores = [4, 5, 15]')

    assert (asked(written(named))["gpus-per-node"], "mincpus" in asked(written(named))) == ("10", False)
    assert (asked(written(on_cores))["gpus-per-node"], asked(written(on_cores))["mincpus"]) == ("2", "16")
    both = on_cores.replace('name = "one"', 'name = "one"\ncores = [0]')
    assert "gpus-per-node" not in asked(written(both))


def test_a_host_without_workers_is_refused():
    with pytest.raises(WrongFleetFile, match=r'"three" workers'):
        written(f'{FLEET}\n[[host]]\nname = "three"\n')


def test_values_of_the_fleet_are_words_of_the_shell():
    text = written(f"nats = {{ port = 4300 }}\nrouter = {{ port = 8100 }}\n{FLEET}").splitlines()

    assert {"fleet=/home/u/fleet.toml", "state=/home/u/state", "nats_port=4300", "api_port=8100"} <= {*text}
    assert "baton=('/opt/my venv/python' -m services.launcher)" in text
    assert "umask 077" in text


def test_the_head_host_has_the_first_node():
    assert "hosts=(two one)" in written(FLEET.replace('name = "two"', 'name = "two"\nhead = true'))


def test_bash_can_read_the_file_and_refuses_to_run_it_without_slurm(tmp_path: Path):
    file = tmp_path / "baton.sbatch"
    file.write_text(written())

    checked = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True, timeout=60, check=False)
    run = subprocess.run(
        ["bash", str(file)], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60, check=False
    )

    assert (checked.returncode, checked.stderr) == (0, "")
    assert (run.returncode, run.stderr) == (1, f"Submit this file: sbatch {file}\n")
