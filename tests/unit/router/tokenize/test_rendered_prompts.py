"""Chats with media: a worker renders their prompts, and whatever goes wrong with that, they are served."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.router.decisions.decision import Decision
from services.router.tokenize.rendered_prompts import KEPT_S_MAX, REACHES_LAST_BLOCK, Outcome
from shared.contracts.channels import KV_EVENTS
from shared.contracts.failures import Reason
from shared.contracts.inference import RENDER_S_MAX, RENDERED_BODY_BYTES_MAX, RenderedPrompt, RenderPrompt
from shared.contracts.kv_events import pack_hashes
from shared.contracts.workers import Role
from tests.support.builders import kv_batch
from tests.unit.router.auth.test_api_keys import ACME, KEYS, PUBLIC, RIVAL, bearer
from tests.unit.router.fake_worker import FakeWorker
from tests.unit.router.streams import ANSWER, fails, streams
from tests.unit.router.world import CHAT, World, give_legs, in_world, settle

PICTURE = "data:image/png;base64,AAAA"
HASHES = (11, 12, 13)
BLOCK = 32
TOKENS = 3 * BLOCK + 4


def chat(url: str = PICTURE, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it"}]
    return {"model": "m", "messages": [{"role": "user", "content": parts}], **fields}


def says(**fields: Any):
    """A worker that renders every prompt to this."""

    async def render(worker: FakeWorker, _ask: RenderPrompt) -> RenderedPrompt:
        usual = {"tokens": TOKENS, "hashes": pack_hashes(HASHES), "media_end": 40, "epoch": worker.epoch}
        return RenderedPrompt(worker_id=worker.worker_id, **(usual | fields))

    return render


async def never(_worker: FakeWorker, _ask: RenderPrompt) -> RenderedPrompt:
    await asyncio.Event().wait()
    raise AssertionError


async def three_workers(world: World, render: Any = None) -> None:
    """Of two prefill workers the second one holds the prompt."""
    for worker_id, role in (("p1", Role.PREFILL), ("p2", Role.PREFILL), ("d1", Role.DECODE)):
        await world.worker(worker_id, role, render=render)
    await world.bus.publish(KV_EVENTS, kv_batch(1, *HASHES, worker_id="p2"))
    await settle()


def last_decision(world: World) -> Decision:
    return world.router.decisions.log.newest_first()[0]


def counts(world: World) -> dict[str, int]:
    return {str(outcome): count for outcome, count in world.router.prompts.rendered.counts.items() if count}


def asks(world: World) -> list[RenderPrompt]:
    return [ask for worker in world.workers.values() for ask in worker.rendered]


@in_world()
async def test_a_chat_with_a_picture_goes_to_the_worker_with_its_blocks(world: World):
    await three_workers(world, says())

    responses = [await world.ask(chat(seed=seed), path=CHAT) for seed in range(4)]

    assert {response.headers["x-baton-prefill-worker"] for response in responses} == {"p2"}
    decision = last_decision(world)
    assert (decision.exact, decision.request.prompt_tokens) == (True, TOKENS)
    assert decision.result.cached_tokens == len(HASHES) * BLOCK
    assert counts(world) == {Outcome.RENDERED: 4}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "who wins"}], "max_tokens": 9}),
        ("/v1/responses", {"input": "who wins", "max_output_tokens": 9}),
        (CHAT, {"messages": [{"role": "user", "content": "who wins"}], "tools": [{"type": "function"}]}),
    ],
    ids=["messages", "responses", "chats with tools"],
)
@in_world()
async def test_what_the_router_does_not_render_goes_to_the_worker_with_their_blocks(
    world: World, path: str, fields: dict[str, Any]
):
    await three_workers(world, says(media_end=0))

    responses = [await world.ask({"model": "m", "seed": seed, **fields}, path=path) for seed in range(4)]

    assert {response.headers["x-baton-prefill-worker"] for response in responses} == {"p2"}
    assert {response.headers["x-baton-mode"] for response in responses} == {"disaggregated"}
    decision = last_decision(world)
    assert (decision.exact, decision.request.prompt_tokens) == (True, TOKENS)
    assert {ask.path for ask in asks(world)} == {path}


@pytest.mark.parametrize(
    ("fields", "reaches"),
    [
        ({"media_end": 3 * BLOCK}, False),
        ({"media_end": 3 * BLOCK + 1}, True),
        ({"tokens": 3 * BLOCK, "media_end": 3 * BLOCK - 1}, False),
        ({"tokens": 3 * BLOCK, "media_end": 3 * BLOCK}, True),
    ],
    ids=["full blocks", "last block", "all blocks full", "last token"],
)
@in_world()
async def test_a_picture_in_what_the_decode_worker_computes_keeps_the_request_on_one_worker(
    world: World, fields, reaches
):
    await three_workers(world, says(**fields))

    response = await world.ask(chat(), path=CHAT)

    assert (response.headers["x-baton-mode"] == "aggregated") is reaches
    assert (last_decision(world).result.why == REACHES_LAST_BLOCK) is reaches


@pytest.mark.parametrize(
    ("render", "outcome"),
    [
        (never, Outcome.LATE),
        (says(refusal="400: no picture"), Outcome.REFUSED),
        (says(tokens=2 * BLOCK), Outcome.REFUSED),
        (says(tokens=1_000_000), Outcome.REFUSED),
        (says(media_end=TOKENS + 1), Outcome.REFUSED),
        (says(media_end=-1), Outcome.REFUSED),
        (says(tokens=0, hashes=b"", media_end=0), Outcome.REFUSED),
        (says(hashes=b"torn"), Outcome.REFUSED),
        (says(epoch=7), Outcome.REFUSED),
        (None, Outcome.NO_WORKER),
    ],
    ids=["late", "refused", "few", "many", "beyond", "negative", "empty", "torn", "epoch", "none"],
)
@in_world()
async def test_a_prompt_that_is_not_rendered_is_placed_by_load(world: World, render, outcome):
    await three_workers(world, render)
    begun = world.router.clock.now()

    response = await world.ask(chat(), path=CHAT)

    assert response.status == 200
    assert world.router.clock.now() - begun <= RENDER_S_MAX + 0.1
    assert counts(world) == {outcome: 1}
    decision = last_decision(world)
    assert not decision.exact
    assert decision.why_inexact


FETCHED = "https://cdn.example/x.png"
ANTHROPIC = {"type": "image", "source": {"type": "url", "url": FETCHED}}
WEB_TOOL = {"type": "tool_use", "id": "t", "name": "get", "input": {"url": FETCHED}}


def of_part(part: dict[str, Any], *, of: str = "messages") -> dict[str, Any]:
    return {"model": "m", of: [{"role": "user", "content": [part]}]}


@pytest.mark.parametrize(
    ("path", "body", "outcome"),
    [
        (CHAT, chat(FETCHED), Outcome.ADDRESSES),
        (CHAT, chat("HTTPS://cdn.example/x.png"), Outcome.ADDRESSES),
        (CHAT, of_part({"type": "image_url", "image_url": FETCHED}), Outcome.ADDRESSES),
        (CHAT, of_part({"type": "image_url", "image_url": {"detail": "auto", "url": FETCHED}}), Outcome.ADDRESSES),
        ("/v1/responses", of_part({"type": "input_image", "image_url": FETCHED}, of="input"), Outcome.ADDRESSES),
        ("/v1/messages", of_part(ANTHROPIC), Outcome.ADDRESSES),
        ("/v1/messages", of_part(WEB_TOOL), Outcome.RENDERED),
        (CHAT, chat(PICTURE.upper()), Outcome.RENDERED),
        (CHAT, chat(PICTURE + "A" * RENDERED_BODY_BYTES_MAX), Outcome.TOO_LARGE),
    ],
)
@in_world()
async def test_media_that_engines_fetch_and_large_bodies_are_not_rendered(world: World, path, body, outcome):
    await three_workers(world, says())
    assert (await world.ask(body, path=path)).status == 200

    assert counts(world) == {outcome: 1}


@in_world(keys=KEYS)
async def test_a_prompt_is_rendered_with_its_tenants_salts(world: World):
    await three_workers(world, says())
    for key in (ACME, RIVAL, PUBLIC):
        assert (await world.ask(chat(), path=CHAT, **bearer(key))).status == 200

    salts = [(ask.cache_salt, ask.media_salt) for ask in asks(world)]
    legs = {(leg.cache_salt, leg.media_salt) for worker in world.workers.values() for leg in worker.started}
    assert len(salts) == 3
    assert {*salts} == legs


@in_world()
async def test_text_is_never_rendered_by_workers(world: World):
    await three_workers(world, says())
    quoted = {"model": "m", "messages": [{"role": "user", "content": 'a part is {"type": "image_url"}'}]}

    assert (await world.ask(quoted, path=CHAT)).status == 200
    assert (await world.ask({"model": "m", "prompt": "image_url"})).status == 200

    assert (asks(world), counts(world)) == ([], {})


@in_world()
async def test_the_same_request_is_rendered_once_for_a_while(world: World):
    await three_workers(world, says())

    for body in (chat(), chat(), chat(seed=1)):
        await world.ask(body, path=CHAT)
    assert counts(world) == {Outcome.RENDERED: 2, Outcome.KEPT: 1}

    await asyncio.sleep(KEPT_S_MAX + 1.0)
    await world.ask(chat(), path=CHAT)
    assert counts(world) == {Outcome.RENDERED: 3, Outcome.KEPT: 1}


@in_world()
async def test_nothing_is_kept_of_a_client_that_leaves(world: World):
    await three_workers(world, never)
    connection, answering = world.begin(b'{"model":"m","messages":[{"content":[{"type":"image_url"}]}]}', path=CHAT)
    await settle()
    assert len(asks(world)) == 1

    connection.leave()
    await answering

    assert world.router.edge.upload_totals.bytes_held == 0
    assert not any(worker.started for worker in world.workers.values())


@in_world()
async def test_a_stream_with_a_picture_goes_on_at_another_worker(world: World):
    one = await world.worker("w1", script=streams(2, fails(Reason.ENGINE_DEAD)), render=says())
    other = await world.worker("w2", script=streams(), render=says(media_end=TOKENS))
    give_legs(world, "w2", 5)

    assert (await world.ask(chat(stream=True), path=CHAT)).body == ANSWER

    assert other.started[0].resume
    assert other.started[0].body == one.started[0].body
    assert counts(world) == {Outcome.RENDERED: 1, Outcome.KEPT: 1}
    assert last_decision(world).request.prompt_tokens > TOKENS


@in_world()
async def test_idle_workers_render_first(world: World):
    await three_workers(world, never)

    together = [asyncio.create_task(world.ask(chat(seed=seed), path=CHAT)) for seed in range(3)]
    await settle()

    assert [len(worker.rendered) for worker in world.workers.values()] == [1, 1, 1]
    await asyncio.gather(*together)
