"""A disaggregated request gets the response of one worker alone, and its counts show both workers."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest
from hypothesis import given

from tests.support.examples import SEEDS, seeded
from tests.support.prompts import VOCABULARY, prompts_with_shared_prefixes
from tests.support.system import System, until

pytestmark = pytest.mark.nats

MODEL = "baton-tiny"
BLOCK = 32
LONG = 5000
"""A prompt that even these fast engines compute for longer than requests are on their way, on a busy machine."""
NOTHING_FETCHED = {"kv_fetch_min_tokens": 1_000_000}
"""Who has a prompt is asked to compute it, and nobody else, however fast KV could be read."""


def send(system: System, prompt: list[int], mode: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 48, "ignore_eos": True, "logprobs": 0, **fields}
    answer = system.http.post("/v1/completions", json=body, headers={"x-baton-mode": mode})
    assert answer.status_code == 200, answer.text
    return answer


def listens_on_loopback_alone(system: System) -> None:
    """Raises AssertionError if a process accepts connections or datagrams elsewhere."""
    found = system.addresses()
    assert set(found) == {"127.0.0.1"}, found
    commands = " ".join(found["127.0.0.1"])
    assert all(name in commands for name in ("nats-server", "services.router", "services.collector", "services.worker"))


def test_no_process_of_a_system_on_loopback_listens_elsewhere(simulated: System):
    """NIXL's ports too."""
    listens_on_loopback_alone(simulated)


def tokens(answer: httpx.Response) -> list[str]:
    return answer.json()["choices"][0]["logprobs"]["tokens"]


def streamed_text(answer: httpx.Response) -> str:
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


@seeded(2)
@given(seed=SEEDS)
def test_disaggregated_tokens_equal_aggregated_ones(simulated: System, seed: int):
    prompts = prompts_with_shared_prefixes(seed, shortest=1)
    for number, prompt in enumerate(prompts):
        streamed = send(simulated, prompt, "disaggregated", stream=True, cache_salt="streamed")
        apart = send(simulated, prompt, "disaggregated")
        whole = send(simulated, prompt, "aggregated")

        assert whole.headers["x-baton-mode"] == "aggregated"
        assert apart.headers["x-baton-decode-worker"].startswith("decode-")
        if number % 2 and "x-baton-handoff" not in apart.headers:
            full = len(prompt) // BLOCK * BLOCK
            assert any(earlier[:full] == prompt[:full] for earlier in prompts[:number])
        elif len(prompt) >= BLOCK:
            assert apart.headers["x-baton-mode"] == "disaggregated"
            assert apart.headers["x-baton-prefill-worker"].startswith("prefill-")
        assert tokens(apart) == tokens(whole)
        assert streamed_text(streamed) == whole.json()["choices"][0]["text"]


def test_a_decode_worker_computes_only_the_tail_of_what_it_receives(simulated: System):
    prompt = random.Random(11).choices(VOCABULARY, k=40 * BLOCK + 5)
    before = simulated.fleet_metrics()

    worker = send(simulated, prompt, "disaggregated").headers["x-baton-decode-worker"]

    def grown(source: str) -> float:
        name, labels = "baton_worker_prompt_tokens_total", {"worker_id": worker, "source": source}
        return simulated.fleet_metrics().sum(name, **labels) - before.sum(name, **labels)

    until(lambda: grown("received"), "the worker reports what it received")
    assert grown("received") == 40 * BLOCK
    assert grown("computed") == 5
    received_bytes = simulated.fleet_metrics().sum("baton_worker_kv_received_bytes_total", worker_id=worker)
    assert received_bytes > before.sum("baton_worker_kv_received_bytes_total", worker_id=worker)


@pytest.mark.parametrize("mode", ["auto", "disaggregated"])
def test_prompts_without_a_block_to_hand_over_are_computed_once(simulated: System, mode: str):
    def computed() -> dict[str, float]:
        name = "baton_worker_prompt_tokens_total"
        metrics = simulated.fleet_metrics()
        return {
            role: sum(metrics.sum(name, worker_id=f"{role}-{number}", source="computed") for number in (1, 2))
            for role in ("prefill", "decode")
        }

    simulated.until_idle()
    draw, before = random.Random(mode), computed()
    answers = [send(simulated, draw.choices(VOCABULARY, k=20), mode) for _ in range(20)]

    assert {answer.headers["x-baton-mode"] for answer in answers} == {"aggregated"}
    assert not any("x-baton-handoff" in answer.headers for answer in answers)
    until(lambda: computed()["decode"] >= before["decode"] + 400, "the workers report what they computed")
    assert computed() == {"prefill": before["prefill"], "decode": before["decode"] + 400}
    told = simulated.http.get(f"/baton/decisions/{answers[-1].headers['x-baton-decision']}").json()
    assert told["reason"] == "there is less than one block of KV to hand over"


def test_usage_counts_tokens_cached_before_the_request(simulated: System):
    prompt = random.Random(12).choices(VOCABULARY, k=20 * BLOCK + 3)

    first, second = (send(simulated, prompt, "disaggregated").json()["usage"] for _ in range(2))

    assert first["prompt_tokens"] == second["prompt_tokens"] == len(prompt)
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == 20 * BLOCK


def test_a_repeated_prompt_goes_to_the_worker_that_has_it(simulated: System):
    draw = random.Random(13)
    prompts = [draw.choices(VOCABULARY, k=LONG) for _ in range(8)]
    homes = [draw.choice(("prefill-1", "prefill-2")) for _ in prompts]
    for prompt, home in zip(prompts, homes, strict=True):
        send(simulated, prompt, "disaggregated", baton={"prefill_worker": home})
    simulated.until_idle()
    simulated.until_exact(4)
    before = simulated.metrics()

    again = []
    for prompt in prompts:
        # The decode worker has all of the prompt, and lacks what comes after it.
        longer = prompt + draw.choices(VOCABULARY, k=2 * BLOCK)
        again.append(send(simulated, longer, "disaggregated", **NOTHING_FETCHED).headers["x-baton-prefill-worker"])
        simulated.until_idle()  # a load report may be a tenth of a second old, and queues count, too

    at_home = sum(one == home for one, home in zip(again, homes, strict=True))
    assert at_home >= len(prompts) - 1, "now and then another one is found that much faster"
    after = simulated.metrics()
    predicted, actual = (
        after.sum(name) - before.sum(name)
        for name in ("baton_router_cached_tokens_predicted_total", "baton_router_cached_tokens_actual_total")
    )
    assert predicted == actual >= at_home * (LONG // BLOCK * BLOCK)


def test_a_longer_chat_goes_where_its_beginning_is(simulated: System):
    messages = [{"role": "user", "content": "The relay team asks its coach a long question. " * 400}]
    workers, cached = set(), []
    for _ in range(4):
        body = {"model": MODEL, "messages": messages, "max_tokens": 16, **NOTHING_FETCHED}
        apart = {"x-baton-mode": "disaggregated"}
        answer = simulated.http.post("/v1/chat/completions", json=body, headers=apart)
        workers.add(answer.headers["x-baton-prefill-worker"])
        cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        simulated.until_idle()
        said = answer.json()["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on, please. " * 10}]

    assert len(workers) == 1
    assert cached[0] == 0
    assert sorted(cached) == cached
    assert cached[-1] > LONG / 2


def test_what_a_decode_worker_has_most_of_it_answers_alone(simulated: System):
    prompt = random.Random(17).choices(VOCABULARY, k=160 * BLOCK + 5)
    first = send(simulated, prompt, "disaggregated")
    simulated.until_idle()
    simulated.until_exact(4)

    again = send(simulated, prompt, "auto")

    assert again.headers["x-baton-mode"] == "decode_first"
    assert again.headers["x-baton-decode-worker"] == first.headers["x-baton-decode-worker"]
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 160 * BLOCK
    assert tokens(again) == tokens(first)


@pytest.mark.parametrize(
    "field", [{"n": 2}, {"echo": True}, {"prompt_logprobs": 1}, {"prompt": [[11, 12], [13]]}], ids=str
)
def test_what_cannot_be_split_is_served_whole(simulated: System, field: dict[str, Any]):
    body = {"model": MODEL, "prompt": [11, 12, 13], "max_tokens": 4, **field}

    answer = simulated.http.post("/v1/completions", json=body)

    assert answer.status_code == 200, answer.text
    assert answer.headers["x-baton-mode"] == "aggregated"
