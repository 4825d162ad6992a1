"""The planner moves a worker from one role to the other, and back, when the load turns: no request is lost, and every
answer is the right one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import START_S_MAX
from tests.e2e.test_planner import FAST, count, plans
from tests.nightly.chaos.oracle import Oracle
from tests.support.system import System, until
from tests.support.turning_load import Load

pytestmark = pytest.mark.nats

SHIFTED_S_MAX = 120.0
TARGETS = {"ORCHESTRATOR_PLANNER": "act", "ORCHESTRATOR_PLANNER_ITL_S": "0.05"}
ENGINES = {"WORKER_SIMULATED": "prefill_tokens_per_s=1500,decode_base_s=0.01,decode_per_sequence_s=0.01"}
"""A batch of five sequences is as large as the target between tokens allows."""


def test_a_worker_changes_its_role_with_the_load_and_no_request_is_lost(tmp_path: Path):
    prompts = Load(clients=4, prompt_words=150, answer_tokens=4)
    answers = Load(clients=12, prompt_words=8, answer_tokens=40)
    fleet = ("--engine", "simulated", "--model", "baton-tiny", "--prefill", "2", "--decode", "1")
    with System(tmp_path / "system", *fleet, env={**FAST, **TARGETS, **ENGINES}) as system:
        system.wait_ready(START_S_MAX)

        with answers.on(system):
            until(lambda: count(system, "decode") == 2, "a prefill worker decodes now", SHIFTED_S_MAX)
            answers.until_served()
        with prompts.on(system):
            until(lambda: count(system, "prefill") == 2, "a decode worker computes prompts again", SHIFTED_S_MAX)
            prompts.until_served()
        changes = [each["role"] for each in plans(system) if each["action"] == "change_role"]

    assert changes == ["prefill", "decode"]
    oracle = Oracle(tmp_path)
    for load in (answers, prompts):
        load.check(lambda prompt, load=load: oracle.text(oracle.answer(oracle.tokens(prompt), load.answer_tokens)))
