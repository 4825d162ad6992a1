"""A store is a KV source and never gets a leg."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.placement.fleet import Fleet
from services.router.placement.placement import Placement, PlacementPolicy, PlacementRequest
from services.router.placement.placer import CostPlacer
from services.router.request.facts import ForcedWorkers, Mode, RequestFacts
from services.router.state.cluster_view import ClusterView
from services.router.state.prefix_index import PrefixIndex
from services.router.state.worker_speed import WorkerSpeed
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId
from shared.contracts.kv_events import KvSnapshot, pack_hashes
from shared.contracts.workers import Role
from tests.support.fleet_builders import load, record

BLOCK = 32
NOW = 0.0
HASHES = tuple(range(1, 21))
SLOW = WorkerSpeed(prefill_token_s=0.01)
"""An engine on which reading KV is faster than computing it."""


class Known:
    def __init__(self) -> None:
        self.cluster, self.index = ClusterView(), PrefixIndex()

    def add(self, name: str, role: Role, *, host: int = 0, disk: int = 0, device: int = 0, **load_fields) -> None:
        self.cluster.record(record(name, role=role, connector=load_fields.pop("connector", "baton-1")), NOW)
        self.cluster.set_speed(WorkerId(name), SLOW)
        self.cluster.report(load(name, role=role, **load_fields), NOW)
        self.index.join(WorkerId(name), 1)
        held = {
            "hashes": pack_hashes(HASHES[:device]),
            "host_hashes": pack_hashes(HASHES[:host]),
            "disk_hashes": pack_hashes(HASHES[:disk]),
        }
        self.index.restore(KvSnapshot(worker_id=WorkerId(name), epoch=1, seq=1, **held))

    def place(self, **fields):
        request = PlacementRequest(
            **{"model": "m", "prompt_tokens": 20 * BLOCK + 7, "hashes": HASHES, "may_decode_first": False, **fields}
        )
        return CostPlacer(self.cluster, self.index, PlacementPolicy()).place(request, NOW)


def test_a_source_is_waited_for_as_long_as_computing_would_take():
    known = Known()
    known.add("p1", Role.PREFILL, device=5)
    known.add("d1", Role.DECODE)
    known.add("s1", Role.STORE, disk=15)

    (source,) = known.place().sources

    assert source.worth_s == pytest.approx(SLOW.prefill_step_s + 10 * BLOCK * SLOW.prefill_token_s, rel=0.2)


def test_a_store_is_a_source_for_memory_and_file_blocks():
    for tier in ("host", "disk"):
        known = Known()
        known.add("p1", Role.PREFILL)
        known.add("d1", Role.DECODE)
        known.add("s1", Role.STORE, **{tier: 15})

        placement = known.place()

        assert isinstance(placement, Placement)
        assert placement.prefill is not None
        assert (placement.prefill.record.worker_id, placement.decode.record.worker_id) == ("p1", "d1")
        assert [(source.worker_id, source.first, source.end) for source in placement.sources] == [("s1", 0, 15)]


def test_a_store_of_another_fingerprint_is_no_source():
    known = Known()
    known.add("w1", Role.BOTH)
    known.add("s1", Role.STORE, host=20, connector="baton-2")

    placement = known.place()

    assert isinstance(placement, Placement)
    assert placement.sources == ()


def test_a_store_alone_gives_no_worker():
    known = Known()
    known.add("s1", Role.STORE, host=20)

    refused = known.place()

    assert not isinstance(refused, Placement)
    assert refused.reason is Reason.NO_WORKER


def test_a_store_is_not_ready_alone_but_counts_beside_workers():
    fleet = Fleet(PlacementPolicy())
    fleet.cluster.record(record("s1", role=Role.STORE, connector="baton-1"), NOW)

    assert not fleet.ready(NOW)

    fleet.cluster.record(record("w1", connector="baton-1"), NOW)
    facts = RequestFacts(path="/v1/completions", model="m")
    assert fleet.ready(NOW)
    assert fleet.prompt_matters(facts, 100_000)


workers = st.lists(
    st.tuples(st.sampled_from(list(Role)), st.integers(0, 20), st.integers(0, 20), st.integers(0, 16)), max_size=12
)


@given(workers=workers, mode=st.sampled_from(list(Mode)), whole=st.booleans(), asked=st.booleans(), first=st.booleans())
def test_no_leg_is_placed_on_a_store(workers, mode, whole, asked, first):
    known = Known()
    for number, (role, device, host, legs) in enumerate(workers):
        known.add(f"w{number}", role, device=device, host=host, legs=legs)
    stores = {f"w{number}" for number, (role, *_) in enumerate(workers) if role is Role.STORE}
    forced = ForcedWorkers(decode_worker=WorkerId(min(stores))) if asked and stores else None

    placement = known.place(
        mode=mode, unsplittable="several prompts" if whole else "", forced=forced, may_decode_first=first
    )

    if isinstance(placement, Placement):
        chosen = {view.record.worker_id for view in (placement.prefill, placement.decode) if view is not None}
        assert not chosen & stores
        assert forced is None
