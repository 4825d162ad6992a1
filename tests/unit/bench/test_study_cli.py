"""The command, on a tiny trace. The nightly ``test_study_cli.py`` has what it writes."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from bench.study.cli import app, cut
from replay.traces import Request
from tests.support.replay_worlds import conversations, write_mooncake

PNG = b"\x89PNG"


@pytest.fixture
def trace(tmp_path):
    return write_mooncake(tmp_path / "trace.jsonl", conversations(40))


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_knee_is_where_the_best_baseline_just_keeps_the_target(trace):
    done = run("replay", trace, "--fleet", "1B", "--policy", "mooncake", "--loads", "knee,overload", "--slo-ttft", 1)

    assert done.exit_code == 0, done.output
    assert "knee:" in done.output
    assert "overload:" in done.output


def test_neither_a_file_nor_a_workload_gives_a_clear_error(tmp_path):
    done = run("replay", tmp_path / "missing.jsonl")

    assert done.exit_code == 2
    assert "tenants" in done.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy", "nobody"], "no policy"),
        (["--loads", "much"], "neither a positive number"),
        (["--loads", "-1"], "neither a positive number"),
        (["--fleet", "2P"], "cannot serve"),
        (["--fleet", "0B"], "cannot serve"),
        (["--fleet", "2+"], "no split"),
        (["--slow", "1"], "NUMBER:SPEED"),
        (["--slow", "8:0.5"], "no worker"),
        (["--slow", "1:0"], "no positive speed"),
        (["--step-model", "table", "--profile", "70b"], "8b"),
    ],
)
def test_invalid_options_give_a_clear_error(trace, arguments, says):
    done = run("replay", trace, *arguments)

    assert done.exit_code == 2
    assert says in done.output


def test_a_file_that_is_no_trace_gives_a_clear_error(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("nothing\n")

    done = run("replay", path)
    assert done.exit_code == 2
    assert "line 1" in done.output


def test_a_trace_can_be_cut():
    requests = [Request(float(second), (), 1, 1) for second in range(0, 7200, 600)]

    assert len(cut(requests, hours=1)) == 6
    assert len(cut(requests, limit=2)) == 2
