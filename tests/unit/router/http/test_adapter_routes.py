"""Orders about LoRA adapters at the router: the permission, the message to the orchestrator, the responses to
clients.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from services.router.http.adapter_routes import DIGEST_CHARS, LOAD, UNLOAD, OrderAdapters, giver
from shared.contracts.api_keys import digest_of
from shared.contracts.channels import ORDER_ADAPTER
from shared.contracts.fleet_orders import AdapterAction, AdapterChanged, AdapterOrdered, OrderAdapter
from shared.http.limits import BODY_BYTES_MAX
from tests.support.fleet_builders import adapter
from tests.unit.router.auth.test_api_keys import ACME, KEYS, OPERATOR, TOP, bearer, entry
from tests.unit.router.http.test_http_server import Running, running

SQL = {"lora_name": "sql", "lora_path": "sql-v1"}


class Orchestrator:
    """Answers with ``refusal`` or the changes of w1."""

    def __init__(self) -> None:
        self.orders: list[OrderAdapter] = []
        self.refusal = ""
        self.failure = ""

    async def ordered(self, order: OrderAdapter, _envelope) -> AdapterOrdered:
        self.orders.append(order)
        changes = [] if self.refusal else [AdapterChanged(worker_id="w1", epoch=1, failure=self.failure)]
        return AdapterOrdered(order=order, at_ms=1, changes=changes, refusal=self.refusal)


@asynccontextmanager
async def led(**settings: object) -> AsyncIterator[tuple[Running, httpx.AsyncClient, Orchestrator]]:
    orchestrator = Orchestrator()
    async with running(**settings) as up, httpx.AsyncClient(base_url=up.url) as client:
        await up.worker.bus.answer(ORDER_ADAPTER, orchestrator.ordered)
        yield up, client, orchestrator


def has_loaded(up: Running, *names: str) -> None:
    up.worker.adapters = tuple(adapter(name) for name in names)
    up.router.fleet.cluster.record(up.worker.record(), up.router.clock.now())


async def test_an_operator_loads_and_unloads_through_the_orchestrator():
    async with led(keys=KEYS) as (up, client, orchestrator):
        client.headers.update(bearer(OPERATOR))
        loaded = await client.post(LOAD, json={**SQL, "model": "m", "unknown": 1})
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
        has_loaded(up, "sql")
        unloaded = await client.post(UNLOAD, json={"lora_name": "sql", "lora_int_id": 3})
        assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")

    load, unload = orchestrator.orders
    assert (load.action, load.name, load.path, load.model) == (AdapterAction.LOAD, "sql", "sql-v1", "m")
    assert (unload.action, unload.name, unload.workers) == (AdapterAction.UNLOAD, "sql", [])
    assert load.by == f"tenant ops, API key {digest_of(OPERATOR)[:DIGEST_CHARS]}"


async def test_only_keys_with_the_permission_admin_give_orders():
    keys = KEYS + entry("key-viewer", "ops", 'permissions = ["view", "infer"]')
    async with led(keys=keys) as (_up, client, orchestrator):
        for headers, status in (({}, 401), (bearer("wrong"), 401), (bearer(ACME), 403), (bearer("key-viewer"), 403)):
            for path in (LOAD, UNLOAD):
                assert (await client.post(path, json=SQL, headers=headers)).status_code == status, headers
        assert orchestrator.orders == []


async def test_a_router_without_keys_takes_orders_from_this_machine_only():
    async with led() as (up, client, orchestrator):
        assert (await client.post(LOAD, json=SQL)).status_code == 200
        assert "without keys" in orchestrator.orders[0].by
        page = await client.post(LOAD, json=SQL, headers={"origin": "https://elsewhere.example"})
        assert page.status_code == 403
        assert len(orchestrator.orders) == 1
        public = OrderAdapters(up.router.bus, up.router.fleet.cluster, is_local=False)
        client_of_all = up.router.authenticator.client([])
        assert "API key" in public.refusal(client_of_all)
        assert giver(client_of_all) == orchestrator.orders[0].by


async def test_a_loaded_adapter_is_replaced_only_if_asked_for():
    async with led() as (up, client, orchestrator):
        has_loaded(up, "sql")
        refused = await client.post(LOAD, json=SQL)
        assert (refused.status_code, orchestrator.orders) == (400, [])
        assert "load_inplace" in refused.json()["error"]["message"]
        assert (await client.post(LOAD, json={**SQL, "load_inplace": True})).status_code == 200
        assert len(orchestrator.orders) == 1


async def test_what_cannot_be_carried_out_is_told():
    async with led() as (up, client, orchestrator):
        orchestrator.failure = "its rank is too large"
        failed = await client.post(LOAD, json=SQL)
        assert failed.status_code == 400
        assert "w1: its rank is too large" in failed.json()["error"]["message"]

        orchestrator.refusal = "no worker of m has loaded sql"
        assert (await client.post(UNLOAD, json={"lora_name": "sql"})).status_code == 404
        has_loaded(up, "sql")
        assert (await client.post(UNLOAD, json={"lora_name": "sql"})).status_code == 400


async def test_without_an_orchestrator_an_order_is_503():
    async with running() as up, httpx.AsyncClient(base_url=up.url) as client:
        refused = await client.post(LOAD, json=SQL)
        assert (refused.status_code, "orchestrator" in refused.json()["error"]["message"]) == (503, True)


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b"[", "application/json", 400),
        (b"{}", "application/json", 400),
        (b'{"lora_name":1,"lora_path":"a"}', "application/json", 400),
        (b'{"lora_name":"\xff"}', "application/json", 400),
        (b'{"lora_name":"a","lora_path":"b","is_3d_lora_weight":true}', "application/json", 400),
        (b'{"lora_name":"a","lora_path":"b"}', "text/plain", 415),
        (b" " * (BODY_BYTES_MAX + 1), "application/json", 413),
    ],
)
async def test_a_body_that_is_no_order_is_refused(body: bytes, content_type: str, status: int):
    async with led() as (_up, client, orchestrator):
        refused = await client.post(LOAD, content=body, headers={"content-type": content_type})
        assert (refused.status_code, orchestrator.orders) == (status, [])
        assert refused.json()["error"]["message"]


async def test_a_key_may_ask_only_so_often():
    async with led(keys=TOP + entry(OPERATOR, "ops", 'permissions = ["admin"]')) as (up, client, orchestrator):
        up.router.authenticator.client([(b"x-api-key", OPERATOR.encode())]).questions.take(up.router.clock.now(), 240)
        refused = await client.post(LOAD, json=SQL, headers=bearer(OPERATOR))
        assert (refused.status_code, orchestrator.orders) == (429, [])
        assert int(refused.headers["retry-after"]) >= 1
