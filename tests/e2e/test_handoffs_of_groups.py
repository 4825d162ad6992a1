"""A system whose model has recurrent state: prompts are handed over, and turns read back, at exactly known boundaries."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.conftest import START_S_MAX
from tests.e2e.test_failures import busy, kill
from tests.e2e.test_handoffs import BLOCK, ask, grown, tokens
from tests.support.prompts import VOCABULARY
from tests.support.system import System, until

pytestmark = pytest.mark.nats

CONVERSATIONS = 4
LONG = 41 * BLOCK
"""No turn of a conversation ends at a multiple of eight blocks, at which states of answers are kept, too."""
SLOW = {"WORKER_SIMULATED": "prefill_tokens_per_s=1500,prefill_base_s=0,decode_base_s=0.002,groups=state"}
WORKERS = 3


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    fleet = ("--open", "--engine", "simulated", "--prefill", "2", "--decode", "1")
    with System(tmp_path_factory.mktemp("groups"), *fleet, env=SLOW) as system:
        yield system.wait_ready(START_S_MAX)


@pytest.fixture(autouse=True)
def all_well(system: System) -> None:
    system.until_exact(WORKERS)


def test_turns_of_conversations_are_handed_over_at_boundaries_that_the_router_knows(system: System):
    before, draw = system.fleet_metrics(), random.Random(53)
    cached = tails = 0
    for number in range(CONVERSATIONS):
        prompt, known = draw.choices(VOCABULARY, k=LONG + number * 13), 0
        for _turn in range(2):
            apart = ask(system, prompt, baton={"prefill_worker": "prefill-1"})
            system.until_exact(WORKERS)
            assert apart.headers["x-baton-handoff"] == "streamed"
            assert tokens(apart) == tokens(ask(system, prompt, "aggregated"))
            system.until_exact(WORKERS)
            assert apart.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == known
            cached += known
            known = (len(prompt) - 1) // BLOCK * BLOCK
            tails += len(prompt) - known
            prompt = prompt + draw.choices(VOCABULARY, k=2 * BLOCK)

    until(
        lambda: grown(system, before, "baton_fleet_handoffs_total", handoff="streamed") == 2 * CONVERSATIONS,
        "all handoffs are told",
    )
    assert grown(system, before, "baton_fleet_recomputed_tokens_total") == tails
    assert grown(system, before, "baton_fleet_cached_tokens_actual_total") >= cached
    assert grown(system, before, "baton_fleet_cached_tokens_missed_total") == 0


CLIENTS = 4


def test_a_prefill_worker_that_is_killed_during_handoffs_of_states_costs_no_token(system: System):
    """The router sends its prompts to the other one. The decode worker keeps no state of what had not come whole."""
    draw = random.Random(7)
    prompts = [draw.choices(VOCABULARY, k=LONG + number * 13) for number in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = [clients.submit(ask, system, prompt) for prompt in prompts]
        kill(system, busy(system, "prefill"))
        answered = [tokens(answer.result()) for answer in answers]

    assert answered == [tokens(ask(system, prompt, "aggregated")) for prompt in prompts]
    assert system.metrics().sum("baton_router_retries_total", reason="worker_lost") > 0
