"""The planner moves a worker with a real engine to the role that the load needs, and its answers stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_planner import FAST, count, plans
from tests.support.system import System, until
from tests.support.turning_load import Load

pytestmark = pytest.mark.vllm

START_S_MAX, SHIFTED_S_MAX = 600.0, 180.0
TARGETS = {"ORCHESTRATOR_PLANNER": "act", "ORCHESTRATOR_PLANNER_ITL_S": "0", "WORKER_LEGS_MAX": "3"}
"""However fast the engines of this machine are, three requests at a time are all that one takes."""
COMPARED = 12
"""Answers that are compared with those to the same prompts, asked one after the other."""


def test_a_real_engine_decodes_when_the_load_turns_to_long_answers(tmp_path: Path):
    answers = Load(clients=8, prompt_words=8, answer_tokens=100)
    fleet = ("--model", "baton-tiny", "--prefill", "2", "--decode", "1")
    with System(tmp_path, *fleet, env={**FAST, **TARGETS}) as system:
        system.wait_ready(START_S_MAX)

        with answers.on(system):
            until(lambda: count(system, "decode") == 2, "a prefill worker decodes now", SHIFTED_S_MAX)
            answers.until_served()

        moved = [each["worker_id"] for each in plans(system) if each["action"] == "change_role"]
        assert len(moved) == 1
        metrics = system.settled_metrics()
        served = metrics.sum("baton_worker_generation_tokens_total", worker_id=moved[0], role="decode")
        assert served > 0, "the moved worker has generated nothing"
        assert {status for _prompt, status, _text in answers.answers} == {200}
        for prompt, status, text in answers.answers[-COMPARED:]:
            assert answers.ask(system, prompt) == (status, text)
