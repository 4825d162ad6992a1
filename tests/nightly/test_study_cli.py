"""What the command that replays a trace shows and writes."""

from __future__ import annotations

import msgspec

from bench.study.results import Result
from tests.unit.bench.test_study_cli import run, trace

__all__ = ("trace",)
PNG = b"\x89PNG"


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


def test_a_workload_needs_no_file(tmp_path):
    done = run("replay", "conversations", "--limit", 60, "--policy", "baton", "--loads", 2, "--out", tmp_path)

    assert done.exit_code == 0, done.output
    (result,) = msgspec.json.decode((tmp_path / "results.json").read_bytes(), type=list[Result])
    assert result.refused == 0
    assert 30 <= result.requests <= 60


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
