"""The KV exchange as clients see it, between simulated workers: streamed handoffs, read-back, and the threshold."""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest

from tests.support.prompts import VOCABULARY
from tests.support.system import System, until

pytestmark = pytest.mark.nats

MODEL = "baton-tiny"
BLOCK = 32
LONG = 40 * BLOCK + 5
HISTORY = 80 * BLOCK


def ask(system: System, prompt: list[int], mode: str = "disaggregated", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 16, "ignore_eos": True, "logprobs": 0, **fields}
    return system.http.post("/v1/completions", json=body, headers={"x-baton-mode": mode})


def tokens(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["logprobs"]["tokens"]


def grown(system: System, before, name: str, **labels: str) -> float:
    return system.fleet_metrics().sum(name, **labels) - before.sum(name, **labels)


@pytest.mark.parametrize("length", [LONG, 10 * BLOCK])
def test_prompts_are_handed_over_as_they_are_computed(simulated: System, length: int):
    prompt = random.Random(length).choices(VOCABULARY, k=length)
    before = simulated.fleet_metrics()

    apart = ask(simulated, prompt)
    whole = ask(simulated, prompt, "aggregated")

    assert apart.headers["x-baton-handoff"] == "streamed"
    assert "x-baton-handoff" not in whole.headers
    assert tokens(apart) == tokens(whole)
    until(
        lambda: grown(simulated, before, "baton_fleet_handoffs_total", handoff="streamed") == 1,
        "a streamed handoff is told",
    )
    assert grown(simulated, before, "baton_fleet_recomputed_tokens_total") <= BLOCK
    until(
        lambda: grown(simulated, before, "baton_worker_first_tokens_received_total") >= 1,
        "the answer began with the prefill worker's token",
    )


def test_what_a_decode_worker_holds_of_a_conversation_is_read_back(simulated: System):
    draw = random.Random(31)
    history, question = draw.choices(VOCABULARY, k=HISTORY), draw.choices(VOCABULARY, k=40)
    tokens(ask(simulated, history, "aggregated", baton={"decode_worker": "decode-1"}))
    simulated.until_idle()
    simulated.until_exact(4)
    before = simulated.fleet_metrics()

    # Whether that ends sooner than to compute it is placement's to decide, by what it has seen: here it is told to.
    answer = ask(simulated, history + question, "disaggregated", baton={"sources": ["decode-1"]})

    until(lambda: grown(simulated, before, "baton_fleet_readback_tokens_total") > 0, "what was read back is told")
    assert grown(simulated, before, "baton_fleet_readback_tokens_total") == HISTORY
    assert tokens(answer) == tokens(ask(simulated, history + question, "aggregated"))


def test_a_cold_cache_is_refused_below_the_clients_threshold(simulated: System):
    prompt = random.Random(32).choices(VOCABULARY, k=10 * BLOCK)

    refused = ask(simulated, prompt, "aggregated", cache_hit_threshold=0.8)

    assert refused.status_code == 200, refused.text
    assert refused.json()["choices"][0]["finish_reason"] == "cache_threshold"
    assert refused.json()["usage"].get("completion_tokens", 0) == 0


@pytest.mark.parametrize("field", [{"cache_hit_threshold": 1.5}, {"kv_fetch_min_tokens": -1}], ids=str)
def test_fields_without_meaning_are_refused_by_name(simulated: System, field: dict[str, Any]):
    answer = ask(simulated, [11, 12], **field)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(field)))
