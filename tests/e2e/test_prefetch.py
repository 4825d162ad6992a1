"""Prefetches that clients order, on a whole system: what is fetched is found, by requests of the same tenant only."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.system import System, baton, until

pytestmark = pytest.mark.nats

MODEL = "baton-tiny"
TOKENS = 3000
BLOCK = 32
FULL = TOKENS // BLOCK * BLOCK
HOLDER, READER = "decode-1", "prefill-1"
TO_READER = {"mode": "disaggregated", "prefill_worker": READER, "sources": [HOLDER]}
"""Named, because simulated engines may be predicted to compute as fast as they read."""


def draw(name: str) -> list[int]:
    return random.Random(name).choices(range(3, 500), k=TOKENS)


def ask(system: System, prompt: Any, *, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    return system.http.post(path, json={"model": MODEL, "prompt": prompt, "max_tokens": 1, **fields})


def compute(system: System, prompt: list[int]) -> None:
    """Have the holder compute the prompt, until the router knows."""
    forced = {"mode": "aggregated", "decode_worker": HOLDER}

    def is_known() -> bool:
        answer = ask(system, prompt, baton=forced).raise_for_status().json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= FULL - BLOCK

    until(is_known, "the holder has the prompt")


def order(system: System, prompt: list[int], **fields: Any) -> dict[str, Any]:
    wanted = {"prefetch": True, **TO_READER, **fields}
    return ask(system, prompt, baton=wanted).raise_for_status().json()  # type: ignore[no-any-return]


def blocks(system: System, outcome: str) -> float:
    return system.fleet_metrics().sum("baton_worker_prefetched_blocks_total", worker_id=READER, outcome=outcome)


def test_what_is_prefetched_is_not_fetched_by_the_next_turn(simulated: System):
    prompt = draw("next turn")
    compute(simulated, prompt)
    before = {outcome: blocks(simulated, outcome) for outcome in ("fetched", "used", "wasted")}

    found = order(simulated, prompt)

    assert found["object"] == "baton.prefetch"
    assert (found["worker"], found["prompt_tokens"], found["reason"]) == (READER, TOKENS, "")
    assert found["held_tokens"] + found["fetched_tokens"] == FULL
    assert found["fetched_tokens"] == FULL
    assert found["missing_tokens"] == TOKENS - FULL
    again = order(simulated, prompt)
    assert (again["held_tokens"], again["fetched_tokens"]) == (FULL, 0)

    until(lambda: blocks(simulated, "fetched") - before["fetched"] == FULL // BLOCK, "fetched blocks are told")
    turn = ask(simulated, [*prompt, *draw("more")[:100]], baton={"prefill_worker": READER, "mode": "disaggregated"})
    assert turn.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == FULL
    until(lambda: blocks(simulated, "used") - before["used"] == FULL // BLOCK, "used blocks are told")
    assert blocks(simulated, "wasted") == before["wasted"]


def test_without_a_prefetch_the_next_turn_fetches(simulated: System):
    prompt = draw("without")
    compute(simulated, prompt)

    turn = ask(simulated, [*prompt, *draw("more")[:100]], baton=TO_READER)

    assert turn.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_prefetch_is_explained_and_counted_but_is_no_request_with_latencies(simulated: System):
    prompt = draw("explained")
    compute(simulated, prompt)
    before = simulated.metrics()

    response = ask(simulated, prompt, baton={"prefetch": True, **TO_READER})

    decision = response.headers["x-baton-decision"]
    code, out, err = baton("explain", decision, "--url", simulated.endpoint)
    assert code == 0, err
    assert f"ordered a prefetch, on {READER}" in out
    assert f"read {FULL:,}" in out, (response.text, out)
    after = simulated.metrics()
    assert after.sum("baton_router_prefetches_total", outcome="done") == 1 + before.sum(
        "baton_router_prefetches_total", outcome="done"
    )
    for name in ("baton_router_ttft_seconds_count", "baton_router_e2e_seconds_count"):
        assert after.sum(name) == before.sum(name)


def test_nothing_is_fetched_of_what_no_worker_has(simulated: System):
    found = order(simulated, draw("unknown"), sources=None)

    assert (found["held_tokens"], found["fetched_tokens"], found["missing_tokens"]) == (0, 0, TOKENS)
    assert "no other worker has more of it" in found["reason"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"baton": {"prefetch": 1}}, "baton.prefetch"),
        ({"baton": {"prefetch": "yes"}}, "baton.prefetch"),
        ({"baton": {"prefetch": True}, "stream": True}, "stream"),
        ({"baton": {"prefetch": True}, "n": 2}, "baton.prefetch"),
        ({"baton": {"prefetch": True}, "prompt": [[3, 4], [5, 6]]}, "baton.prefetch"),
        ({"baton": {"prefetch": True, "decode_worker": "nobody"}}, "baton.decode_worker"),
    ],
)
def test_orders_that_cannot_be_carried_out_are_400(simulated: System, fields: dict[str, Any], param: str):
    refused = ask(simulated, **{"prompt": "hello", **fields})

    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param


def test_a_prompt_that_the_engine_refuses_is_not_fetched(simulated: System):
    prompt = draw("too large a token")
    compute(simulated, prompt)

    found = order(simulated, [*prompt, 1 << 40])

    assert found["fetched_tokens"] == 0
    assert found["reason"]


def test_a_chat_and_a_response_that_continues_another_are_prefetched(simulated: System):
    words = random.Random("chat").choices(("relay", "runner", "track", "lane", "curve"), k=900)
    chat = [{"role": "user", "content": " ".join(words)}]
    body = {"model": MODEL, "max_tokens": 1, "messages": chat, "baton": {"mode": "aggregated", "decode_worker": HOLDER}}
    until(lambda: _cached(simulated.http.post("/v1/chat/completions", json=body)) > 500, "the holder has the chat")

    wanted = {"prefetch": True, **TO_READER}
    found = simulated.http.post("/v1/chat/completions", json={**body, "baton": wanted}).json()
    assert found["fetched_tokens"] > 500, found

    first = {"model": MODEL, "input": " ".join(reversed(words)), "max_output_tokens": 1, "baton": body["baton"]}
    kept = simulated.http.post("/v1/responses", json=first).raise_for_status().json()["id"]
    after = {"model": MODEL, "input": "And then?", "previous_response_id": kept, "baton": wanted}
    turn = until(lambda: _fetched(simulated.http.post("/v1/responses", json=after)), "the history is fetched")
    assert turn["object"] == "baton.prefetch"


def _cached(answer: httpx.Response) -> int:
    return int(answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def _fetched(answer: httpx.Response) -> dict[str, Any] | None:
    found: dict[str, Any] = answer.raise_for_status().json()
    return found if found["fetched_tokens"] > 500 else None


def test_the_command_prefetches_and_says_what_is_wrong(simulated: System, tmp_path: Path):
    prompt = draw("command")
    compute(simulated, prompt)
    file = tmp_path / "body.json"
    wanted = TO_READER
    file.write_text(json.dumps({"model": MODEL, "prompt": prompt, "baton": wanted}))

    code, out, err = baton("prefetch", str(file), "--url", simulated.endpoint)
    assert code == 0, err
    assert f"{READER} had 0 of {TOKENS:,} tokens and has read {FULL:,}" in out

    code, out, err = baton("prefetch", str(file), "--url", simulated.endpoint, "--json")
    assert code == 0, err
    assert json.loads(out)["held_tokens"] >= FULL - BLOCK

    (tmp_path / "empty").write_text(" \n")
    for arguments, said in (
        ((str(tmp_path / "none"),), "No such file"),
        ((str(tmp_path / "empty"),), "there is no prompt"),
        ((str(file), "--model", "nobody"), "does not exist"),
    ):
        code, _out, err = baton("prefetch", *arguments, "--url", simulated.endpoint)
        assert code == 1
        assert said in err
