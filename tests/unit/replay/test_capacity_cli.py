"""``baton plan`` with a workload."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from replay.cli import GPUS, ProfileName, app
from replay.profile import PROFILES
from replay.split import Split
from replay.traces import Request
from replay.world import World
from shared.text.formats import in_bytes
from tests.support.nats_server import free_port
from tests.support.processes import ROOT
from tests.support.replay_worlds import conversations, write_mooncake

PNG = b"\x89PNG"
QUICK = ("--sample", 30, "--jobs", 1)


@pytest.fixture
def trace(tmp_path):
    return write_mooncake(tmp_path / "trace.jsonl", conversations(30))


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.slow
def test_a_plan_has_an_outcome_a_picture_and_the_command_to_start_it(trace, tmp_path):
    picture = tmp_path / "plan.png"

    done = run("--trace", trace, "--gpus", 2, *QUICK, "--picture", picture)

    assert done.exit_code == 0, done.output
    assert "✓ Enough. 2 GPUs as" in done.output
    assert """ROUTER_SLOS='{"default": {"ttft_s": 5.0, "itl_s": 0.1}}' baton up --model MODEL --""" in done.output
    assert picture.read_bytes().startswith(PNG)
    assert picture.stat().st_size > 10_000


def test_too_few_gpus_are_not_enough_and_more_are_named():
    load = ("--rate", "20/s", "--prompt", 4000, "--output", 50, "--ttft", 2, "--share", "60%")
    done = run(*load, "--gpus", 4, "--profile", "70b", *QUICK)

    assert done.exit_code == 0, done.output
    assert "✗ Not enough. 4 GPUs as 1 both" in done.output
    assert "--gpus-per-worker 4" in done.output


def test_json_has_the_plan_for_programs():
    done = run("--rate", "40/min", "--prompt", 500, "--output", 20, *QUICK, "--json", "--split", "1P+1D")

    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    assert plan["workers"] == 2
    assert plan["splits"][0]["split"] == {"prefill": 1, "decode": 1, "both": 0}
    assert plan["enough"] is True
    assert plan["headroom"] > 1


def test_a_plan_counts_the_states_of_a_hybrid_model():
    """Qwen3-Next's 36 layers with a state: 38 MB for a prompt of any length, beside 24 KiB for each token."""
    load = ("--rate", "40/min", "--prompt", 2000, "--output", 20, "--profile", "80b-a3b", "--split", "1P+1D")
    plan = json.loads(run(*load, *QUICK, "--json").stdout)
    engine, prompt = plan["engines"]["both"], round(plan["size"]["prompt_tokens"])

    assert (engine["kv_tokens"], engine["gpus"], engine["state_tokens"]) == (4450 * 512, 2, 3 * 512)
    states = engine["handoff_bytes"] - 24_576 * prompt
    assert 35e6 < states < 40e6
    shown = " ".join(run(*load, *QUICK).output.split())
    assert "2,278,400 tokens of KV (the states of a running request take the room of 1,536)" in shown
    assert f"its handoff reads {in_bytes(engine['handoff_bytes'])}" in shown


def test_roles_have_layouts_of_their_own():
    """Of 12 GPUs, a decode group takes four and a prefill worker of two stages two."""
    load = ("--rate", "40/min", "--prompt", 2000, "--output", 20, "--profile", "80b-a3b", "--gpus", 12)
    layouts = ("--layout", "prefill=TP1xPP2", "--layout", "decode=DP4")
    plan = json.loads(run(*load, *layouts, *QUICK, "--json").stdout)

    assert {role: one["gpus"] for role, one in plan["engines"].items()} == {"prefill": 2, "decode": 4, "both": 2}
    for one in plan["splits"]:
        assert 10 <= 2 * one["split"]["prefill"] + 4 * one["split"]["decode"] + 2 * one["split"]["both"] <= 12
    shown = run(*load, *layouts, *QUICK, "--split", "2P+2D").output
    assert "PP 2, 2 GPUs per worker" in shown
    assert "DP 4, 4 GPUs per group of 4 ranks" in shown
    assert "--prefill 2 --decode 2 --gpus-per-worker 2 --gpus-per-decode 1" in " ".join(shown.split())
    assert '{ role = "decode", count = 2, data_parallel = 4 }' in shown


def test_states_limit_how_many_requests_run_at_once():
    """Short requests, of which an engine holds 256: their states take three blocks of each four."""
    profile = replace(PROFILES["80b-a3b"], kv_blocks=256)
    requests = [Request(0.0, (), 300, 200) for _number in range(256)]
    waits = {}
    for groups in ("full", "state"):
        outcomes = World(Split(both=1), replace(profile, groups=groups)).run(requests)
        waits[groups] = max(one.ttft_s for one in outcomes)

    assert waits["state"] > waits["full"] + 200 * profile.decode_base_s


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpus", "4"], "Name the workload"),
        (["--trace", "missing.jsonl"], "No such file"),
        (["--rate", "many"], "is no rate"),
        (["--rate", "1/s", "--trace", "x"], "either --trace or --rate"),
        (["--rate", "1/s", "--ttft", "0"], "--ttft must be more than 0"),
        (["--rate", "1/s", "--share", "often"], "no share"),
        (["--rate", "1/s", "--share", "95"], "no share"),
        (["--rate", "1/s", "--split", "3Q"], "is no split"),
        (["--rate", "1/s", "--split", "2B", "--split", "3B"], "as many workers"),
        (["--rate", "1/s", "--split", "2B", "--gpus", "4"], "4 GPUs are 4 workers"),
        (["--rate", "1/s", "--profile", "70b", "--gpus", "2"], "A worker needs 4 GPUs"),
        (["--rate", "1/s", "--gpus-per-worker", "2"], "measured speeds"),
        (["--rate", "1/s", "--speeds", "missing.json"], "speeds cannot be read"),
        (["--rate", "1/s", "--layout", "PP"], "is no layout"),
        (["--rate", "1/s", "--layout", "store=TP1"], "no role 'store'"),
        (["--rate", "1/s", "--layout", "DP2"], "no experts"),
        (["--rate", "1/s", "--layout", "TP2", "--gpus", "1"], "A worker needs 2 GPUs"),
        (["--rate", "1/s", "--layout", "TP2", "--split", "4B", "--gpus", "6"], "A split needs 8 GPUs"),
        (["--rate", "1/s", "--picture", "plan.gif"], "must end in .png"),
        (["--rate", "1/s", "--ttft", "0.001"], "No fleet of these engines meets the targets"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_said_before_the_search(arguments, says):
    done = run(*arguments)

    assert done.exit_code == 1
    assert says in done.stderr


@pytest.mark.parametrize("content", ["", "nothing\n", '{"timestamp": 0}\n'])
def test_a_file_without_requests_gives_a_clear_error(tmp_path, content):
    path = tmp_path / "trace.jsonl"
    path.write_text(content)

    done = run("--trace", path)

    assert done.exit_code == 1
    assert "This trace cannot be read" in done.stderr


@pytest.mark.parametrize("options", [[], ["--export-speeds", "speeds.json"], ["--rate", "1/s", "--speeds", "running"]])
@pytest.mark.slow
def test_what_a_running_system_must_answer_fails_without_one(options):
    done = run(*options, "--nats-url", f"nats://127.0.0.1:{free_port()}")

    assert done.exit_code == 1
    assert "does not respond" in done.stderr


@pytest.mark.slow
def test_baton_plan_is_this_command_by_its_entry_point(tmp_path):
    installed = tmp_path / "baton_serve-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: baton-serve\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[baton.commands]\nplan = replay.cli:app\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}

    def said(*arguments):
        command = [sys.executable, "-m", "services.launcher.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout

    assert "Size a fleet" in said("--help")
    assert "--trace" in said("plan", "--help")


def test_the_profiles_to_choose_from_are_those_of_the_replay():
    assert {one.value for one in ProfileName} == set(PROFILES) == {one.value for one in GPUS}
