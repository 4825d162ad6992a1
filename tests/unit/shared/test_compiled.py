"""Compiled modules are used only if they were made of the sources that are there, and behave as those do."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from services.router.telemetry.ttft import ttft_s
from shared import compiled

ROOT = Path(__file__).parents[3]


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A tree in which everything was compiled."""
    for module in compiled.MODULES:
        source = compiled.source(module, tmp_path)
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(f"# {module}\n")
        compiled.extension(module, tmp_path).touch()
    compiled.extension(f"{compiled.GROUP}__mypyc", tmp_path).touch()
    (tmp_path / compiled.STAMP).write_text(compiled.digest(tmp_path))
    return tmp_path


def test_what_was_compiled_of_these_sources_is_current(built: Path):
    assert compiled.is_current(built)


def test_an_edited_source_counts_and_not_what_was_compiled_of_it(built: Path):
    source = compiled.source(compiled.MODULES[0], built)
    before = source.read_text()

    source.write_text("# another\n")
    assert not compiled.is_current(built)

    source.write_text(before)
    assert compiled.is_current(built)


def test_a_build_that_did_not_end_is_not_used(built: Path):
    (built / compiled.STAMP).unlink()

    assert not compiled.is_current(built)


@pytest.mark.slow
@pytest.mark.parametrize("value", ["0", "false", "False"])
def test_an_operator_can_have_the_request_path_run_as_python(value: str):
    imports = "import services.router.relay.relay as relay, shared.compiled as c; print(c.IN_USE, relay.__file__)"

    run = subprocess.run(
        [sys.executable, "-c", imports],
        env={"BATON_COMPILED": value},
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )

    assert run.stdout.split() == ["False", str(ROOT / "services/router/relay/relay.py")]


def waits(statement: ast.stmt) -> bool:
    return any(isinstance(part, ast.Await | ast.AsyncFor | ast.AsyncWith | ast.Yield) for part in ast.walk(statement))


@pytest.mark.parametrize("module", compiled.MODULES)
def test_no_compiled_module_waits_in_a_finally(module: str):
    parts = ast.walk(ast.parse(compiled.source(module).read_bytes()))
    lasts = [last for part in parts if isinstance(part, ast.Try) for last in part.finalbody]

    assert [last.lineno for last in lasts if waits(last)] == []


class Report:
    """With the fields of a ``LegReport`` that ``ttft_s`` reads."""

    __slots__ = ("first_token_s", "total_s")

    def __init__(self, first_token_s: float, total_s: float) -> None:
        self.first_token_s = first_token_s
        self.total_s = total_s


def test_slots_that_a_class_loses_are_not_read_any_more():
    class Changed(Report):
        __slots__ = ("total_s",)

    report = Changed(2.0, 3.0)
    assert [ttft_s(9.0, report, stream=False) for _ in range(3)] == [8.0] * 3

    Changed.total_s = property(lambda _self: 5.0)
    assert [ttft_s(9.0, report, stream=False) for _ in range(3)] == [6.0] * 3

    del Changed.total_s
    with pytest.raises(AttributeError):
        ttft_s(9.0, report, stream=False)


def test_an_empty_slot_raises():
    report = Report(2.0, 3.0)
    assert ttft_s(9.0, report, stream=False) == 8.0

    del report.total_s

    with pytest.raises(AttributeError, match="total_s"):
        ttft_s(9.0, report, stream=False)


def test_classes_with_slots_of_the_same_names_are_not_confused():
    class Other:
        __slots__ = ("before", "first_token_s", "total_s")

    other, report = Other(), Report(2.0, 3.0)
    other.first_token_s, other.total_s = 1.0, 5.0

    assert [ttft_s(9.0, one, stream=False) for one in (report, other, report, other)] == [8.0, 5.0, 8.0, 5.0]
