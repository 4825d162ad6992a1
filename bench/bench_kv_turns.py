"""Conversations: the next turn's time to first token when its prefill engine fetches the history from the decode engine
that has it, and when it computes it, over HTTP and the router.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.kv_bench_fleet import BenchFleet, Prompts
from shared.contracts.inference import LegKind

FETCH, COMPUTE = "read-back", "recompute"
NEVER = 1 << 30
"""kv_fetch_min_tokens of a request that computes everything."""
NEW_TOKENS = 64
"""Of the user, in each turn."""
INDEXED_S = 0.5
"""Until the router knows what the engines have cached."""


@dataclass(frozen=True)
class Turn:
    """One turn that had a history."""

    ttft_s: float
    fetched: int
    computed: int
    """By the prefill engine."""


async def ask(
    fleet: BenchFleet, prompt: Sequence[int], tokens: int, *, mode: str = "disaggregated", **fields: Any
) -> tuple[float, list[int], str]:
    """Time to the first token, all tokens, the request's name."""
    body = {
        "model": "baton-tiny",
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **fields,
    }
    begun_at, first_at, answer = time.monotonic(), 0.0, []
    async with fleet.http.stream("POST", "/v1/completions", json=body, headers={"x-baton-mode": mode}) as said:
        assert said.status_code == 200, await said.aread()
        async for line in said.aiter_lines():
            if line.startswith("data: {"):
                first_at = first_at or time.monotonic()
                answer += json.loads(line[6:])["choices"][0]["token_ids"] or []
    return first_at - begun_at, answer, said.headers["x-request-id"]


async def converse(fleet: BenchFleet, prompts: Prompts, turns: int, answer_tokens: int, how: str) -> list[Turn]:
    """One conversation: all turns but the first."""
    fields = {"kv_fetch_min_tokens": NEVER} if how == COMPUTE else {}
    history: list[int] = []
    taken = []
    for number in range(turns):
        prompt = history + prompts.new(NEW_TOKENS)
        ttft_s, answer, request_id = await ask(fleet, prompt, answer_tokens, **fields)
        if number:
            legs = await fleet.tap.legs_of(request_id)
            transfer_report = legs[LegKind.PREFILL].transfer_report
            taken.append(Turn(ttft_s, transfer_report.fetched_tokens, transfer_report.recomputed_tokens))
        history = prompt + answer
        await asyncio.sleep(INDEXED_S)
    return taken


async def next_turn(fleet: BenchFleet, prompts: Prompts, history_tokens: int, how: str) -> Turn:
    """A first turn of so many tokens, an answer, and the turn after it."""
    fields = {"kv_fetch_min_tokens": NEVER} if how == COMPUTE else {}
    first = prompts.new(history_tokens - NEW_TOKENS)
    _ttft, answer, _name = await ask(fleet, first, NEW_TOKENS, **fields)
    await asyncio.sleep(INDEXED_S)
    ttft_s, _answer, name = await ask(fleet, first + answer + prompts.new(NEW_TOKENS), 2, **fields)
    transfer_report = (await fleet.tap.legs_of(name))[LegKind.PREFILL].transfer_report
    return Turn(ttft_s, transfer_report.fetched_tokens, transfer_report.recomputed_tokens)


async def measure_conversations(
    fleet: BenchFleet, *, turns: int, answer_tokens: int, times: int
) -> dict[str, list[Turn]]:
    """Conversations whose histories grow by their answers: what the prefill engine lacks is what decode generated."""
    found: dict[str, list[Turn]] = {FETCH: [], COMPUTE: []}
    prompts = Prompts(3)
    for _time in range(times):
        for how in found:
            found[how] += await converse(fleet, prompts, turns, answer_tokens, how)
    return found


async def measure_next_turns(
    fleet: BenchFleet, histories: Sequence[int], times: int
) -> dict[tuple[int, str], list[Turn]]:
    """Second turns after histories of these lengths."""
    found: dict[tuple[int, str], list[Turn]] = {}
    prompts = Prompts(4)
    for history in histories:
        for _time in range(times):
            for how in (FETCH, COMPUTE):
                found.setdefault((history, how), []).append(await next_turn(fleet, prompts, history, how))
    return found


def p50_ms(turns: Sequence[Turn]) -> float:
    return median(turn.ttft_s for turn in turns) * 1e3
