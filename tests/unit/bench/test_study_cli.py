"""The command, on a tiny trace."""

from __future__ import annotations

import msgspec
import pytest
from typer.testing import CliRunner

from bench.study.cli import app, cut
from bench.study.results import Result
from replay.traces import Request
from tests.support.replay_worlds import conversations, write_mooncake

PNG = b"\x89PNG"


@pytest.fixture
def trace(tmp_path):
    return write_mooncake(tmp_path / "trace.jsonl", conversations(40))


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.slow
def test_a_replay_shows_a_table_and_writes_tables_numbers_and_pictures(trace, tmp_path):
    out = tmp_path / "out"
    done = run(
        "replay", trace, "--fleet", "2B", "--policy", "baton", "--policy", "random", "--loads", "1,2", "--out", out
    )

    assert done.exit_code == 0, done.output
    assert "random" in done.output
    assert "| baton |" in (out / "results.md").read_text()
    results = msgspec.json.decode((out / "results.json").read_bytes(), type=list[Result])
    assert [(one.policy, one.load, one.requests) for one in results] == [
        ("baton", 1.0, 40), ("random", 1.0, 40), ("baton", 2.0, 40), ("random", 2.0, 40),
    ]  # fmt: skip
    pictures = sorted(out.glob("*.png"))
    assert [path.stem for path in pictures] == ["goodput", "hits", "itl", "ttft"]
    assert all(path.read_bytes().startswith(PNG) and path.stat().st_size > 5_000 for path in pictures)


def test_the_knee_is_where_the_best_baseline_just_keeps_the_target(trace):
    done = run("replay", trace, "--fleet", "1B", "--policy", "mooncake", "--loads", "knee,overload", "--slo-ttft", 1)

    assert done.exit_code == 0, done.output
    assert "knee:" in done.output
    assert "overload:" in done.output


@pytest.mark.slow
def test_a_workload_needs_no_file(tmp_path):
    done = run("replay", "conversations", "--limit", 60, "--policy", "baton", "--loads", 2, "--out", tmp_path)

    assert done.exit_code == 0, done.output
    (result,) = msgspec.json.decode((tmp_path / "results.json").read_bytes(), type=list[Result])
    assert result.refused == 0
    assert 30 <= result.requests <= 60


@pytest.mark.slow
def test_several_fleets_have_a_table_and_a_folder_each(trace, tmp_path):
    done = run(
        "replay", trace, "--fleet", "2B", "--fleet", "1P+1D", "--policy", "baton", "--step-model", "table", "--noise", 0.1, "--slow", "0:0.6",
        "--host-blocks", 50, "--out", tmp_path,
    )  # fmt: skip

    assert done.exit_code == 0, done.output
    for fleet in ("2B", "1P+1D"):
        assert f"{fleet}, 1:" in done.output
        assert f"{fleet}, 1:" in (tmp_path / fleet / "results.md").read_text()
    assert "No schedule exceeds" in done.output


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
