"""Why a process died, in words for a person."""

from __future__ import annotations

import pytest

from services.launcher.system.failure_text import last_lines, why_it_died

VLLM_LOG = """\
INFO 11-21 07:00:00 [core.py:101] Initializing a V1 LLM engine
(EngineCore pid=12) ERROR 11-21 07:00:01 [core.py:999] ValueError: Bad heads: 3 is not divisible by 2
(EngineCore pid=12) Traceback (most recent call last):
(EngineCore pid=12)   File "x.py", line 1, in <module>
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
""".splitlines()


def test_the_root_cause_is_told_and_not_the_wrapper_around_it():
    assert why_it_died(VLLM_LOG, 1) == "ValueError: Bad heads: 3 is not divisible by 2"


def test_what_the_process_said_itself_comes_first():
    assert why_it_died(VLLM_LOG, 1, detail="no such model: /nowhere") == "no such model: /nowhere"


def test_out_of_memory_is_named():
    lines = ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"]

    assert why_it_died(lines, 1).startswith("Out of memory: OutOfMemoryError: CUDA out of memory.")


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [(-9, "memory ran out"), (-11, "signal 11"), (3, "exit code 3")],
)
def test_a_silent_death_is_told_by_its_exit_status(exit_code: int, words: str):
    assert words in why_it_died(["all is well"], exit_code)


def test_json_log_lines_are_shown_as_their_message():
    assert last_lines(['{"level": "error", "message": "no route", "ts": 1}', "", "plain"]) == ["no route", "plain"]


def test_a_validation_error_is_told_by_what_is_wrong():
    lines = [
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, max_model_len (9) is too large [type=value_error, input_value=ArgsKwargs((), {})]",
    ]

    assert why_it_died(lines, 1, detail="1 validation error for ModelConfig") == "max_model_len (9) is too large"


def test_a_service_that_refuses_to_start_is_told_by_its_last_words():
    assert why_it_died(["router: ROUTER_PROT is not a setting; did you mean ROUTER_PORT?"], 1) == (
        "ROUTER_PROT is not a setting; did you mean ROUTER_PORT?"
    )
