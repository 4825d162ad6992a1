"""What the router predicts of the time to the first token, held against what it measures. The nightly
``test_predictions_of_modes.py`` has the other modes.
"""

from __future__ import annotations

import random
from statistics import median
from typing import Any

import pytest

from tests.engines.system.fleet import DECODE, PREFILL, Client, Fleet, client_of
from tests.support.kv_driver import MODEL
from tests.support.prompts import VOCABULARY

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

OK = 200
LENGTHS = (200, 700, 1500)
TAIL = 40
"""Tokens after a prompt that decode-1 has cached."""
TOKENS_OUT = 8
REQUESTS = 20
"""An engine's speed is right after so many prompts, whatever its start was like."""
BEFORE_PLACEMENT = ("admission_s", "tokenize_s", "place_s", "failed_s")
SETTLED_S_MAX = 10.0
RATIO_MIN, RATIO_MAX = 0.8, 1.25
ATTEMPTS = 3
"""The first one may learn; and on a busy machine the times of one moment say little of the next one."""


async def test_the_median_prediction_is_near_what_is_measured(fleet: Fleet):
    await prove_predictions(fleet, "disaggregated", "streamed")


async def prove_predictions(fleet: Fleet, mode: str, handoff: str) -> None:
    """``handoff`` is a key of ``Fleet.endpoints``."""
    draw = random.Random(f"{mode} {handoff}")
    async with client_of(fleet) as client:

        async def decided(number: int) -> dict[str, Any]:
            prompt = draw.choices(VOCABULARY, k=LENGTHS[number % len(LENGTHS)])
            if mode == "decode_first":
                await asked(client, prompt, "disaggregated", handoff)
                prompt += draw.choices(VOCABULARY, k=TAIL)
            decision = await asked(client, prompt, mode, handoff)
            assert (decision["mode"], decision["outcome"]) == (mode, "ok"), decision
            return decision

        for _ in range(ATTEMPTS):
            decisions = [await decided(number) for number in range(REQUESTS)]
            ratio = median(map(ratio_of, decisions))
            print(
                f"\n{mode}, {handoff}: {ratio:.2f}", *(medians(decisions, name) for name in ("predicted", "measured"))
            )
            if RATIO_MIN <= ratio <= RATIO_MAX:
                break

    assert RATIO_MIN <= ratio <= RATIO_MAX


async def asked(client: Client, prompt: list[int], mode: str, handoff: str) -> dict[str, Any]:
    """The decision about a request, once the workers have told that they are idle again: the next prediction then
    knows what they do.
    """
    loads = client.tap.loads
    answered = loads[DECODE].generation_tokens_total + TOKENS_OUT
    url = client.fleet.endpoints[handoff]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS_OUT, "ignore_eos": True, "stream": True}
    if mode == "aggregated":
        body["cache_hit_threshold"] = 0.0  # By their own the workers would refuse it once.
    async with client.http.stream("POST", f"{url}/v1/completions", json=body, headers={"x-baton-mode": mode}) as reply:
        assert reply.status_code == OK, await reply.aread()
        await reply.aread()
    await client.tap.until(
        lambda: (
            loads[DECODE].generation_tokens_total >= answered
            and not any(
                loads[name].running or loads[name].waiting_tokens or loads[name].legs for name in (PREFILL, DECODE)
            )
        ),
        "the workers are idle",
        SETTLED_S_MAX,
    )
    return (await client.http.get(f"{url}/baton/decisions/{reply.headers['x-baton-decision']}")).json()


def ratio_of(decision: dict[str, Any]) -> float:
    """As ``baton_router_predicted_to_measured_ttft_ratio`` has it."""
    since_s = decision["ttft_s"] - sum(decision["measured"][name] for name in BEFORE_PLACEMENT)
    return sum(decision["predicted"].values()) / since_s


def medians(decisions: list[dict[str, Any]], name: str) -> str:
    """Of each part, in milliseconds."""
    parts = {part: 1e3 * median(one[name][part] for one in decisions) for part in decisions[0][name]}
    return f"{name}: " + ", ".join(f"{part} {ms:.1f}" for part, ms in parts.items() if ms >= 0.05)
