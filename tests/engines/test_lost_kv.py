"""Requests whose KV is lost beside ready ones, on real engines: how much of them each step of the decode engine
computes, and that all get their tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from shared.contracts.inference import FrameKind, LegKind, LegReport
from tests.engines.test_handover import completion
from tests.support.prompts import random_prompt
from tests.support.pulled_legs import PulledLeg
from tests.support.worker_processes import Router, WorkerProcess, handoff

pytestmark = pytest.mark.vllm

READY, LOST = 3, 2
READY_TOKENS, LOST_TOKENS = 70, 610
"""Of each prompt."""
ANSWER = 16
STREAM = 1500
"""Tokens of a ready request's answer: more than are made meanwhile."""
SHARE_MAX = 200
"""Tokens that a step of baton-tiny computes in half of a decode step, on any machine, with a margin."""


def body_of(name: str, tokens: int, answer: int, *, stream: bool = False) -> dict:
    return completion("", stream=stream) | {"prompt": random_prompt(name, tokens), "max_tokens": answer}


@dataclass
class Stream:
    """A leg that is read until it is cancelled."""

    leg: PulledLeg
    tokens: list[int]

    async def read(self, tokens: int) -> list[int]:
        """The first so many tokens."""
        while len(self.tokens) < tokens:
            for frame in await self.leg.frames():
                self.tokens += frame.token_ids
                assert frame.kind is not FrameKind.END
        return self.tokens[:tokens]


async def ready_stream(router: Router, pair: tuple[WorkerProcess, ...], name: str) -> Stream:
    """A request that decodes, with KV from the prefill worker."""
    prefill, decode = pair
    body = body_of(name, READY_TOKENS, STREAM, stream=True)
    first = await router.leg(prefill, LegKind.PREFILL, body)
    stream = Stream(await router.start(decode, LegKind.DECODE, body, kv_transfer=handoff(first.report)), [])
    await stream.read(3)
    return stream


async def steps_of(router: Router, decode: WorkerProcess, legs: int) -> tuple[int, int]:
    """Steps of the engine that computed prompts, and their tokens, once it serves so many legs."""
    load = await router.load_where(decode, lambda load: load.legs == legs)
    assert load.steps is not None
    return load.steps.prefill_steps, load.steps.prefill_tokens


async def recompute(router: Router, decode: WorkerProcess, names: list[str], legs: int) -> tuple[list, float]:
    """Requests whose KV is lost, at once; their answers, and the tokens of a step that computed prompts, on average."""
    bodies = [body_of(name, LOST_TOKENS, ANSWER) for name in names]
    steps, tokens = await steps_of(router, decode, legs)
    answers = await asyncio.gather(*(router.leg(decode, LegKind.DECODE, body, kv_transfer=b"{}") for body in bodies))
    more_steps, more_tokens = await steps_of(router, decode, legs)
    assert more_tokens - tokens > 0.9 * len(names) * LOST_TOKENS  # vLLM reports no time of an idle engine's first step.
    return answers, (more_tokens - tokens) / (more_steps - steps)


def slowed_s(report: LegReport) -> float:
    assert report.kv is not None
    return report.kv.recompute_slowed_s


async def test_lost_prompts_are_computed_in_small_parts_beside_ready_requests(pair, router):
    prefill, decode = pair
    await recompute(router, decode, ["lost-warm"], legs=0)
    ready = [await ready_stream(router, pair, f"lost-ready-{number}") for number in range(READY)]
    names = [f"lost-{number}" for number in range(LOST)]

    answers, a_step = await recompute(router, decode, names, legs=READY)
    tokens = [await stream.read(100) for stream in ready]
    for stream in ready:
        stream.leg.cancel()

    print(f"\n{a_step:.1f} tokens in a step, slowed {[slowed_s(one.report) for one in answers]} s")
    assert a_step <= SHARE_MAX
    assert all(slowed_s(one.report) > 0 for one in answers)
    for name, answer in zip(names, answers, strict=True):
        alone = await router.leg(prefill, LegKind.AGGREGATED, body_of(name, LOST_TOKENS, ANSWER))
        assert answer.token_ids == alone.token_ids
    for number, got in enumerate(tokens):
        body = body_of(f"lost-ready-{number}", READY_TOKENS, 100)
        assert got == (await router.leg(prefill, LegKind.AGGREGATED, body)).token_ids


async def test_a_target_that_steps_meet_easily_leaves_a_lost_prompt_its_speed(pair, router):
    decode = pair[1]
    body = body_of("lost-easy-ready", READY_TOKENS, STREAM, stream=True)
    stream = Stream(await router.start(decode, LegKind.AGGREGATED, body, itl_target_s=60.0), [])
    await stream.read(3)

    _answers, a_step = await recompute(router, decode, ["lost-easy"], legs=1)
    stream.leg.cancel()

    assert a_step > SHARE_MAX


async def test_without_ready_requests_a_lost_prompt_is_computed_at_full_speed(pair, router):
    _answers, a_step = await recompute(router, pair[1], ["lost-alone"], legs=0)

    assert a_step > SHARE_MAX
