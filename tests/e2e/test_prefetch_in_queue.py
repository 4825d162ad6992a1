"""A request that waits in the router for a worker finds its KV there when it begins."""

from __future__ import annotations

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
BUSY, HOLDER = "both-1", "both-2"
TOKENS, BLOCK = 3000, 32
FULL = TOKENS // BLOCK * BLOCK
FILLER_TOKENS, FILLERS = 500, 24
"""Six seconds of work."""
ENGINE = {"WORKER_SIMULATED": "prefill_tokens_per_s=2000,decode_base_s=0.001"}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("queue")
    with System(folder, "--engine", "simulated", "--both", "2", env=ENGINE) as system:
        system.wait_ready(START_S_MAX).until_exact(2)
        yield system


def draw(name: str, count: int = TOKENS) -> list[int]:
    return random.Random(name).choices(range(3, 500), k=count)


def ask(system: System, worker: str, prompt: list[int]) -> httpx.Response:
    wanted = {"mode": "aggregated", "decode_worker": worker}
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "baton": wanted}
    return system.http.post("/v1/completions", json=body).raise_for_status()


def cached(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def decision_of(system: System, answer: httpx.Response) -> dict[str, Any]:
    name = answer.headers["x-baton-decision"]
    return dict(system.http.get(f"/baton/decisions/{name}").raise_for_status().json())


def test_what_a_waiting_request_would_fetch_is_there_when_it_begins(system: System):
    prompt = draw("waits")
    until(lambda: cached(ask(system, HOLDER, prompt)) >= FULL - BLOCK, "the holder has the prompt")
    with ThreadPoolExecutor(FILLERS) as clients:
        fillers: list[Future[httpx.Response]] = [
            clients.submit(ask, system, BUSY, draw(f"filler {number}", FILLER_TOKENS)) for number in range(FILLERS)
        ]
        until(lambda: system.metrics().sum("baton_router_requests_waiting") > 2, "some wait")
        answer = ask(system, BUSY, prompt)
        assert {one.result().status_code for one in fillers} == {200}

    decision = decision_of(system, answer)
    assert decision["prefetch"]["worker_id"] == BUSY
    assert (decision["prefetch"]["fetched_tokens"], decision["prefetch"].get("failure", "")) == (FULL, "")
    assert not decision["prefetch"].get("is_order", False)
    assert cached(answer) == FULL, "nothing was left for the request to fetch"
    assert system.metrics().sum("baton_router_prefetches_total", outcome="done") == 1
    blocks = lambda outcome: system.fleet_metrics().sum(  # noqa: E731
        "baton_worker_prefetched_blocks_total", worker_id=BUSY, outcome=outcome
    )
    until(lambda: (blocks("fetched"), blocks("used")) == (FULL // BLOCK, FULL // BLOCK), "used blocks are told")


def test_a_request_that_does_not_wait_is_not_prefetched(system: System):
    system.until_idle()
    prompt = draw("does not wait")
    until(lambda: cached(ask(system, HOLDER, prompt)) >= FULL - BLOCK, "the holder has the prompt")
    before = system.metrics().sum("baton_router_prefetches_total")

    answer = ask(system, BUSY, prompt)

    assert cached(answer) == 0, "its own leg fetched it"
    assert decision_of(system, answer)["prefetch"] is None
    assert system.metrics().sum("baton_router_prefetches_total") == before
