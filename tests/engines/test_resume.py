"""A response that one vLLM engine began and another continued equals, byte for byte, that of one engine."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from shared.contracts.failures import Reason
from shared.contracts.ids import RequestId
from shared.contracts.inference import Frame, FrameKind, LegKind, pack_tokens
from tests.engines.test_handover import prompt_of
from tests.support.worker_processes import handoff

pytestmark = pytest.mark.vllm

TOKENS = 20
BLOCK = 32
EVERY = 3
"""Cuts are so many pieces apart."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
BYTES = [133, 108, 168, 251, 104, 178, 259, 253, 230, 70]
"""Tokens that are single bytes, of letters of two, three and four of them: what they make is seldom whole."""
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def body_of(path: str, words_seed: int, **more: Any) -> dict:
    common = {"model": "baton-tiny", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    asked = (
        {"prompt": prompt_of(70, seed=words_seed)}
        if path == COMPLETIONS
        else {"messages": [{"role": "user", "content": prompt_of(70, seed=words_seed)}]}
    )
    return {**common, "stream_options": {"include_usage": True}, **asked, **more}


async def frames_of(router, worker, body: dict, path: str, kind=LegKind.AGGREGATED, **options) -> list[Frame]:
    leg = await router.start(worker, kind, body, path=path, request_id=RequestId("q"), **options)
    frames: list[Frame] = []
    while not frames or frames[-1].kind is not FrameKind.END:
        frames += await leg.frames()
    return frames


def pieces(frames: list[Frame]) -> list[Frame]:
    return [frame for frame in frames if frame.data or frame.token_ids]


def cached_of(frames: list[Frame]) -> int:
    """As the first frame after the first token tells, and no other."""
    (cached,) = [frame.cached_tokens for frame in frames if frame.cached_tokens is not None]
    assert frames[0].cached_tokens is cached
    return cached


def tokens_of(frames: list[Frame]) -> list[int]:
    return [token for frame in frames for token in frame.token_ids]


def joined_of(frames: list[Frame]) -> list[int]:
    """Which of their tokens the server got together with the one before."""
    starts = itertools.accumulate((len(frame.token_ids) for frame in frames), initial=0)
    return [start + index for start, frame in zip(starts, frames, strict=False) for index in frame.joined or ()]


def summary_of(frames: list[Frame]) -> dict[str, Any]:
    """What a client makes of a stream. How many tokens come in one event depends on who was busy, and a probability's
    last digits on what was computed together.
    """
    parts = b"".join(frame.data for frame in frames).decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    summary: dict[str, Any] = {
        "ids": set(),
        "roles": [],
        "text": "",
        "ends": [],
        "usage": [],
        "tokens": [],
        "offsets": [],
    }
    summary["logprobs"] = []
    for event in (json.loads(part.removeprefix("data: ")) for part in parts[:-2]):
        summary["ids"].add(event["id"])
        if event.get("usage"):
            usage = event["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            summary["usage"].append((usage["prompt_tokens"], usage["completion_tokens"], cached))
        for choice in event["choices"]:
            delta = choice.get("delta", {})
            summary["roles"] += [delta["role"]] if "role" in delta else []
            summary["text"] += choice.get("text") or delta.get("content") or ""
            summary["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            _add_logprobs(summary, choice.get("logprobs") or {})
    return summary


def _add_logprobs(summary: dict[str, Any], logprobs: dict[str, Any]) -> None:
    said = logprobs.get("content") or []
    summary["tokens"] += logprobs.get("tokens") or [(one["token"], one["bytes"]) for one in said]
    summary["offsets"] += logprobs.get("text_offset") or []
    summary["logprobs"] += logprobs.get("token_logprobs") or [one["logprob"] for one in said]


def same(summary: dict[str, Any]) -> dict[str, Any]:
    return {**summary, "logprobs": pytest.approx(summary["logprobs"], abs=1e-3)}


CASES = {
    "completion": (COMPLETIONS, {}),
    "completion with logprobs": (COMPLETIONS, {"logprobs": 2, "echo": False}),
    "characters in pieces": (COMPLETIONS, {"allowed_token_ids": BYTES, "logprobs": 1}),
    "text held back": (COMPLETIONS, {"stop": ["no such text, and long"], "min_tokens": 6}),
    "chat": (CHAT, {"logprobs": True, "top_logprobs": 2}),
    "chat in pieces": (CHAT, {"allowed_token_ids": BYTES, "repetition_penalty": 1.3}),
    "chat with tools": (CHAT, {"tools": [TOOL], "tool_choice": "auto"}),
}


@pytest.mark.parametrize(("path", "more"), CASES.values(), ids=CASES.keys())
async def test_an_answer_cut_anywhere_continues_unchanged(pair, router, path, more):
    one, other = pair
    body = body_of(path, 500 + list(CASES.values()).index((path, more)), **more)
    whole = pieces(await frames_of(router, one, body, path))
    assert len(tokens_of(whole)) == TOKENS

    for cut in range(1, len(whole), EVERY):
        relayed = whole[:cut]
        resume, cached = pack_tokens(tokens_of(relayed)), cached_of(whole)
        frames = await frames_of(router, other, body, path, resume=resume, cached_tokens=cached)

        assert summary_of([*relayed, *frames]) == same(summary_of(whole)), f"cut behind piece {cut}"
        assert tokens_of([*relayed, *frames]) == tokens_of(whole)
        assert frames[-1].report.completion_tokens == TOKENS


async def test_a_stop_string_across_the_cut_ends_the_answer(pair, router):
    one, other = pair
    plain = summary_of(await frames_of(router, one, body_of(COMPLETIONS, 41), COMPLETIONS))["text"]
    body = body_of(COMPLETIONS, 41, stop=[plain[len(plain) // 2 - 8 : len(plain) // 2 + 8]])
    whole = pieces(await frames_of(router, one, body, COMPLETIONS))
    assert summary_of(whole)["ends"] == ["stop"]

    for cut in range(1, len(whole)):
        relayed = whole[:cut]
        resume, cached = pack_tokens(tokens_of(relayed)), cached_of(whole)
        frames = await frames_of(router, other, body, COMPLETIONS, resume=resume, cached_tokens=cached)

        assert summary_of([*relayed, *frames]) == summary_of(whole)
        assert tokens_of([*relayed, *frames]) == tokens_of(whole)


async def test_an_answer_with_all_its_tokens_ends_without_the_engine(pair, router):
    one, other = pair
    body = body_of(CHAT, 42)
    whole = pieces(await frames_of(router, one, body, CHAT))

    resume, cached = pack_tokens(tokens_of(whole)), cached_of(whole)
    frames = await frames_of(router, other, body, CHAT, resume=resume, cached_tokens=cached)

    assert tokens_of(frames) == []
    assert summary_of(frames)["usage"] == summary_of(whole)["usage"]
    assert summary_of(frames)["text"] == ""
    assert frames[-1].report.finish_reason == "length"
    assert frames[-1].report.queue_s == 0


async def test_a_broken_answer_is_handed_over_with_its_tokens(pair, router):
    """Prefill there, decode here, of the prompt and what was said: only the tail is computed twice."""
    prefill, decode = pair
    body = body_of(COMPLETIONS, 43, max_tokens=60)
    whole = pieces(await frames_of(router, prefill, {**body, "cache_salt": "another"}, COMPLETIONS))
    # Tokens, not pieces, are counted: on a busy machine a piece has several.
    relayed = whole[: next(cut for cut in range(len(whole)) if len(tokens_of(whole[:cut])) > BLOCK)]
    resume = pack_tokens(tokens_of(relayed))

    first = await frames_of(router, prefill, body, COMPLETIONS, LegKind.PREFILL, resume=resume)
    told = first[-1].report
    frames = await frames_of(
        router, decode, body, COMPLETIONS, LegKind.DECODE, resume=resume, kv_transfer=handoff(told)
    )

    assert summary_of([*relayed, *frames]) == summary_of(whole)
    transfer_report = frames[-1].report.kv
    assert transfer_report.prompt_tokens == told.prompt_tokens + len(tokens_of(relayed))
    assert transfer_report.fetched_tokens > told.prompt_tokens
    assert transfer_report.recomputed_tokens <= BLOCK


def told_in_events(path: str, frames: list[Frame]) -> tuple[list[str], str, list[int], dict[str, Any]]:
    """Of a message or a response: the order of its events, its text, its events' numbers, and its usage."""
    parts = b"".join(frame.data for frame in frames).decode().split("\n\n")
    events = [json.loads(part.partition("\ndata: ")[2]) for part in parts if part]
    types = [event["type"] for event in events]
    order = [kind for kind, before in zip(types, ["", *types], strict=False) if kind != before]
    deltas = [event["delta"] for event in events if event["type"].endswith(".delta")]
    deltas += [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    usage = events[-2]["usage"] if path == MESSAGES else events[-1]["response"]["usage"]
    return order, "".join(deltas), [event.get("sequence_number", 0) for event in events], usage


def prompt_usage(path: str, usage: dict[str, Any]) -> tuple[int, int, int]:
    """Prompt tokens, and those of them that were read from a cache and written to it."""
    if path == MESSAGES:
        read, written = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
        return usage["input_tokens"] + read + written, read, written
    details = usage["input_tokens_details"]
    return usage["input_tokens"], details["cached_tokens"], details["cache_write_tokens"]


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_a_broken_message_is_handed_over_and_its_usage_is_that_of_its_own_prompt(pair, router, path):
    prefill, decode = pair
    turns, limit = ("messages", "max_tokens") if path == MESSAGES else ("input", "max_output_tokens")
    asked = {turns: [{"role": "user", "content": prompt_of(70, seed=61)}], limit: 60, "temperature": 0}
    body = {"model": "baton-tiny", "stream": True, **asked}
    named: dict[str, Any] = {"answer_id": f"answer of {path}"}
    whole = pieces(await frames_of(router, prefill, {**body, "cache_salt": "another"}, path, **named))
    tokens = tokens_of(whole)
    relayed = whole[: len(whole) // 2]
    named |= {"resume": pack_tokens(tokens_of(relayed)), "resume_joined": pack_tokens(joined_of(relayed))}

    first = await frames_of(router, prefill, body, path, LegKind.PREFILL, **named)
    told = first[-1].report
    frames = await frames_of(router, decode, body, path, LegKind.DECODE, kv_transfer=handoff(told), **named)

    order, text, numbers, usage = told_in_events(path, whole)
    assert len(tokens) > 8
    both = told_in_events(path, [*relayed, *frames])
    assert both[:2] == (order, text)
    assert both[2] == ([*range(len(both[2]))] if path == RESPONSES else [0] * len(both[2]))
    assert tokens_of([*relayed, *frames]) == tokens
    assert both[3]["output_tokens"] == usage["output_tokens"] == len(tokens)
    assert prompt_usage(path, both[3]) == prompt_usage(path, usage)
    assert prompt_usage(path, usage) == (told.prompt_tokens, 0, told.prompt_tokens // BLOCK * BLOCK)
    assert frames[-1].report.kv.fetched_tokens > told.prompt_tokens - BLOCK
    assert numbers[-1] == (len(numbers) - 1 if path == RESPONSES else 0)


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs"),
        ({"n": 2}, "one completion"),
    ],
)
async def test_what_cannot_be_resumed_is_refused_with_a_reason(pair, router, more, word):
    answer = await router.leg(
        pair[0], LegKind.AGGREGATED, body_of(COMPLETIONS, 44, **more), path=COMPLETIONS, resume=pack_tokens([70])
    )

    assert answer.failure.reason is Reason.CANNOT_RESUME
    assert word in answer.failure.message


async def test_unknown_tokens_fail_one_leg_and_not_the_engine(pair, router):
    leg = await router.leg(pair[0], LegKind.AGGREGATED, body_of(CHAT, 45), path=CHAT, resume=pack_tokens([1 << 31]))
    after = await frames_of(router, pair[0], body_of(CHAT, 45), CHAT)

    assert leg.failure.reason is Reason.CANNOT_RESUME
    assert after[-1].report.completion_tokens == TOKENS


async def test_a_seeded_continuation_is_repeatable(pair, router):
    body = body_of(COMPLETIONS, 46, seed=7, temperature=1.0)
    resume = pack_tokens([70, 71, 72])

    texts = [summary_of(await frames_of(router, worker, body, COMPLETIONS, resume=resume))["text"] for worker in pair]

    assert texts[0] == texts[1]
    assert texts[0]
