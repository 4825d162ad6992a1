"""Token ids in, token ids out: two engines and a continued stream answer as vLLM's server does on one engine."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from shared.contracts.engine_paths import GENERATE
from shared.contracts.failures import Reason
from shared.contracts.inference import LegKind, pack_tokens
from tests.engines.test_resume import frames_of, pieces, tokens_of
from tests.support.prompts import VOCABULARY

pytestmark = pytest.mark.vllm

PATH = {"path": GENERATE}
SAMPLING = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
SAME_ON_BOTH: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "as prime-rl asks": (
        {"logprobs": 1, "stop_token_ids": [2], "skip_special_tokens": False, "temperature": 1.0, "seed": 3},
        {"cache_salt": "step 4", "priority": 0},
    ),
    "prompt token ids": ({}, {"return_token_ids": True}),
    "candidates": ({"logprobs": 3, "flat_logprobs": True, "detokenize": False}, {}),
    "text": ({"stop": ["no such text"]}, {"output_mode": "text"}),
    "text with logprobs": ({"logprobs": 2}, {"output_mode": "text"}),
    "a choice": ({"structured_outputs": {"choice": ["baton", "relay"]}, "ignore_eos": False}, {}),
    "vLLM's default length": ({"max_tokens": 40}, {"request_id": "mine"}),
    "usage": ({}, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
}


def body_of(seed: int, sampling: dict[str, Any], *, tokens: int = 150, **more: Any) -> dict[str, Any]:
    ids = random.Random(seed).choices(VOCABULARY, k=tokens)
    return {"model": "baton-tiny", "token_ids": ids, "sampling_params": {**SAMPLING, **sampling}, **more}


def events(raw: bytes) -> list[dict[str, Any]]:
    *parts, done, end = raw.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def rounded(value: Any) -> Any:
    """A probability's last digits depend on what was computed together."""
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-3)
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items() if name not in {"request_id", "created"}}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a stream, however many tokens an event has."""
    choices = [choice for part in parts for choice in part["choices"]]
    return {
        "token_ids": [token for choice in choices for token in choice["token_ids"] or []],
        "text": "".join(choice.get("text", "") for choice in choices),
        "logprobs": [one for choice in choices for one in (choice["logprobs"] or {}).get("content") or []],
        "ends": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "versions": [choice["weight_versions"] for choice in choices if choice["weight_versions"]],
        "prompts": [part["prompt_token_ids"] for part in parts if part.get("prompt_token_ids")],
        "usage": [part["usage"] for part in parts if part.get("usage")][-1:],
        "modes": {part["output_mode"] for part in parts},
    }


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("number", range(len(SAME_ON_BOTH)), ids=SAME_ON_BOTH.keys())
async def test_token_ids_are_answered_by_two_engines_as_by_one(pair, router, number, stream):
    prefill, decode = pair
    sampling, more = list(SAME_ON_BOTH.values())[number]
    body = body_of(700 + number + 20 * stream, sampling, stream=stream, **{"cache_salt": "one"} | more)
    if not stream:
        body.pop("stream_options", None)

    _first, second = await router.handed_over(prefill, decode, body, **PATH)
    alone = await router.leg(prefill, LegKind.AGGREGATED, {**body, "cache_salt": "another"}, **PATH)

    assert second.status == alone.status == 200, (second.body, alone.body)
    assert second.report.received_tokens >= 128
    if stream:
        told, expected = merged(events(second.body)), merged(events(alone.body))
        assert told["token_ids"] == second.token_ids
        assert told["versions"] == [[{"version": "default", "start": 0, "end": len(second.token_ids)}]]
    else:
        told, expected = second.json(), alone.json()
        assert told["request_id"].startswith("generate-tokens-")
        assert told["kv_transfer_params"] is None
        assert told["choices"][0]["token_ids"] == second.token_ids
    assert told == rounded(expected) if stream else rounded(told) == rounded(expected)


async def test_token_ids_below_their_threshold_are_refused_without_tokens(pair, router):
    for stream in (False, True):
        body = body_of(740 + stream, {}, stream=stream)
        answer = await router.leg(pair[1], LegKind.AGGREGATED, body, cache_hit_threshold=0.9, **PATH)

        assert (answer.status, answer.report.completion_tokens) == (200, 0)
        assert answer.report.kv.refused
        choices = (
            [one for event in events(answer.body) for one in event["choices"]] if stream else answer.json()["choices"]
        )
        assert [(one["finish_reason"], one["token_ids"]) for one in choices] == [("cache_threshold", [])]


@pytest.mark.parametrize("mode", ["tokens", "text"])
async def test_a_stream_of_token_ids_cut_anywhere_continues_unchanged(pair, router, mode):
    one, other = pair
    body = body_of(750, {"logprobs": 1}, stream=True, output_mode=mode, stream_options={"include_usage": True})
    whole = pieces(await frames_of(router, one, body, GENERATE))

    for cut in range(1, len(whole), 7):
        relayed = whole[:cut]
        frames = await frames_of(router, other, body, GENERATE, resume=pack_tokens(tokens_of(relayed)))

        both, expected = (
            merged(events(b"".join(frame.data for frame in each))) for each in ([*relayed, *frames], whole)
        )
        del both["usage"], expected["usage"]  # It counts what was cached, which differs.
        assert both == rounded(expected), f"cut behind piece {cut}"


@pytest.mark.parametrize(
    ("sampling", "word"),
    [({"presence_penalty": 0.5}, "presence_penalty"), ({"n": 2}, "one completion")],
    ids=["penalty", "several"],
)
async def test_a_stream_of_token_ids_that_cannot_be_resumed_is_refused(pair, router, sampling, word):
    body = body_of(760, sampling, stream=True)

    answer = await router.leg(pair[0], LegKind.AGGREGATED, body, resume=pack_tokens([70]), **PATH)

    assert answer.failure.reason is Reason.CANNOT_RESUME
    assert word in answer.failure.message


@pytest.mark.parametrize(
    "more", [{"kv_transfer_params": {"remote_host": "127.0.0.1"}}, {"features": {"mm_hashes": {}}}]
)
async def test_orders_to_the_engine_never_reach_it(pair, router, more):
    for kind in (LegKind.PREFILL, LegKind.AGGREGATED):
        answer = await router.leg(pair[0], kind, body_of(770, {}, **more), **PATH)

        assert answer.status == 400
        assert json.loads(answer.body)["error"]["param"] in more
