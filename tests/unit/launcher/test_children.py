"""Logs of child processes, and what is said and done about one that died."""

from __future__ import annotations

import os
import stat
import sys
import tracemalloc
from pathlib import Path

import pytest

from services.launcher.system.children import (
    FILES_MAX,
    Restart,
    RestartHistory,
    RestartPolicy,
    last_lines,
    older,
    open_child_starter,
    remove,
    rotate,
    tail,
    why_it_died,
)
from services.launcher.system.process_plan import ProcessPlan, Stage

MIB = 1 << 20


def test_who_has_the_file_open_goes_on_writing_into_the_current_one(tmp_path: Path):
    current = tmp_path / "w1.log"
    with current.open("ab", buffering=0) as child:
        for number in range(10):
            child.write(f"{number}".encode() * 99 + b"\n")
            rotate(current, bytes_max=150)

    files = [current, *(older(current, number) for number in range(1, FILES_MAX))]
    assert [file.read_text()[:1] for file in files] == ["", "8", "6", "4"]
    assert all(file.stat().st_size <= 200 for file in files)
    assert not older(current, FILES_MAX).exists()


def test_a_small_file_stays_as_it_is(tmp_path: Path):
    current = tmp_path / "w1.log"
    current.write_text("small\n")

    rotate(current)
    rotate(tmp_path / "none.log")

    assert [file.name for file in tmp_path.iterdir()] == ["w1.log"]


def test_a_file_that_cannot_be_kept_is_emptied_all_the_same(tmp_path: Path):
    current = tmp_path / "w1.log"
    current.write_bytes(bytes(200))
    older(current, 1).mkdir()  # nothing can be copied there, as on a full disk
    (older(current, 1) / "x").touch()
    older(current, 2).mkdir()
    (older(current, 2) / "x").touch()

    rotate(current, bytes_max=100)

    assert current.stat().st_size == 0


def test_the_tail_of_a_huge_file_costs_little_memory(tmp_path: Path):
    current = tmp_path / "w1.log"
    with current.open("wb") as sparse:
        sparse.truncate(256 * MIB)
        sparse.seek(0, 2)
        sparse.write(b"\nthe reason\n")

    tracemalloc.start()
    lines = tail(current)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert lines[-1] == "the reason\n"
    assert peak < 4 * MIB


def test_the_tail_goes_back_into_the_rotated_file(tmp_path: Path):
    current = tmp_path / "w1.log"
    current.write_text("after\n")
    older(current, 1).write_text("before\n")

    assert tail(current) == ["before\n", "after\n"]
    assert tail(tmp_path / "none.log") == []


def test_the_logs_of_an_earlier_system_are_removed(tmp_path: Path):
    for name in ("w1.log", "w1.log.1", "notes.txt"):
        (tmp_path / name).touch()

    remove(tmp_path)

    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


VLLM_LOG = """\
INFO 11-21 07:00:00 [core.py:101] Initializing a V1 LLM engine
(EngineCore pid=12) ERROR 11-21 07:00:01 [core.py:999] ValueError: Bad heads: 3 is not divisible by 2
(EngineCore pid=12) Traceback (most recent call last):
(EngineCore pid=12)   File "x.py", line 1, in <module>
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
""".splitlines()


def test_the_root_cause_is_reported_instead_of_its_wrapper():
    assert why_it_died(VLLM_LOG, 1) == "ValueError: Bad heads: 3 is not divisible by 2"


def test_the_detail_of_the_last_status_comes_first():
    assert why_it_died(VLLM_LOG, 1, detail="no such model: /nowhere") == "no such model: /nowhere"


def test_out_of_memory_is_named():
    lines = ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"]

    assert why_it_died(lines, 1).startswith("Out of memory: OutOfMemoryError: CUDA out of memory.")


@pytest.mark.parametrize(("exit_code", "text"), [(-9, "memory ran out"), (-11, "signal 11"), (3, "code 3")])
def test_without_a_log_line_the_exit_status_is_reported(exit_code: int, text: str):
    assert text in why_it_died(["all is well"], exit_code)


def test_json_log_lines_are_shown_as_their_message():
    assert last_lines(['{"level": "error", "message": "no route", "ts": 1}', "", "plain"]) == ["no route", "plain"]


def test_a_validation_error_is_reduced_to_its_cause():
    lines = [
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, max_model_len (9) is too large [type=value_error, input_value=ArgsKwargs((), {})]",
    ]

    assert why_it_died(lines, 1, detail="1 validation error for ModelConfig") == "max_model_len (9) is too large"


def test_a_service_that_refuses_to_start_is_explained_by_its_last_line():
    assert why_it_died(["router: ROUTER_PROT is not a setting; did you mean ROUTER_PORT?"], 1) == (
        "ROUTER_PROT is not a setting; did you mean ROUTER_PORT?"
    )


def test_the_pause_grows_with_each_death_up_to_a_limit():
    history = RestartHistory(RestartPolicy(backoff_s_first=1.0, backoff_s_max=3.0))

    pauses = [history.died(now=float(n)) for n in range(4)]

    assert pauses == [Restart(1.0, 1), Restart(2.0, 2), Restart(3.0, 3), Restart(3.0, 4)]


def test_a_process_that_keeps_dying_is_started_again_for_ever():
    history = RestartHistory(RestartPolicy(backoff_s_max=30.0))

    *_, last = [history.died(now=float(n)) for n in range(5_000)]

    assert last == Restart(30.0, 5_000)


def test_after_a_long_life_the_first_pause_is_the_shortest_again():
    history = RestartHistory(RestartPolicy(settled_s=60.0, backoff_s_first=0.5))
    history.died(now=0.0)
    history.died(now=59.0)

    assert history.died(now=119.0) == Restart(0.5, 1)


async def test_logs_are_their_owners_only(tmp_path: Path):
    logs = tmp_path / "logs"
    logs.mkdir(mode=0o755)
    (logs / "w1.log").write_text("of an earlier version")
    (logs / "w1.log").chmod(0o644)
    plan = ProcessPlan(name="w1", stage=Stage.WORKERS, command=(sys.executable, "-c", "print('x' * 200)"))

    with open_child_starter(logs, dict(os.environ)) as starter:
        child = await starter.start(plan)
        await child.process.wait()
        starter.forget(child)
    rotate(logs / "w1.log", bytes_max=100)

    assert stat.S_IMODE(logs.stat().st_mode) == 0o700
    assert {file.name: stat.S_IMODE(file.stat().st_mode) for file in logs.iterdir()} == {
        "w1.log": 0o600,
        "w1.log.1": 0o600,
    }
