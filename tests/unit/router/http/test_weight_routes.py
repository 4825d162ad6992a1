"""vLLM's calls for trainers at the router: who may make them, what is ordered, and what a trainer reads."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from services.router.http.weight_routes import CALLS
from shared.contracts.channels import DESCRIBE_WEIGHTS, ORDER_WEIGHTS
from shared.contracts.fleet_orders import (
    ModelWeights,
    OrderWeights,
    PauseMode,
    WantedWeights,
    Weights,
    WeightsAction,
    WeightsChanged,
    WeightsOrdered,
)
from tests.unit.router.auth.test_api_keys import ACME, KEYS, OPERATOR, bearer, entry
from tests.unit.router.http.test_http_server import running

QUESTIONS = ("/is_paused", "/weight_info", "/get_world_size")


class Orchestrator:
    def __init__(self) -> None:
        self.orders: list[OrderWeights] = []
        self.refusal = self.failure = ""
        self.models = ["m"]

    async def ordered(self, order: OrderWeights, _envelope: object) -> WeightsOrdered:
        self.orders.append(order)
        changes = [WeightsChanged(worker_id=name, epoch=1, failure=self.failure) for name in ("w1", "w2")]
        return WeightsOrdered(model="m", changes=changes, refusal=self.refusal)

    async def describe(self, _ask: object, _envelope: object) -> Weights:
        wanted = [WantedWeights(key=name, model=name, version="9", paused=True) for name in self.models]
        return Weights(models=[ModelWeights(wanted=one, workers=["w1"], ranks=4) for one in wanted])


@asynccontextmanager
async def led(**settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Orchestrator]]:
    orchestrator = Orchestrator()
    async with running(**settings) as up, httpx.AsyncClient(base_url=up.url) as client:
        await up.worker.bus.answer(ORDER_WEIGHTS, orchestrator.ordered)
        await up.worker.bus.answer(DESCRIBE_WEIGHTS, orchestrator.describe)
        yield client, orchestrator


async def test_a_trainers_calls_become_orders_and_get_vllms_answers():
    async with led(keys=KEYS) as (client, orchestrator):
        client.headers.update(bearer(OPERATOR))
        asked = [
            ("/pause?mode=keep&clear_cache=false", None),
            ("/init_weight_transfer_engine", {"init_info": {"rank_offset": 1}}),
            ("/start_weight_update", None),
            ("/update_weights", {"update_info": {"names": ["w"]}}),
            ("/update_weights", {"update_info": [{"names": ["v"]}]}),
            ("/finish_weight_update", {"weight_version": "9"}),
            ("/update_weights?model=m", {"weight_dir": "/checkpoints/step-9"}),
            ("/update_weights", {"update_info": {"weights_path": "step-9"}, "weight_version": "nine"}),
            ("/resume", None),
            ("/shutdown_weight_transfer_engine", None),
        ]
        answers = [(await client.post(path, json=body)).json() for path, body in asked]
        found = [(await client.get(path)).json() for path in QUESTIONS]

    assert answers == [CALLS[path.partition("?")[0]][1] for path, _body in asked]
    assert found == [{"is_paused": True}, {"weight_version": "9"}, {"world_size": 4}]
    told = orchestrator.orders
    assert (told[0].action, told[0].mode, told[0].clear_cache) == (WeightsAction.PAUSE, PauseMode.KEEP, False)
    assert [one.action.value for one in told] == [
        "pause", "init", "start", "update", "update", "finish", "load", "load", "resume", "shutdown",
    ]  # fmt: skip
    assert [json.loads(one.payload) for one in told[1:5] if one.payload] == [
        {"rank_offset": 1}, {"names": ["w"]}, [{"names": ["v"]}],
    ]  # fmt: skip
    assert [(one.path, one.version, one.model) for one in told[5:8]] == [
        ("", "9", ""), ("/checkpoints/step-9", "step-9", "m"), ("step-9", "nine", ""),
    ]  # fmt: skip
    assert all(one.by.startswith("tenant ops, API key ") for one in told)


async def test_only_keys_with_the_permission_admin_change_weights():
    keys = KEYS + entry("key-viewer", "ops", 'permissions = ["view", "infer"]')
    async with led(keys=keys) as (client, orchestrator):
        for headers, status in (({}, 401), (bearer("wrong"), 401), (bearer(ACME), 403), (bearer("key-viewer"), 403)):
            for path in CALLS:
                assert (await client.post(path, json={}, headers=headers)).status_code == status, (path, headers)
            for path in QUESTIONS:
                assert (await client.get(path, headers=headers)).status_code == status, (path, headers)
        assert orchestrator.orders == []


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/pause?mode=often", None, "mode"),
        ("/pause?clear_cache=perhaps", None, "clear_cache"),
        ("/init_weight_transfer_engine", {}, "init_info"),
        ("/update_weights", {}, "update_info"),
        ("/finish_weight_update", {"weight_version": 7}, "weight_version"),
        ("/resume", [1], "not an order"),
    ],
)
async def test_a_wrong_call_is_named(path, body, word):
    async with led() as (client, orchestrator):
        reply = await client.post(path, json=body)

        assert reply.status_code == 400
        assert word in reply.json()["error"]["message"]
        assert orchestrator.orders == []


async def test_failures_name_workers_and_can_be_tried_again():
    async with led() as (client, orchestrator):
        orchestrator.failure = "no memory"
        failed = await client.post("/resume")
        orchestrator.refusal = "there are several models (m, n)"
        refused = await client.post("/resume")
        orchestrator.models = ["m", "n"]
        unclear = await client.get("/get_world_size")
        named = await client.get("/get_world_size", params={"model": "n"})

    assert failed.status_code == 500
    assert failed.json()["error"]["message"] == "0 of 2 workers of m have carried it out. w1: no memory; w2: no memory"
    assert (refused.status_code, unclear.status_code, named.json()) == (400, 400, {"world_size": 4})
    assert "several models" in refused.json()["error"]["message"]


async def test_without_an_orchestrator_a_trainer_is_told():
    async with running() as up, httpx.AsyncClient(base_url=up.url) as client:
        assert (await client.post("/resume")).status_code == 503
