"""Which worker gets which prefix."""

from __future__ import annotations

import msgspec
import pytest

from services.worker.kv_exchange.prefix_copy import STORE_RANK, CopyTarget, CopyTargets, copy_targets
from shared.contracts.workers import Role, WorkerPhase
from tests.support.fleet_builders import record
from tests.unit.connector.holding import chain

ME = record("me", WorkerPhase.DRAINING)


def spread(*names: str, blocks: int = 100, ranks: dict[str, int] | None = None) -> CopyTargets:
    return CopyTargets(CopyTarget(name, (ranks or {}).get(name, 0), blocks) for name in names)


def give(to: CopyTargets, worker_id: str, hashes: list[bytes]) -> None:
    missed = to.reserve(worker_id, hashes)
    to.note_fetched(worker_id, hashes, missed=missed, moved=missed, held=len(hashes))


def test_unrelated_chains_are_spread_evenly():
    to = spread("a", "b", "c")
    got = {"a": 0, "b": 0, "c": 0}
    for number in range(9):
        hashes = chain(4, str(number))
        best = to.ranked(hashes)[0]
        give(to, best, hashes)
        got[best] += 1

    assert got == {"a": 3, "b": 3, "c": 3}


def test_a_target_with_part_of_a_chain_gets_the_rest():
    to = spread("a", "b")
    hashes = chain(10)
    to.note_held("b", hashes[:6])

    assert to.ranked(hashes) == ["b", "a"]


def test_a_target_with_more_memory_gets_more():
    to = CopyTargets([CopyTarget("small", 0, 100), CopyTarget("large", 0, 300)])
    for number in range(8):
        hashes = chain(10, str(number))
        give(to, to.ranked(hashes)[0], hashes)

    assert to.ranked(chain(10, "next"))[0] == "large"
    assert to.ranked(chain(60, "long")) == ["large"], "the small one would lose more than half of its memory"


def test_one_worker_never_fills_more_than_half_of_anothers_memory():
    to = spread("a", blocks=20)
    give(to, "a", chain(8, "1"))

    assert to.ranked(chain(3, "2")) == []
    assert to.ranked(chain(2, "2")) == ["a"]
    assert to.ranked(chain(8, "1")) == ["a"], "it has that already"


@pytest.mark.parametrize(("moved", "held"), [(4, 4), (4, 10)], ids=["the rest did not come", "it had the rest"])
def test_only_fetched_blocks_count_as_filled(moved, held):
    to = spread("a", blocks=20)
    hashes = chain(10)
    missed = to.reserve("a", hashes)
    to.note_fetched("a", hashes, missed=missed, moved=moved, held=held)

    assert to.ranked(chain(6, "other")) == ["a"]
    assert to.ranked(chain(7, "other")) == []


def test_stores_take_chains_that_fit_no_engine():
    to = CopyTargets([CopyTarget("store", STORE_RANK, 1000), CopyTarget("same", 0, 20), CopyTarget("other", 1, 20)])
    order = []
    for number in range(3):
        hashes = chain(10, str(number))
        order.append(to.ranked(hashes)[0])
        give(to, order[-1], hashes)

    assert order == ["same", "other", "store"]


@pytest.mark.parametrize(
    ("mine", "ranks"),
    [
        (Role.PREFILL, {Role.PREFILL: 0, Role.BOTH: 0, Role.DECODE: 1, Role.STORE: 2}),
        (Role.DECODE, {Role.PREFILL: 1, Role.BOTH: 0, Role.DECODE: 0, Role.STORE: 2}),
        (Role.BOTH, {Role.PREFILL: 0, Role.BOTH: 0, Role.DECODE: 0, Role.STORE: 2}),
    ],
)
def test_targets_of_the_same_role_come_first(mine, ranks):
    me = record("me", WorkerPhase.DRAINING, role=mine)
    found = copy_targets(me, [record(role.value, role=role) for role in Role])

    assert {taker.worker_id: taker.rank for taker in found} == {role.value: rank for role, rank in ranks.items()}


def test_targets_are_ready_caching_workers_of_the_same_fingerprint():
    others = [
        record("leaves", WorkerPhase.DRAINING),
        record("comes", WorkerPhase.PROBING),
        record("another-connector", connector="other"),
        msgspec.structs.replace(record("forgets"), prefix_caching=False),
        record("stays"),
        ME,
    ]

    assert [taker.worker_id for taker in copy_targets(ME, others)] == ["stays"]


def test_a_store_may_be_filled_to_the_last_block():
    to = CopyTargets([CopyTarget("store", STORE_RANK, 20)])

    assert to.ranked(chain(20)) == ["store"]
    assert to.ranked(chain(21)) == []
