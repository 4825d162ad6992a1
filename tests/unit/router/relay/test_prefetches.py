"""Prefetches as clients order them: what the worker is told, what the client is told, and what the order costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shared.bus.port import AskRefused, Envelope
from shared.contracts.channels import KV_PREFETCH
from shared.contracts.engine_paths import MESSAGES, PLACED
from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import WorkerId
from shared.contracts.inference import PrefetchedKv, PrefetchKv
from tests.unit.router.relay.test_control_fields import BODIES
from tests.unit.router.world import COMPLETIONS, HttpResponse, World, in_world, keys, settle

ORDER = {"prefetch": True, "mode": "disaggregated", "prefill_worker": "p1", "sources": ["d1"]}
KEY = keys(permissions=["infer", "force-placement"], tokens_per_minute=1000)
Answer = Callable[[PrefetchKv], PrefetchedKv]


def fetched(tokens: int, failure: str = "") -> Answer:
    def answer(order: PrefetchKv) -> PrefetchedKv:
        return PrefetchedKv(
            worker_id=order.worker_id, epoch=order.epoch, held_tokens=32, fetched_tokens=tokens, failure=failure
        )

    return answer


async def prefetching(world: World, answer: Answer) -> list[PrefetchKv]:
    """A pair of which p1 takes orders; returns those that come."""
    prefill, _decode = await world.pair(connector="baton-1")
    orders: list[PrefetchKv] = []

    async def prefetch(order: PrefetchKv, _envelope: Envelope) -> PrefetchedKv:
        orders.append(order)
        return answer(order)

    await prefill.bus.answer(KV_PREFETCH, prefetch, worker_id=WorkerId("p1"))
    return orders


async def ask(world: World, path: str = COMPLETIONS, **fields: Any) -> HttpResponse:
    return await world.ask({**BODIES[path], "baton": ORDER, **fields}, path=path)


@pytest.mark.parametrize("path", PLACED)
@in_world()
async def test_the_worker_of_the_next_turn_gets_the_body_and_no_leg(world: World, path: str):
    orders = await prefetching(world, fetched(64))

    response = await ask(world, path)

    assert response.status == 200, response.body
    (order,) = orders
    assert (order.path, [one.worker_id for one in order.sources]) == (path, ["d1"])
    assert all(not worker.started for worker in world.workers.values())
    assert b'"object":"baton.prefetch"' in response.body
    assert b'"worker":"p1"' in response.body
    assert b'"fetched_tokens":64' in response.body
    assert response.headers["x-baton-decision"]


@pytest.mark.parametrize("path", [path for path in PLACED if path != MESSAGES])
@pytest.mark.parametrize(
    ("fields", "param"),
    [({"stream": True}, "stream"), ({"baton": {**ORDER, "prefetch": 1}}, "baton.prefetch")],
    ids=str,
)
@in_world()
async def test_each_path_refuses_orders_that_make_no_sense(world: World, path: str, fields: dict[str, Any], param: str):
    orders = await prefetching(world, fetched(0))

    response = await ask(world, path, **fields)

    assert (response.status, response.error["param"]) == (400, param)
    assert not orders


def refused(_order: PrefetchKv) -> PrefetchedKv:
    raise AskRefused(Failure(reason=Reason.WORKER_BUSY, message="prefetches have used their share of the link"))


@in_world()
async def test_an_order_that_a_worker_refuses_is_answered_with_the_reason(world: World):
    await prefetching(world, refused)

    response = await ask(world)

    assert response.status == 200
    assert b"prefetches have used their share of the link" in response.body
    assert world.router.prefetches.counts["refused"] == 1


@in_world()
async def test_a_worker_that_does_not_take_orders_is_no_error(world: World):
    await world.pair(connector="baton-1")

    response = await ask(world)

    assert response.status == 200
    assert b"the worker did not answer" in response.body
    assert world.router.prefetches.counts["failed"] == 1


@in_world()
async def test_what_a_worker_claims_is_bounded_by_the_prompt(world: World):
    await prefetching(world, lambda order: PrefetchedKv(
        worker_id=order.worker_id, epoch=order.epoch, held_tokens=-5, fetched_tokens=1 << 60
    ))  # fmt: skip

    response = await ask(world)

    assert b'"held_tokens":0' in response.body
    assert b'"missing_tokens":0' in response.body
    assert str(1 << 60).encode() not in response.body


@in_world(**KEY)
async def test_an_order_has_its_tenants_salt_and_costs_what_it_fetched(world: World):
    orders = await prefetching(world, fetched(64))
    body = {**BODIES[COMPLETIONS], "baton": ORDER}

    response = await world.ask(body, x_api_key="k")
    await settle()

    assert response.status == 200, response.body
    assert len(orders[0].cache_salt) == 64
    (client,) = world.router.authenticator._clients.values()
    assert client.rate_limit.left(world.router.clock.now())[0][2] == pytest.approx(1000 - 64, abs=1)
    world.router.accounting.catch_up()
    world.router.usage.unstored.next_report()
    (row,) = world.router.usage.unstored.report
    assert (row.counts.requests, row.counts.prompt_tokens, row.counts.completion_tokens) == (1, 64, 0)
    assert (row.counts.prefill_s, row.counts.decode_s) == (0.0, 0.0)


@in_world(**KEY)
async def test_orders_end_at_the_keys_limit_and_need_its_permission(world: World):
    orders = await prefetching(world, fetched(1000))
    long = {**BODIES[COMPLETIONS], "prompt": "hello " * 4000, "baton": ORDER}

    assert [(await world.ask(long, x_api_key="k")).status for _ in range(2)] == [200, 429]
    assert (await world.ask(long)).status == 401
    assert len(orders) == 1
