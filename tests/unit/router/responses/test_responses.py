"""Responses with state: what engines get, what clients get, what is kept, and what is refused."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import httpx
import msgspec
import pytest

from services.router.responses.background import TENANT_MAX
from services.router.service import Router
from services.router.settings import Settings
from services.router.telemetry.tracing import Tracing
from shared.bus.frame_sender import LegFrames
from shared.contracts.api_keys import digest_of
from shared.contracts.channels import RESPONSES as BUCKET
from shared.contracts.inference import LegReport, StartLeg
from tests.support.memory_bus import MemoryBus
from tests.support.virtual_time import LoopClock, as_test
from tests.unit.router.fake_worker import JSON, SSE, FakeWorker, wants_stream
from tests.unit.router.relay.test_message_streams import event
from tests.unit.router.world import HttpResponse, World, run_in_world, settle

RESPONSES = "/v1/responses"
KEPT: dict[str, Any] = {"response_bytes_max": 64 * 1024}
KEY = '[[key]]\ntenant = "{0}"\nname = "{0}"\nsha256 = "{1}"\n'
KEYS = f'salt = "{"s" * 32}"\n' + KEY.format("acme", digest_of(b"a")) + KEY.format("other", digest_of(b"o"))


def output(text: str) -> list[dict[str, Any]]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return [{"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}]


class Model:
    """An engine that numbers its responses. ``status``: of each of them."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.status = "completed"
        self.http_status = 200
        self.stays = False

    def __call__(self, _worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
        self.bodies.append(msgspec.json.decode(start.body))
        if self.stays:
            return
        number = len(self.bodies)
        response = {"id": f"resp_{number}", "status": self.status, "previous_response_id": None}
        made = {**response, "background": False, "output": output(f"answer {number}")}
        if self.http_status != 200:
            frames.head(self.http_status, JSON)
            frames.data(b'{"error":{"message":"no such thing","type":"t","param":null,"code":400}}')
        elif wants_stream(start):
            frames.head(200, SSE)
            frames.data(event("response.created", response={**response, "status": "in_progress"}))
            frames.data(event("response.output_text.delta", delta='event: response.completed\ndata: {"a":1}'), [1])
            last = event(f"response.{self.status}", response=made)
            frames.data(last[:20])
            frames.data(last[20:])
        else:
            frames.head(200, JSON)
            frames.data(msgspec.json.encode(made))
        frames.end(LegReport(prompt_tokens=9, completion_tokens=3))


async def respond(world: World, text: Any = "hello", key: str = "", **fields: Any) -> HttpResponse:
    headers = {"x_api_key": key} if key else {}
    return await world.ask({"model": "m", "input": text, **fields}, path=RESPONSES, **headers)


def answered(response: HttpResponse) -> dict[str, Any]:
    """The response object; of a stream, the one in its last event."""
    assert response.status == 200, response.body
    if not response.headers["content-type"].startswith(SSE):
        return msgspec.json.decode(response.body)
    last = response.body.removesuffix(b"\n\n").rpartition(b"\n\n")[2]
    return msgspec.json.decode(last.partition(b"data: ")[2])["response"]


async def call(world: World, method: str, path: str, router: Router | None = None, key: str = "") -> httpx.Response:
    transport = httpx.ASGITransport(app=(router or world.router).edge)
    headers = {"x-api-key": key} if key else {}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        return await client.request(method, f"{RESPONSES}/{path}", headers=headers)


def with_model(**settings: Any):
    def decorate(test):
        async def run(world: World, **kw: Any) -> None:
            model = Model()
            await world.worker("w1", script=model)
            await test(world, model, **kw)

        return as_test(test, lambda **kw: run_in_world(functools.partial(run, **kw), **{**KEPT, **settings}), given=2)

    return decorate


def said(number: int) -> dict[str, Any]:
    return output(f"answer {number}")[0]


def asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("stream", [False, True])
@with_model()
async def test_the_next_turn_is_the_whole_conversation_for_the_engine(world: World, model: Model, stream: bool):
    first = answered(await respond(world, "one", stream=stream, instructions="only now"))
    second = answered(await respond(world, [asked("two")], stream=stream, previous_response_id=first["id"]))
    third = answered(await respond(world, "three", stream=stream, previous_response_id=second["id"]))

    assert model.bodies[0]["input"] == "one"
    assert model.bodies[1]["input"] == [asked("one"), said(1), asked("two")]
    assert model.bodies[2]["input"] == [asked("one"), said(1), asked("two"), said(2), asked("three")]
    for body in model.bodies:
        assert body["store"] is False
        assert "previous_response_id" not in body
    assert "instructions" not in model.bodies[1]
    assert [one["previous_response_id"] for one in (first, second, third)] == [None, "resp_1", "resp_2"]
    assert all(one["store"] for one in (first, second, third))
    assert (await call(world, "GET", "resp_3")).json() == third


@with_model()
async def test_every_event_of_a_stream_arrives_once_and_those_with_the_response_tell_what_it_continues(
    world: World, model: Model
):
    await respond(world)
    streamed = await respond(world, stream=True, previous_response_id="resp_1")
    events = [one.partition(b"\ndata: ") for one in streamed.body.removesuffix(b"\n\n").split(b"\n\n")]

    assert [name for name, _, _ in events] == [
        b"event: response.created", b"event: response.output_text.delta", b"event: response.completed"
    ]  # fmt: skip
    responses = [msgspec.json.decode(data).get("response") for _, _, data in events]
    assert [one["previous_response_id"] for one in responses if one] == ["resp_1", "resp_1"]


@with_model()
async def test_a_response_is_kept_before_its_client_has_the_end(world: World, model: Model):
    bucket = world.hub.buckets["responses"]
    ends: list[bool] = []
    store = bucket.store

    def seen(key: str, payload: bytes) -> int:
        ends.append(b"response.completed" in connection.written)
        return store(key, payload)

    bucket.store = seen
    connection, answering = world.begin(
        msgspec.json.encode({"model": "m", "input": "x", "stream": True}), path=RESPONSES
    )
    await answering
    assert ends == [False]
    assert b"event: response.completed" in connection.written


@pytest.mark.parametrize("stream", [False, True])
@with_model(response_bytes_max=4096)
async def test_what_cannot_be_kept_is_answered_and_says_so(world: World, model: Model, stream: bool):
    response = answered(await respond(world, "x" * 5_000, stream=stream))

    assert (response["id"], response["store"]) == ("resp_1", False)
    assert (await call(world, "GET", "resp_1")).status_code == 404
    assert "at most 4096" in world.router.responses.failure
    assert answered(await respond(world, "short", stream=stream))["store"]
    assert not world.router.responses.failure


@with_model()
async def test_nothing_is_kept_for_a_client_that_does_not_want_it(world: World, model: Model):
    response = answered(await respond(world, store=False))
    kept = answered(await respond(world))
    last = answered(await respond(world, store=False, previous_response_id=kept["id"]))

    assert model.bodies[0]["store"] is False
    assert last["previous_response_id"] == kept["id"]
    assert (await call(world, "GET", response["id"])).status_code == 404
    assert (await call(world, "GET", last["id"])).status_code == 404


@with_model(response_bytes_max=0)
async def test_without_the_setting_engines_get_the_body_as_it_is(world: World, model: Model):
    await respond(world, store=True, previous_response_id="resp_0")

    assert model.bodies == [{"model": "m", "input": "hello", "store": True, "previous_response_id": "resp_0"}]
    refused = await call(world, "GET", "resp_1")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "responses_not_kept")
    assert "responses" not in world.hub.buckets


@with_model(keys=KEYS)
async def test_another_tenant_finds_nothing_under_the_same_id(world: World, model: Model):
    await respond(world, key="a")
    for method, path in (("GET", "resp_1"), ("DELETE", "resp_1"), ("GET", "resp_1/input_items")):
        refused = await call(world, method, path, key="o")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "response_not_found")
    assert (await call(world, "POST", "resp_1/cancel", key="o")).status_code == 404
    assert (await call(world, "GET", "resp_1")).status_code == 401
    refused = await respond(world, key="o", previous_response_id="resp_1")
    assert (refused.status, refused.error["code"]) == (404, "previous_response_not_found")
    assert (await call(world, "GET", "resp_1", key="a")).status_code == 200


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"previous_response_id": "resp_unknown"}, 404, "previous_response_id"),
        ({"previous_response_id": "../*.>\n\u1f600"}, 404, "previous_response_id"),
        ({"previous_response_id": msgspec.Raw(b'"\xff"')}, 400, "previous_response_id"),
        ({"previous_response_id": "x" * 10_000_000}, 400, "previous_response_id"),
        ({"previous_response_id": "resp_1", "conversation": "conv_1"}, 400, "previous_response_id"),
        ({"previous_response_id": "resp_1", "previous_input_messages": []}, 400, "previous_response_id"),
        ({"conversation": {"id": "conv_1"}}, 400, "conversation"),
        ({"background": True, "store": False}, 400, "background"),
        ({"background": True, "stream": True}, 400, "stream"),
    ],
)
@with_model()
async def test_what_cannot_be_is_refused_and_nothing_is_lost(
    world: World, model: Model, fields: dict[str, Any], status: int, param: str
):
    kept = answered(await respond(world))
    refused = await respond(world, **fields)

    assert (refused.status, refused.error["param"]) == (status, param), refused.body[:200]
    assert len(refused.body) < 1000
    assert len(model.bodies) == 1
    assert (await call(world, "GET", kept["id"])).json() == kept


@pytest.mark.parametrize("status", ["incomplete", "failed"])
@pytest.mark.parametrize("stream", [False, True])
@with_model()
async def test_only_a_response_with_an_answer_can_be_continued(world: World, model: Model, status: str, stream: bool):
    model.status = status
    first = answered(await respond(world, stream=stream))
    assert (await call(world, "GET", first["id"])).json()["status"] == status

    then = await respond(world, previous_response_id=first["id"])

    assert then.status == (200 if status == "incomplete" else 400)
    if status == "failed":
        assert "`failed`" in then.error["message"]


@with_model()
async def test_a_kept_response_expires_and_can_be_deleted(world: World, model: Model):
    await world.bus.make_bucket(BUCKET, ttl_s=60.0)
    first, second = answered(await respond(world)), answered(await respond(world))

    deleted = await call(world, "DELETE", first["id"])
    assert deleted.json() == {"id": first["id"], "object": "response", "deleted": True}
    assert (await call(world, "DELETE", first["id"])).status_code == 404
    await asyncio.sleep(61.0)
    expired = await call(world, "GET", second["id"])
    assert expired.status_code == 404
    assert "expired" in expired.json()["error"]["message"]


@with_model()
async def test_input_items_are_listed_in_pages(world: World, model: Model):
    await respond(world, [asked("one"), {"type": "function_call_output", "call_id": "c", "output": "2"}])
    await respond(world, "three", previous_response_id="resp_1")

    listed = (await call(world, "GET", "resp_2/input_items?order=asc")).json()
    kinds = [(item["type"], item.get("role")) for item in listed["data"]]
    assert kinds == [
        ("message", "user"), ("function_call_output", None), ("message", "assistant"), ("message", "user")
    ]  # fmt: skip
    assert listed["data"][0]["content"] == [{"type": "input_text", "text": "one"}]
    assert not listed["has_more"]
    newest = (await call(world, "GET", "resp_2/input_items?limit=1")).json()
    assert newest["data"] == listed["data"][-1:]
    assert newest["has_more"]
    after = (await call(world, "GET", f"resp_2/input_items?limit=3&after={newest['last_id']}")).json()
    assert after["data"] == listed["data"][-2::-1]
    for wrong in ("limit=0", "limit=101", "order=up", "after=nothing"):
        assert (await call(world, "GET", f"resp_2/input_items?{wrong}")).status_code == 400


@pytest.mark.parametrize("path", ["x" * 5_000, "a%2Fb", "%F0%9F%98%80", "*", "resp_.%3E", "%00"])
@with_model()
async def test_ids_that_no_response_has_are_not_found(world: World, model: Model, path: str):
    for method, rest in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        refused = await call(world, method, path + rest)
        assert refused.status_code in (404, 405), refused.text
        assert len(refused.content) < 1000
        assert refused.json()["error"]["message"]


@with_model()
async def test_while_nats_is_gone_clients_are_told_and_what_is_kept_stays(world: World, model: Model):
    kept = answered(await respond(world))
    world.bus.lose()
    assert (await call(world, "GET", kept["id"])).status_code == 503
    assert (await respond(world, previous_response_id=kept["id"])).status == 503
    world.bus.restore()
    assert (await call(world, "GET", kept["id"])).json() == kept


async def begun(world: World, **fields: Any) -> str:
    response = answered(await respond(world, background=True, **fields))
    assert (response["status"], response["background"], response["output"]) == ("queued", True, [])
    await settle()
    return str(response["id"])


async def retrieved(world: World, response_id: str, router: Router | None = None) -> dict[str, Any]:
    found = await call(world, "GET", response_id, router)
    assert found.status_code == 200, found.text
    return found.json()


@with_model()
async def test_a_response_in_the_background_is_made_without_its_client(world: World, model: Model):
    first = await begun(world)
    await asyncio.sleep(1.0)
    made = await retrieved(world, first)
    assert (made["id"], made["status"], made["output"]) == (first, "completed", output("answer 1"))
    assert made["background"]
    then = answered(await respond(world, "next", previous_response_id=first))
    assert then["previous_response_id"] == first
    assert model.bodies[1]["input"] == [asked("hello"), said(1), asked("next")]
    assert (await call(world, "POST", f"{first}/cancel")).json() == made
    assert (await call(world, "POST", f"{then['id']}/cancel")).status_code == 400

    model.http_status = 400
    refused = await begun(world)
    await asyncio.sleep(1.0)
    failed = await retrieved(world, refused)
    assert (failed["status"], failed["error"]["message"]) == ("failed", "no such thing")


async def another_router(world: World) -> Router:
    clock = LoopClock()
    router = Router(Settings(log_requests=False, **KEPT), MemoryBus(world.hub), clock, Tracing(None, clock))
    await router.responses.open()
    return router


@pytest.mark.parametrize("ends", ["cancel", "delete"])
@with_model()
async def test_a_response_in_the_background_is_ended_by_any_router_wherever_it_runs(
    world: World, model: Model, ends: str
):
    model.stays = True
    other = await another_router(world)
    response_id = await begun(world)
    assert (await retrieved(world, response_id, other))["status"] == "queued"
    assert (await respond(world, previous_response_id=response_id)).status == 400

    if ends == "cancel":
        assert (await call(world, "POST", f"{response_id}/cancel", other)).json()["status"] == "cancelled"
        assert (await retrieved(world, response_id))["status"] == "cancelled"
    else:
        assert (await call(world, "DELETE", response_id, other)).json()["deleted"]
        assert (await call(world, "GET", response_id)).status_code == 404
    await settle()
    assert len(world.workers["w1"].cancelled) == 1
    assert not world.router.relay.in_flight


@with_model()
async def test_a_response_in_the_background_fails_with_its_router(world: World, model: Model):
    model.stays = True
    other = await another_router(world)
    lost, stopped = await begun(world), await begun(world)
    world.bus.lose()
    world.hub.forget(world.bus)
    failed = await retrieved(world, lost, other)
    assert failed["status"] == "failed"
    assert "lost" in failed["error"]["message"]
    world.bus.restore()

    await world.router.responses.close()
    failed = await retrieved(world, stopped, other)
    assert failed["status"] == "failed"


@with_model(response_bytes_max=4096)
async def test_what_is_too_large_to_be_kept_is_not_made_in_the_background(world: World, model: Model):
    refused = await respond(world, "x" * 5_000, background=True)
    assert (refused.status, refused.error["code"]) == (413, "request_too_large")
    assert not model.bodies
    assert world.router.edge.upload_totals.bytes_held == 0


@with_model()
async def test_a_tenant_has_a_bounded_number_of_responses_in_the_background(world: World, model: Model):
    model.stays = True
    ids = [await begun(world) for _ in range(TENANT_MAX)]
    refused = await respond(world, background=True)
    assert (refused.status, refused.error["code"]) == (429, "too_many_background")
    for each in ids:
        assert (await call(world, "POST", f"{each}/cancel")).json()["status"] == "cancelled"
    assert world.router.edge.upload_totals.bytes_held == 0
    await begun(world)


@with_model()
async def test_a_client_that_leaves_cancels_its_response_and_nothing_is_kept(world: World, model: Model):
    model.stays = True
    connection, answering = world.begin(msgspec.json.encode({"model": "m", "input": "x"}), path=RESPONSES)
    await settle()
    connection.leave()
    await answering
    await settle()
    assert len(world.workers["w1"].cancelled) == 1
    assert "responses" not in world.hub.buckets
    assert world.router.edge.upload_totals.bytes_held == 0
