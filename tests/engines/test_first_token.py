"""An answer begins with the token that the prefill leg sampled, and goes on as if one engine had made it."""

from __future__ import annotations

import asyncio
import random
from itertools import count

import pytest

from shared.contracts.ids import LegId
from shared.contracts.inference import LegKind
from tests.engines.test_exchange import BLOCK, CHAT, adds_up, source
from tests.engines.test_handover import completion, prompt_of

pytestmark = pytest.mark.vllm

seeds = count(9000)
"""A prompt of its own for each test: nothing of it is cached."""
FOLLOWED, OFFERED = "followed", "offered"
HANDOFFS = pytest.mark.parametrize("handoff", [FOLLOWED, OFFERED])


async def handed_over(router, pair, body, handoff, **more):
    """Reports of both legs."""
    if handoff == OFFERED:
        return await router.handed_over(*pair, body, **more)
    prefill, decode = pair
    leg_id = LegId(f"leg-{next(seeds)}")
    return await asyncio.gather(
        router.leg(prefill, LegKind.PREFILL, body, kv_offer=False, leg_id=leg_id, **more),
        router.leg(decode, LegKind.DECODE, body, kv_sources=[source(prefill, follow=True, leg_id=leg_id)], **more),
    )


@HANDOFFS
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"repetition_penalty": 1.5},
        {"logit_bias": {"65": 5.0}},
        {"min_tokens": 5, "ignore_eos": False},
        {"max_tokens": 2},
    ],
    ids=str,
)
async def test_the_answer_begins_with_the_prefill_legs_token(pair, router, handoff, stream, more):
    body = completion(prompt_of(300, seed=next(seeds)), stream=stream)
    body |= more

    _first, second = await handed_over(router, pair, body, handoff)
    alone = await router.leg(pair[0], LegKind.AGGREGATED, body)

    assert second.report.kv.first_token_received
    assert second.token_ids == alone.token_ids
    assert second.text() == alone.text()
    assert second.report.finish_reason == alone.report.finish_reason
    assert second.report.completion_tokens == alone.report.completion_tokens
    assert adds_up(second.report.kv)
    assert second.report.kv.prompt_tokens == second.report.prompt_tokens == alone.report.prompt_tokens


@HANDOFFS
async def test_nothing_of_a_prompt_of_whole_blocks_is_computed_again(pair, router, handoff):
    tokens = random.Random(next(seeds)).choices(range(100, 250), k=6 * BLOCK)
    body = completion(tokens)

    first, second = await handed_over(router, pair, body, handoff)
    alone = await router.leg(pair[0], LegKind.AGGREGATED, body)

    assert second.token_ids == alone.token_ids
    told = second.report.kv
    assert (told.prompt_tokens, told.fetched_tokens, told.recomputed_tokens) == (6 * BLOCK, 6 * BLOCK, 0)
    assert first.report.kv.recomputed_tokens == 6 * BLOCK


@HANDOFFS
@pytest.mark.parametrize(
    "more",
    [
        {"seed": 7, "temperature": 1.0},
        {"logprobs": 1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"structured_outputs": {"regex": "[ab]{3}"}},
        {"max_tokens": 1},
    ],
    ids=lambda more: next(iter(more)),
)
async def test_a_request_that_needs_its_own_first_token_samples_it(pair, router, handoff, more):
    body = completion(prompt_of(200, seed=next(seeds))) | more

    _first, second = await handed_over(router, pair, body, handoff)
    alone = await router.leg(pair[0], LegKind.AGGREGATED, body)

    assert second.status == 200, second.body
    assert not second.report.kv.first_token_received
    assert second.report.received_tokens > 0
    assert second.token_ids == alone.token_ids


@HANDOFFS
async def test_a_first_token_that_ends_the_answer_ends_it(pair, router, handoff):
    body = completion(prompt_of(250, seed=next(seeds)))
    alone = await router.leg(pair[0], LegKind.AGGREGATED, body)
    body["stop_token_ids"] = alone.token_ids[:1]
    await router.leg(pair[0], LegKind.AGGREGATED, body)

    _first, second = await handed_over(router, pair, body, handoff)

    assert second.token_ids == alone.token_ids[:1]
    assert second.report.finish_reason == "stop"
    assert not second.report.kv.first_token_received


@HANDOFFS
async def test_a_stop_string_in_the_first_token_ends_the_answer(pair, router, handoff):
    body = completion(prompt_of(260, seed=next(seeds)), stop=None)
    alone = await router.leg(pair[0], LegKind.AGGREGATED, body)
    body["stop"] = [alone.text()[0]]

    _first, second = await handed_over(router, pair, body, handoff)

    assert second.status == 200
    assert second.text() == ""
    assert second.report.finish_reason == "stop"
    assert second.report.received_tokens >= second.report.prompt_tokens - BLOCK


def said(answer) -> str:
    deltas = [choice["delta"] for event in answer.events() for choice in event["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


@HANDOFFS
async def test_chats_and_their_usage_are_those_of_one_engine(pair, router, handoff):
    asked = [{"role": "user", "content": prompt_of(220, seed=70 + (handoff == OFFERED))}]
    body = {"model": "baton-tiny", "messages": asked, "max_tokens": 12, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}

    first, second = await handed_over(router, pair, body, handoff, path=CHAT)
    alone = await router.leg(pair[0], LegKind.AGGREGATED, body, path=CHAT)

    assert second.report.kv.first_token_received
    assert said(second) == said(alone)
    usage, expected = second.events()[-1]["usage"], alone.events()[-1]["usage"]
    assert usage["completion_tokens"] == expected["completion_tokens"]
    assert usage["prompt_tokens"] == expected["prompt_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == first.report.cached_tokens
