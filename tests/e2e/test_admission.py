"""Overload on a real bus: requests that cannot be served in time are rejected with Retry-After, and no tenant takes
everything.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import START_S_MAX
from tests.support.system import System, until

pytestmark = pytest.mark.nats

MODEL = "baton-tiny"
TOKENS = 500
PROMPT_S = 0.25
"""Such a prompt takes its engine so long."""
TARGET_S = 6.0
SLOS = {"classes": {"quick": {"ttft_s": TARGET_S}, "patient": {"priority": 10}}}
SOME = 4
BURST = 96
"""Requests at once: 24 s of work, so that the line is long enough also when a busy machine is late to ask."""
LINE = 48
"""Without a target all of them are served, which takes 12 s."""
ENGINE = {"WORKER_SIMULATED": f"prefill_tokens_per_s={TOKENS / PROMPT_S},decode_base_s=0.001"}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One slow worker, targets, and room for all to wait."""
    folder = tmp_path_factory.mktemp("admission")
    env = {**ENGINE, "ROUTER_SLOS": json.dumps(SLOS)}
    with System(folder, "--engine", "simulated", "--both", "1", env=env) as system:
        yield system.wait_ready(START_S_MAX)


@pytest.fixture(autouse=True)
def idle(system: System) -> None:
    system.until_idle()


def ask(system: System, tenant: str = "", **fields: Any) -> httpx.Response:
    """A prompt that nobody has cached."""
    prompt = [random.randrange(3, 500) for _ in range(TOKENS)]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "stream": True, **fields}
    headers = {"x-baton-tenant": tenant} if tenant else {}
    return system.http.post("/v1/completions", json=body, headers=headers)


def burst(clients: ThreadPoolExecutor, system: System, **fields: Any) -> list[Future[httpx.Response]]:
    asks = [clients.submit(ask, system, **fields) for _ in range(LINE)]
    until(lambda: system.metrics().sum("baton_router_requests_waiting") > LINE / 4, "some wait")
    return asks


def served(system: System) -> float:
    return system.metrics().sum("baton_router_requests_total", status="200")


def test_in_an_overload_those_that_are_served_are_served_in_time(system: System):
    before = served(system)
    with ThreadPoolExecutor(BURST + SOME) as clients:
        asks = [clients.submit(ask, system, baton={"class": "quick"}) for _ in range(BURST)]
        until(lambda: queue_is_full(system, before), "nobody who comes now can be served in time")
        late = [clients.submit(ask, system, baton={"class": "quick"}) for _ in range(SOME)]
        answers = [one.result() for one in (*asks, *late)]

    ended_well = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 503]
    assert len(ended_well) + len(refused) == len(answers)
    assert len(ended_well) >= 0.25 * TARGET_S / PROMPT_S
    told_after_s = [one.result().elapsed.total_seconds() for one in late if one.result().status_code == 503]
    assert min(told_after_s) < TARGET_S / 2
    retry_after = [int(answer.headers["retry-after"]) for answer in refused]
    assert 1 <= min(retry_after) <= max(retry_after) <= 60
    assert max(retry_after) >= 2
    metrics = system.metrics()
    in_time = metrics.sum("baton_router_time_to_first_token_seconds_bucket", le="10.0")
    assert in_time == metrics.sum("baton_router_time_to_first_token_seconds_count")
    assert metrics.sum("baton_router_refusals_total", reason="overloaded") == len(refused)


def queue_is_full(system: System, served_before: float) -> bool:
    """Somebody was refused, which a busy machine's clients come late enough for, or so many wait that some will be, and it
    is known how fast the line moves.
    """
    metrics = system.metrics()
    if metrics.sum("baton_router_refusals_total", reason="overloaded"):
        return True
    return metrics.sum("baton_router_requests_waiting") > BURST / 4 and served(system) >= served_before + SOME


def test_without_a_target_all_of_them_wait_and_are_served(system: System):
    with ThreadPoolExecutor(LINE) as clients:
        answers = [one.result() for one in burst(clients, system)]

    assert {answer.status_code for answer in answers} == {200}
    assert system.metrics().sum("baton_router_requests_waiting") == 0


def test_a_modest_tenant_is_served_while_a_greedy_one_waits(system: System):
    with ThreadPoolExecutor(LINE) as clients:
        greedy = burst(clients, system, tenant="greedy")
        modest = [ask(system, tenant="modest") for _ in range(3)]
        left = sum(not one.done() for one in greedy)
        statuses = {one.result().status_code for one in greedy}

    assert [answer.status_code for answer in modest] == [200] * 3
    assert statuses == {200}
    # It waited for what the engine had before, each time, and not for the greedy one's queue.
    assert left > LINE / 4


def test_a_class_with_a_late_target_waits_behind_all_others(system: System):
    with ThreadPoolExecutor(LINE) as clients:
        patient = burst(clients, system, baton={"class": "patient"})
        answer = ask(system)
        left = sum(not one.done() for one in patient)
        assert {one.result().status_code for one in patient} == {200}

    assert answer.status_code == 200
    assert left > LINE / 4
