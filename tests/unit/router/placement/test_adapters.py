"""Requests for a LoRA adapter go where it is loaded, and workers with other files under its name are no pair."""

from __future__ import annotations

import pytest

from services.router.http.api import list_models
from services.router.placement.fleet import Fleet
from services.router.placement.placement import Placement, PlacementPolicy, PlacementRequest, Rejection
from services.router.placement.revisions import NO_SHARES
from services.router.request.context import Served
from services.router.request.facts import Mode
from services.router.state.worker_view import WorkerView
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId
from shared.contracts.kv_events import KvSnapshot, pack_hashes
from shared.contracts.workers import LoraAdapter, Role, WorkerPhase
from tests.support.fleet_builders import adapter, load, record

NOW = 0.0
SQL, OTHER_SQL, MAIL = adapter("sql", "1"), adapter("sql", "2"), adapter("mail", "3")
BLOCKS = tuple(range(1, 40))


class Loras:
    """A fleet whose workers have loaded adapters."""

    def __init__(self, weighed_max: int = 12) -> None:
        self.fleet = Fleet(PlacementPolicy(weighed_max=weighed_max))

    def add(
        self, worker_id: str, role: Role, *adapters: LoraAdapter, phase=WorkerPhase.READY, epoch: int = 1, legs: int = 0
    ) -> None:
        named = record(worker_id, phase, epoch, role, connector="baton-1", adapters=adapters)
        self.fleet.cluster.record(named, NOW)
        self.fleet.cluster.report(load(worker_id, epoch, phase, role=role, legs=legs), NOW)
        self.fleet.index.join(WorkerId(worker_id), epoch)

    def holds(self, worker_id: str, *hashes: int) -> None:
        self.fleet.index.restore(KvSnapshot(worker_id=worker_id, epoch=1, seq=1, hashes=pack_hashes(hashes)))

    def place(self, model: str, **what: object) -> Placement | Rejection:
        request = PlacementRequest(model=model, prompt_tokens=32 * len(BLOCKS) + 5, **what)
        return self.fleet.place(request, NOW)

    def served_by(self, model: str, **what: object) -> tuple[str, str]:
        placement = self.place(model, **what)
        assert isinstance(placement, Placement), placement
        return placement.prefill.record.worker_id if placement.prefill else "", placement.decode.record.worker_id

    def view(self, worker_id: str) -> WorkerView:
        return self.fleet.cluster.workers[WorkerId(worker_id)]


def test_an_adapter_is_served_where_it_is_loaded():
    fleet = Loras()
    fleet.add("w1", Role.BOTH, MAIL)
    fleet.add("w2", Role.BOTH, SQL, MAIL)
    fleet.add("w3", Role.BOTH)

    assert {fleet.served_by("sql") for _ in range(6)} == {("", "w2")}
    assert {fleet.served_by("mail") for _ in range(6)} == {("", "w1"), ("", "w2")}
    assert len({fleet.served_by("m") for _ in range(6)}) == 3


def test_a_pair_needs_the_adapter_on_both_sides():
    fleet = Loras()
    fleet.add("p1", Role.PREFILL)
    fleet.add("d1", Role.DECODE, SQL)

    assert fleet.served_by("sql") == ("", "d1")
    assert fleet.served_by("m") == ("p1", "d1")

    fleet.add("p1", Role.PREFILL, SQL)
    assert fleet.served_by("sql") == ("p1", "d1")


@pytest.mark.parametrize("weighed_max", [12, 0], ids=["all", "shortlist"])
def test_other_files_under_one_name_make_no_pair(weighed_max):
    fleet = Loras(weighed_max)
    fleet.add("p1", Role.PREFILL, SQL)
    fleet.add("d1", Role.DECODE, OTHER_SQL)

    assert fleet.served_by("sql") == ("", "d1")
    assert isinstance(fleet.place("sql", mode=Mode.DISAGGREGATED), Rejection)
    assert fleet.served_by("m") == ("p1", "d1")

    fleet.add("p2", Role.PREFILL, OTHER_SQL)
    fleet.add("d2", Role.DECODE, SQL)
    assert {fleet.served_by("sql") for _ in range(8)} <= {("p1", "d2"), ("p2", "d1")}


def test_kv_is_fetched_only_from_workers_with_the_same_files():
    fleet = Loras()
    fleet.add("w1", Role.BOTH, SQL)
    fleet.add("w2", Role.BOTH, OTHER_SQL, legs=16)  # full: only a source
    fleet.holds("w2", *BLOCKS)

    assert fleet.place("sql", hashes=BLOCKS).sources == ()

    fleet.add("w1", Role.BOTH, OTHER_SQL)
    (source,) = fleet.place("sql", hashes=BLOCKS).sources
    assert source.worker_id == "w2"


def test_an_adapter_that_nobody_has_is_unknown():
    fleet = Loras()
    fleet.add("w1", Role.BOTH, SQL)

    assert fleet.place("mail").reason is Reason.MODEL_UNKNOWN

    fleet.add("w1", Role.BOTH)
    assert fleet.place("sql").reason is Reason.MODEL_UNKNOWN


def test_an_adapter_whose_only_worker_starts_again_may_come_back():
    fleet = Loras()
    fleet.add("w1", Role.BOTH, SQL)

    fleet.add("w1", Role.BOTH, phase=WorkerPhase.STARTING, epoch=2)
    assert fleet.place("sql").reason is Reason.NO_WORKER

    fleet.add("w1", Role.BOTH, phase=WorkerPhase.READY, epoch=2)
    assert fleet.place("sql").reason is Reason.MODEL_UNKNOWN


def test_models_lists_adapters_with_their_parent_and_files():
    fleet = Loras()
    fleet.add("p1", Role.PREFILL, SQL)
    fleet.add("d1", Role.DECODE, SQL, MAIL)
    fleet.add("d2", Role.DECODE, OTHER_SQL, phase=WorkerPhase.DRAINING)

    model, mail, sql = list_models(fleet.fleet, NO_SHARES, NOW, 0)

    assert (model["id"], model["parent"]) == ("m", None)
    assert (sql["id"], sql["parent"], sql["root"]) == ("sql", "m", "sql")
    assert sql["files"] == [{"sha256": "1", "workers": {"prefill": 1, "decode": 1}}]
    assert mail["files"] == [{"sha256": "3", "workers": {"decode": 1}}]


def test_an_adapter_cannot_hide_a_model():
    fleet = Loras()
    fleet.add("w1", Role.BOTH, adapter("m", "9"))

    assert [one["parent"] for one in list_models(fleet.fleet, NO_SHARES, NOW, 0)] == [None]
    assert fleet.view("w1").hashed_adapter("m") is None


def test_a_stream_continues_only_with_the_same_files():
    fleet = Loras()
    for name, loaded in (("w1", SQL), ("w2", OTHER_SQL), ("w3", SQL)):
        fleet.add(name, Role.BOTH, loaded)
    began = Served.by(fleet.view("w1"), "sql")

    assert [began.same_on(fleet.view(name)) for name in ("w2", "w3")] == [False, True]
    assert Served.by(fleet.view("w1"), "m").same_on(fleet.view("w2"))
