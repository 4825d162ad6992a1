"""Baton's fields in a body, ``baton``, ``cache_hit_threshold`` and ``kv_fetch_min_tokens``, on each path that has them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shared.bus.frame_sender import LegFrames
from shared.contracts.engine_paths import CHAT, COMPLETIONS, GENERATE, MESSAGES, PLACED, RESPONSES
from shared.contracts.inference import LegKind, LegReport, StartLeg
from tests.unit.router.fake_worker import JSON, SSE, FakeWorker, serve_leg
from tests.unit.router.world import HttpResponse, World, in_world

TEXT = "hello " * 64
"""It has some blocks of KV, which a prefill worker can hand over."""
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "m", "prompt": TEXT},
    CHAT: {"model": "m", "messages": [{"role": "user", "content": TEXT}]},
    MESSAGES: {"model": "m", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 9},
    RESPONSES: {"model": "m", "input": TEXT},
    GENERATE: {"model": "m", "token_ids": [7] * 128, "sampling_params": {}},
}
SILENT = {
    MESSAGES: b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}\n\n',
    RESPONSES: b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"r"}}\n\n',
}
"""What engines say at the end of a request that they have refused."""


async def ask(world: World, path: str, **fields: Any) -> HttpResponse:
    return await world.ask({**BODIES[path], **fields}, path=path)


@pytest.mark.parametrize("path", PLACED)
@in_world()
async def test_each_path_follows_the_fields(world: World, path: str):
    prefill, decode = await world.pair(connector="baton-1")
    one = await ask(world, path, kv_fetch_min_tokens=7, cache_hit_threshold=0)
    two = await ask(world, path, baton={"mode": "aggregated", "decode_worker": "d1"})
    three = await ask(world, path, cache_hit_threshold=0.25, kv_fetch_min_tokens=None)
    assert [one.status, two.status, three.status] == [200] * 3
    assert [leg.kind for leg in prefill.started] == [LegKind.PREFILL]
    first, second, third = decode.started
    assert [first.kind, second.kind] == [LegKind.DECODE, LegKind.AGGREGATED]
    assert [leg.kv_fetch_min_tokens for leg in (first, second, third)] == [7, None, None]
    assert [leg.cache_hit_threshold for leg in (first, second)] == [0.0, 0.0]
    assert third.cache_hit_threshold == 0.25


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"baton": {"mode": "sideways"}}, "baton.mode", "`baton.mode` must be one of"),
        ({"baton": {"nonsense": 1}}, "baton.nonsense", "`baton` has only the fields"),
        ({"baton": []}, "baton", "`baton` must be an object"),
        ({"baton": {"decode_worker": "nobody"}}, "baton.decode_worker", "There is no worker `nobody`."),
        ({"cache_hit_threshold": 1.1}, "cache_hit_threshold", "`cache_hit_threshold` must be a number"),
        ({"kv_fetch_min_tokens": -1}, "kv_fetch_min_tokens", "`kv_fetch_min_tokens` must be an integer"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", PLACED)
@in_world()
async def test_each_path_refuses_invalid_values_by_name(
    world: World, path: str, fields: dict[str, Any], param: str, said: str
):
    worker = await world.worker("w1")
    response = await ask(world, path, **fields)
    assert response.status == 400
    assert said in response.error["message"]
    assert path == MESSAGES or response.error["param"] == param
    assert not worker.started


def refusing(path: str):
    """An engine that refuses what has a threshold: no token, and its server says that all is well."""

    def script(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
        if not start.cache_hit_threshold:
            serve_leg(worker, start, frames)
        elif b'"stream":true' in start.body:
            frames.head(200, SSE)
            frames.data(b"event: begins\ndata: {}\n\n")
            frames.data(SILENT[path])
            frames.end(LegReport(prompt_tokens=9, finish_reason="cache_threshold"))
        else:
            frames.head(200, JSON)
            frames.data(b'{"content":[]}')
            frames.end(LegReport(prompt_tokens=9, finish_reason="cache_threshold"))

    return script


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", SILENT)
@in_world()
async def test_paths_without_a_finish_reason_get_a_status(world: World, path: str, stream: bool):
    worker = await world.worker("w1", script=refusing(path), connector="baton-1")
    response = await ask(world, path, cache_hit_threshold=0.5, stream=stream)
    assert response.status == 412
    assert response.error["code"] == "below_threshold"
    assert "cache_hit_threshold" in response.error["message"]
    assert len(worker.started) == 1  # No other worker computes what the client does not want computed.
    assert (await ask(world, path, cache_hit_threshold=0.0)).status == 200
    assert not world.router.relay.in_flight


@in_world()
async def test_the_error_of_a_message_has_anthropics_form(world: World):
    await world.worker("w1", script=refusing(MESSAGES), connector="baton-1")
    response = await ask(world, MESSAGES, cache_hit_threshold=0.5)
    body = msgspec.json.decode(response.body)
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
