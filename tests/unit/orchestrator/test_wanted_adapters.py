"""Which workers an order about an adapter concerns, and what stays wanted."""

from __future__ import annotations

import pytest

from services.orchestrator.adapter_orders import (
    OrderRefused,
    after_load,
    after_unload,
    checked,
    lacking,
    model_of,
    targets,
    wanted_key,
)
from shared.contracts.fleet_orders import ORDER_WORKERS_MAX, AdapterAction, OrderAdapter
from shared.contracts.ids import WorkerId
from shared.contracts.workers import FleetWorker, LoraAdapter, Role, WorkerPhase
from tests.support.fleet_builders import adapter, record

SQL = adapter("sql")


def worker(name: str, *adapters: LoraAdapter, model: str = "m", phase=WorkerPhase.READY, role=Role.BOTH) -> FleetWorker:
    named = record(name, phase, role=role, models=(model, f"{model}-alias"), adapters=adapters)
    return FleetWorker(record=named, phase=phase, since_s=1.0, silent_s=0.0)


FLEET = [worker("w1"), worker("w2", SQL), worker("w3", phase=WorkerPhase.STARTING), worker("s1", role=Role.STORE)]


def load(*workers: str, path: str = "sql-v1", **fields: object) -> OrderAdapter:
    return OrderAdapter(
        action=AdapterAction.LOAD, name="sql", path=path, workers=[WorkerId(one) for one in workers], **fields
    )


def unload(*workers: str) -> OrderAdapter:
    return OrderAdapter(action=AdapterAction.UNLOAD, name="sql", workers=[WorkerId(one) for one in workers])


def test_without_workers_an_order_is_for_all_ready_ones():
    assert targets(load(), "m", FLEET) == ["w1", "w2"]
    assert targets(unload(), "m", FLEET) == ["w2"]
    assert targets(load("w1"), "m", FLEET) == ["w1"]
    for missing in ("w3", "s1", "w9"):
        with pytest.raises(OrderRefused, match=missing):
            targets(load("w1", missing), "m", FLEET)


def test_the_model_must_be_clear():
    two = [*FLEET, worker("x1", model="other")]

    assert model_of(load(), FLEET) == "m"
    assert model_of(load(model="other-alias"), two) == "other"
    assert model_of(load("x1"), two) == "other"
    for order, fleet in ((load(), two), (load("w1", "x1"), two), (load(), []), (load(model="third"), two)):
        with pytest.raises(OrderRefused):
            model_of(order, fleet)


@pytest.mark.parametrize(
    "order",
    [
        OrderAdapter(action=AdapterAction.LOAD, name="", path="p"),
        OrderAdapter(action=AdapterAction.LOAD, name="a" * 129, path="p"),
        OrderAdapter(action=AdapterAction.LOAD, name="a\nb", path="p"),
        OrderAdapter(action=AdapterAction.LOAD, name="a"),
        OrderAdapter(action=AdapterAction.LOAD, name="a", path="p" * 1025),
        OrderAdapter(action=AdapterAction.LOAD, name="a", path="p\0"),
        OrderAdapter(action=AdapterAction.LOAD, name="a", path="p", workers=["w.*"]),
        OrderAdapter(action=AdapterAction.UNLOAD, name="a", workers=["w"] * (ORDER_WORKERS_MAX + 1)),
    ],
)
def test_orders_that_would_confuse_are_refused(order):
    with pytest.raises(OrderRefused):
        checked(order)


def test_who_gave_an_order_cannot_break_the_log():
    order = checked(load("w2", "w1", "w2", by="mallory\n2026 INFO root: load" + "x" * 500))

    assert order.by.isprintable()
    assert len(order.by) == 128
    assert order.workers == ["w1", "w2"]


def test_a_worker_that_starts_later_lacks_what_is_wanted():
    wanted = after_load(load(), "m", None, 7)
    assert lacking([wanted], FLEET) == [("w1", wanted)]
    assert lacking([wanted], [worker("w9"), worker("x1", model="other")]) == [("w9", wanted)]

    named = after_load(load("w2"), "m", None, 7)
    assert lacking([named], FLEET) == []


def test_orders_for_named_workers_add_up_while_they_mean_the_same_files():
    first = after_load(load("w1"), "m", None, 1)
    assert after_load(load("w2"), "m", first, 2).workers == ["w1", "w2"]
    assert after_load(load("w2", path="sql-v2"), "m", first, 2).workers == ["w2"]
    everywhere = after_load(load(), "m", first, 3)
    assert everywhere.workers == []
    assert after_load(load("w2"), "m", everywhere, 4).workers == []


def test_unloading_ends_what_is_wanted():
    named, everywhere = after_load(load("w1", "w2"), "m", None, 1), after_load(load(), "m", None, 1)

    assert after_unload(unload(), everywhere) is None
    assert after_unload(unload("w1"), named).workers == ["w2"]
    assert after_unload(unload("w1", "w2"), named) is None
    assert after_unload(unload("w1"), None) is None
    with pytest.raises(OrderRefused, match="wanted on all workers"):
        after_unload(unload("w1"), everywhere)


def test_keys_of_models_and_names_differ():
    pairs = [("a", "bc"), ("ab", "c"), ("a", "b/c"), ("a.b", "c")]

    assert len({wanted_key(*pair) for pair in pairs}) == len(pairs)
