"""Requests queue in a router until they are placed, rejected or cancelled, or the router shuts down."""

from __future__ import annotations

import asyncio
import json

import pytest

from services.router.service import check
from services.router.settings import Settings
from shared.bus.frame_sender import LegFrames
from shared.contracts.failures import Failure, Reason
from shared.contracts.inference import LegReport, StartLeg
from shared.runtime.settings import SettingsError, load
from tests.unit.router.fake_worker import EVENTS, SSE, FakeWorker, Script, serve_leg
from tests.unit.router.world import World, in_world, parse, prompt, run_in_world, settle

LEGS_MAX = 16
"""The capacity of a fake worker."""


def taking(seconds: float) -> Script:
    """A worker that takes time to respond."""

    async def script(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
        await asyncio.sleep(seconds)
        serve_leg(worker, start, frames)

    return script


async def fill(world: World, **fields: object) -> list[asyncio.Task[None]]:
    """Send as many requests as the worker takes."""
    running = [world.begin(json.dumps(prompt(**fields)).encode())[1] for _ in range(LEGS_MAX)]
    await settle()
    return running


def waiting(world: World) -> int:
    return len(world.router.queue)


def sample(world: World, name: str, **labels: str) -> float:
    return world.router.registry.get_sample_value(name, labels) or 0.0


@in_world()
async def test_a_queued_request_is_served_when_its_worker_has_capacity(world: World):
    await world.worker("w1", script=taking(2.0))
    await fill(world)
    begun = asyncio.get_running_loop().time()

    response = await world.ask(prompt())

    assert response.status == 200
    assert 2.0 < asyncio.get_running_loop().time() - begun < 4.5
    assert waiting(world) == 0
    assert sample(world, "baton_router_admission_wait_seconds_count") == 1


@in_world()
async def test_the_queue_wait_is_part_of_the_ttft(world: World):
    async def timed(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        await asyncio.sleep(2.0)
        frames.head(200, SSE)
        frames.data(EVENTS[0], [1])
        frames.end(LegReport(prompt_tokens=9, completion_tokens=1, prefill_s=2.0, first_token_s=2.0, total_s=2.0))

    await world.worker("w1", script=timed)
    await fill(world)

    response = await world.ask(prompt(stream=True))

    decision = world.router.decisions.log.find(response.headers["x-baton-decision"])
    assert decision is not None
    assert decision.measured is not None
    assert 1.5 < decision.measured.admission_s < 2.5


@in_world(queue_max=2)
async def test_a_full_queue_responds_with_retry_after(world: World):
    await world.worker("w1", script=taking(2.0))
    await fill(world)
    queued = [world.begin(json.dumps(prompt()).encode()) for _ in range(2)]
    await settle()

    response = await world.ask(prompt())

    assert (response.status, response.error["code"]) == (503, "overloaded")
    assert int(response.headers["retry-after"]) >= 1
    assert waiting(world) == 2
    for connection, serving in queued:
        await serving
        assert parse(connection.written).status == 200


@in_world(queue_max=4)
async def test_a_heavy_tenant_gets_429_and_a_light_one_queues(world: World):
    await world.worker("w1", script=taking(2.0))
    await fill(world)
    greedy = [world.begin(json.dumps(prompt()).encode(), x_baton_tenant="greedy") for _ in range(4)]
    await settle()

    modest = await world.ask(prompt(), x_baton_tenant="modest")

    refused = parse(greedy[-1][0].written)
    assert (refused.status, refused.error["code"]) == (429, "over_share")
    assert int(refused.headers["retry-after"]) >= 1
    assert modest.status == 200
    assert sample(world, "baton_router_tenant_requests_total", tenant="greedy", outcome="over_share") == 1
    assert sample(world, "baton_router_tenant_requests_total", tenant="modest", outcome="ok") == 1


@in_world()
async def test_a_client_that_disconnects_while_queued_is_never_placed(world: World):
    worker = await world.worker("w1", script=taking(2.0))
    await fill(world)
    connection, serving = world.begin(json.dumps(prompt()).encode())
    await settle()

    connection.leave()
    await serving
    await asyncio.sleep(5)

    assert len(worker.started) == LEGS_MAX
    assert waiting(world) == 0
    assert world.router.relay.in_flight == set()
    assert sample(world, "baton_router_refusals_total", reason="cancelled") == 1


@in_world(request_s_max=5.0)
async def test_the_request_deadline_includes_the_queue_wait(world: World):
    await world.worker("w1", script=taking(60.0))
    await fill(world)
    begun = asyncio.get_running_loop().time()

    response = await world.ask(prompt())

    assert (response.status, response.error["code"]) == (504, "deadline")
    assert asyncio.get_running_loop().time() - begun == pytest.approx(5.0, abs=0.2)


@in_world(queue_s_max=3.0)
async def test_the_operators_maximum_queue_time_is_kept(world: World):
    await world.worker("w1", script=taking(60.0))
    await fill(world)

    response = await world.ask(prompt())

    assert (response.status, response.error["code"]) == (503, "overloaded")


@in_world()
async def test_shutdown_rejects_queued_requests(world: World):
    await world.worker("w1", script=taking(2.0))
    running = await fill(world)
    connection, serving = world.begin(json.dumps(prompt()).encode())
    await settle()

    world.router.queue.close()
    await serving
    late = await world.ask(prompt())

    assert parse(connection.written).status == 503
    assert "retry-after" in parse(connection.written).headers
    assert late.status == 503  # it would have to queue, too
    await asyncio.gather(*running)


@in_world()
async def test_queued_clients_get_an_error_when_the_last_worker_leaves(world: World):
    worker = await world.worker("w1", script=taking(60.0))
    await fill(world)
    connection, serving = world.begin(json.dumps(prompt()).encode())
    await settle()

    await worker.vanish()
    await serving

    assert (parse(connection.written).status, parse(connection.written).error["code"]) == (503, "no_worker")
    assert asyncio.get_running_loop().time() < 10


@in_world()
async def test_retries_skip_the_queue(world: World):
    def fail(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
        frames.fail(Failure(reason=Reason.ENGINE_DEAD, message="broken"))

    await world.worker("w1", script=fail)
    await world.worker("w2", script=taking(0.1))
    queue = world.router.queue

    responses = [await world.ask(prompt()) for _ in range(2)]

    assert [response.status for response in responses] == [200, 200]
    assert len(queue) == 0
    assert sample(world, "baton_router_admission_wait_seconds_count") == 0


def test_the_slo_class_orders_the_queue():
    slos = {"classes": {"batch": {"priority": 10}, "chat": {"priority": -10}}}

    async def scenario(world: World) -> None:
        worker = await world.worker("w1", script=taking(2.0))
        await fill(world)
        names = ["batch", "chat", "batch", "chat"]
        asks = [world.ask(prompt(user=name, baton={"class": name})) for name in names]

        await asyncio.gather(*asks)

        served = [json.loads(start.body)["user"] for start in worker.started[LEGS_MAX:]]
        assert served == ["chat", "chat", "batch", "batch"]

    run_in_world(scenario, slos=json.dumps(slos))


@pytest.mark.parametrize(
    ("headers", "fields", "status", "param"),
    [
        ({"x_baton_class": "bach"}, {}, 400, "x-baton-class"),
        ({"x_baton_tenant": "a b"}, {}, 400, "x-baton-tenant"),
        ({}, {"baton": {"priority": -1}}, 403, "baton.priority"),
        ({}, {"priority": -1}, 403, "priority"),
        ({}, {"priority": "-1"}, 400, "priority"),
        ({}, {"priority": True}, 400, "priority"),
        ({}, {"stop": ["\ud800"]}, 400, "stop"),
        ({}, {"user": "\udc00\ud800"}, 400, "user"),
        ({}, {"baton": {"sources": ["w1"]}}, 403, "baton"),
        ({}, {"baton": {"mode": "fast"}}, 400, "baton.mode"),
    ],
)
@in_world(force_placement="nobody")
async def test_unsupported_fields_are_rejected_by_name(world: World, headers, fields, status, param):
    worker = await world.worker("w1")

    response = await world.ask(json.dumps(prompt(**fields)).encode(), **headers)

    assert (response.status, response.error["param"]) == (status, param)
    assert worker.started == []


@in_world()
async def test_a_priority_that_the_key_permits_reaches_the_engine(world: World):
    worker = await world.worker("w1")

    assert (await world.ask(prompt(priority=7))).status == 200
    assert json.loads(worker.started[0].body)["priority"] == 7


@in_world()
async def test_json_that_only_engines_read_hides_no_priority(world: World):
    worker = await world.worker("w1")

    for body in (b'{"model": "m", "prompt": "x", "priority": -9, "seed": NaN}', b'{"\\u0070riority": -9, "seed": NaN}'):
        response = await world.ask(body)
        assert response.status == 400
        assert "JSON" in response.error["message"]
    assert worker.started == []


@in_world()
async def test_the_body_reaches_the_worker_unchanged(world: World):
    worker = await world.worker("w1")
    body = json.dumps(prompt(baton={"mode": "aggregated", "priority": 3})).encode()

    response = await world.ask(body)

    assert (response.status, worker.started[0].body) == (200, body)


@in_world()
async def test_tenants_beyond_the_maximum_share_one_label(world: World):
    await world.worker("w1")
    for number in range(40):
        await world.ask(prompt(), x_baton_tenant=f"tenant-{number}")
    await world.ask(prompt())

    name = "baton_router_tenant_requests_total"
    assert sample(world, name, tenant="(others)", outcome="ok") == 8
    assert sample(world, name, tenant="(none)", outcome="ok") == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slos": '{"default": {"ttft": 1}}'}, "ROUTER_SLOS"),
        ({"tenant_weights": '{"a": 0}'}, "ROUTER_TENANT_WEIGHTS"),
        ({"queue_max": "-1"}, "ROUTER_QUEUE_MAX"),
        ({"queue_s_max": "nan"}, "ROUTER_QUEUE_S_MAX"),
        ({"quarantine_s": "-1"}, "ROUTER_QUARANTINE_S"),
    ],
)
def test_invalid_settings_stop_the_router_and_are_named(settings, message):
    with pytest.raises(SettingsError, match=message):
        check(load(Settings, "ROUTER_", {f"ROUTER_{name.upper()}": value for name, value in settings.items()}))
