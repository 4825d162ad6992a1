"""Prefill and decode on two real engines: the tokens of one engine, and correct reports."""

from __future__ import annotations

import asyncio
import random

import pytest

from shared.contracts.inference import LegKind

pytestmark = pytest.mark.vllm

WORDS = [
    "relay",
    "race",
    "baton",
    "runner",
    "track",
    "lap",
    "finish",
    "start",
    "hand",
    "over",
    "speed",
    "gun",
    "whistle",
    "crowd",
    "lane",
    "turn",
]


def prompt_of(words: int, seed: int) -> str:
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(words))


def completion(prompt: str, **more) -> dict:
    return {"model": "baton-tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **more}


@pytest.mark.parametrize("words", [70, 400, 1000, 2100])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_handed_over_prompt_gives_the_tokens_that_one_engine_gives(pair, router, words, stream):
    prefill, decode = pair
    body = completion(prompt_of(words, seed=words + stream), stream=stream)

    first, second = await router.handed_over(prefill, decode, body)
    alone = await router.leg(prefill, LegKind.AGGREGATED, body)

    assert second.status == 200
    assert len(second.token_ids) == 24
    assert second.token_ids == alone.token_ids
    assert second.text() == alone.text()
    assert first.report.received_tokens == 0
    assert second.report.received_tokens >= second.report.prompt_tokens - 32
    assert second.report.received_bytes > 0
    assert not first.body


async def test_many_prompts_handed_over_at_once_do_not_mix(pair, router):
    prefill, decode = pair
    bodies = [completion(prompt_of(40 + 60 * number, seed=100 + number), stream=True) for number in range(8)]

    handed_over = await asyncio.gather(*(router.handed_over(prefill, decode, body) for body in bodies))
    alone = [await router.leg(prefill, LegKind.AGGREGATED, body) for body in bodies]

    assert [second.token_ids for _first, second in handed_over] == [answer.token_ids for answer in alone]
    assert all(second.report.received_tokens > 0 for _first, second in handed_over)


async def test_a_prefix_that_the_decode_engine_holds_is_not_sent_again(pair, router):
    prefill, decode = pair
    shared = prompt_of(400, seed=6)
    await router.handed_over(prefill, decode, completion(shared))

    first, second = await router.handed_over(prefill, decode, completion(f"{shared} {prompt_of(60, seed=5)}"))

    assert second.report.cached_tokens > second.report.received_tokens > 0
    assert first.report.cached_tokens > 0


async def test_usage_counts_what_the_prefill_engine_had_cached(pair, router):
    prefill, decode = pair
    body = completion(prompt_of(300, seed=7))
    await router.leg(prefill, LegKind.AGGREGATED, body)

    first, second = await router.handed_over(prefill, decode, body)

    details = second.json()["usage"]["prompt_tokens_details"]
    assert first.report.cached_tokens > 0
    assert details["cached_tokens"] == first.report.cached_tokens
    assert second.report.received_tokens > 0


async def test_streamed_usage_counts_cached_tokens(pair, router):
    prefill, decode = pair
    body = completion(prompt_of(200, seed=8), stream=True, stream_options={"include_usage": True})

    first, second = await router.handed_over(prefill, decode, body)

    usage = second.events()[-1]["usage"]
    assert usage["prompt_tokens"] == first.report.prompt_tokens == second.report.prompt_tokens
    assert usage["prompt_tokens_details"]["cached_tokens"] == first.report.cached_tokens
