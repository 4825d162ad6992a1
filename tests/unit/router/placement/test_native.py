"""Placement in C: it reads the fleet table as Python writes it, refuses bad arguments and leaks nothing."""

from __future__ import annotations

import gc
import sys
import tracemalloc

import msgspec
import numpy as np
import pytest

from services.router.placement.native import IS_COMPILED
from services.router.placement.placement import Placement, PlacementPolicy, PlacementRequest
from services.router.placement.placer import CostPlacer
from services.router.placement.specification import PACKED, Question
from services.router.request.facts import ForcedWorkers
from services.router.state import fleet_table as t
from services.router.state.cluster_view import ClusterView
from services.router.state.prefix_index import PrefixIndex
from shared.contracts.ids import WorkerId
from shared.contracts.workers import Role
from tests.support.fleet_builders import load, record

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="not built here")

NOW = 0.0
PROMPT = PlacementRequest(model="m", prompt_tokens=1000, hashes=(1, 2, 3))
CALLS_MAX = 60
"""Of functions, Python's and others, for one disaggregated placement; the Python form makes more than three times as many."""
ROUNDS = 300
TRIES = 3


def fleet(workers: int, *roles: Role, compiled_form: bool = True) -> tuple[ClusterView, CostPlacer]:
    cluster, index = ClusterView(), PrefixIndex()
    placer = CostPlacer(cluster, index, PlacementPolicy(), compiled=compiled_form)
    for number in range(workers):
        add(cluster, index, number, roles[number % len(roles)])
    return cluster, placer


def add(cluster: ClusterView, index: PrefixIndex, number: int, role: Role) -> None:
    cluster.record(record(f"w{number}", role=role, connector="baton-1"), NOW)
    cluster.report(load(f"w{number}", role=role), NOW)
    index.join(f"w{number}", 1)


def test_the_table_has_the_same_rows_in_both_languages():
    from services.router.native import _placement

    assert [getattr(t, name) for name in _placement.NUMBERS.split()] == list(range(t.NUMBERS))
    assert [getattr(t, name) for name in _placement.FLAGS.split()] == list(range(t.FLAGS))


def test_it_follows_a_table_that_grows():
    cluster, placer = fleet(0, Role.BOTH)
    for number in range(3 * t.ROWS_AT_FIRST):
        add(cluster, PrefixIndex(), number, Role.BOTH)
        others = frozenset(cluster.workers) - {f"w{number}"}
        placement = placer.place(msgspec.structs.replace(PROMPT, excluded=others), NOW)
        assert isinstance(placement, Placement)
        assert placement.decode.record.worker_id == f"w{number}"
        assert isinstance(placed := placer.place(PROMPT, NOW), Placement)
        assert placed.considered == number + 1


def calls_of(placer: CostPlacer, request: PlacementRequest = PROMPT) -> int:
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    placer.place(request, NOW)
    sys.setprofile(count)
    try:
        placer.place(request, NOW)
    finally:
        sys.setprofile(None)
    return calls


def test_a_placement_makes_few_calls():
    native, python = (calls_of(fleet(4, Role.PREFILL, Role.DECODE, compiled_form=form)[1]) for form in (True, False))

    assert native <= CALLS_MAX
    assert native * 3 < python


def test_a_request_that_names_workers_is_placed_in_c_too():
    forced = ForcedWorkers(prefill_worker=WorkerId("w0"), decode_worker=WorkerId("w1"))
    request = msgspec.structs.replace(PROMPT, forced=forced, excluded=frozenset({WorkerId("w3")}))

    assert calls_of(fleet(100, Role.PREFILL, Role.DECODE)[1], request) <= 2 * CALLS_MAX


def test_placements_leave_no_references_behind():
    cluster, placer = fleet(4, Role.PREFILL, Role.DECODE)
    views = [cluster.workers[f"w{number}"] for number in range(4)]
    arrays = (cluster.table.numbers, cluster.table.flags, cluster.table.groups, cluster.mask("m"))

    def counts() -> list[int]:
        return [sys.getrefcount(one) for one in (None, *views, *arrays)]

    def place() -> None:
        for _ in range(ROUNDS):
            placement = placer.place(PROMPT, NOW)
            assert isinstance(placement, Placement)
            assert [chosen is not None for _part, _among, chosen in placement.candidates] == [True, True, False]

    def grown() -> tuple[int, int]:
        """References and bytes that further placements leave."""
        gc.collect()
        before = counts()
        held = tracemalloc.get_traced_memory()[0]
        place()
        gc.collect()
        return (
            max(abs(now - then) for now, then in zip(counts(), before, strict=True)),
            tracemalloc.get_traced_memory()[0] - held,
        )

    def leaves_nothing() -> bool:
        """The least that one placement could leave is an object of 16 bytes."""
        tried.append(grown())
        references, size = tried[-1]
        return references < ROUNDS // 10 and size < 8 * ROUNDS

    tried: list[tuple[int, int]] = []
    gc.freeze()  # What other tests have left need not be collected again each time.
    tracemalloc.start()
    try:
        place()
        # Other threads of this process may keep or free something meanwhile. A leak is there each time.
        assert any(leaves_nothing() for _ in range(TRIES)), tried
    finally:
        tracemalloc.stop()
        gc.unfreeze()


def test_a_replaced_table_is_released():
    arrays = [np.zeros((t.NUMBERS, 4)), np.zeros((t.FLAGS, 4), np.bool_), np.zeros(4, np.bool_)]
    before = [sys.getrefcount(one) for one in arrays]
    for _ in range(ROUNDS):
        native(*arrays)

    assert [sys.getrefcount(one) for one in arrays] == before


def native(numbers=None, flags=None, sources=None):
    from services.router.native._placement import NativePlacement

    given = (numbers, flags, sources)
    fitting = (np.ones((t.NUMBERS, 4)), np.ones((t.FLAGS, 4), np.bool_), np.zeros(4, np.bool_))
    return NativePlacement(*(one if one is not None else fit for one, fit in zip(given, fitting, strict=True)))


FIXED = np.zeros(4, np.bool_)
FIXED.flags.writeable = False


@pytest.mark.parametrize(
    "arrays",
    [
        {"numbers": np.ones((t.NUMBERS - 1, 4))},
        {"numbers": np.ones((t.NUMBERS, 5))},
        {"numbers": np.ones((t.NUMBERS, 4), np.int64)},
        {"numbers": np.ones((4, t.NUMBERS)).T},
        {"numbers": np.ones(t.NUMBERS * 4)},
        {"flags": np.ones((t.FLAGS + 1, 4), np.bool_)},
        {"flags": np.ones((t.FLAGS, 4), np.uint8)},
        {"sources": np.zeros(4, np.uint8)},
        {"sources": np.zeros(3, np.bool_)},
        {"sources": FIXED},
    ],
)
def test_a_table_of_another_shape_is_refused(arrays):
    with pytest.raises((ValueError, TypeError, BufferError)):
        native(**arrays)


MASK = np.ones(4, np.bool_)
QUESTION = Question(100, 10, 1, 0.0, 1.0, 1.0, 0.0, 0.5, 0, 0)
ASKED = {
    "question": QUESTION,
    "groups": np.zeros(4, np.int64),
    "depths": None,
    "slots": None,
    "in_use": None,
    "views": [None] * 4,
}


@pytest.mark.parametrize(
    "arguments",
    [(5, MASK, None, None, None, 0.0), (-1, MASK, None, None, None, 0.0), (4, MASK[:3], None, None, None, 0.0),
     (4, MASK, MASK[:3], None, None, 0.0), (4, MASK, None, MASK[:3], None, 0.0), (4, MASK, None, None, MASK[:3], 0.0),
     (4, MASK, (), None, None, 0.0), (4, MASK.astype(np.int8), None, None, None, 0.0), (4, MASK, None, None, None, "0"),
     (2**80, MASK, None, None, None, 0.0), ()],
)  # fmt: skip
def test_fit_refuses_rows_that_there_are_not(arguments):
    with pytest.raises((ValueError, TypeError, OverflowError)):
        native().fit(*arguments)


@pytest.mark.parametrize(
    "changed",
    [
        {"question": QUESTION._replace(tokens="1")},
        {"question": QUESTION._replace(tokens=2**70)},
        {"question": QUESTION._replace(now="0")},
        {"question": QUESTION[:-1]},
        {"question": None},
        {"groups": np.zeros(3, np.int64)},
        {"groups": np.zeros(4)},
        {"depths": np.zeros(4, np.int64), "slots": np.zeros(4, np.int64)},
        {"depths": np.zeros(4, np.int32)},
        {"in_use": np.zeros(3, np.int32)},
        {"in_use": np.zeros(4, np.int64)},
        {"views": [None] * 3},
        {"views": ()},
    ],
)
def test_choose_refuses_what_does_not_fit_the_table(changed):
    placing = native()
    assert placing.fit(4, MASK, None, None, None, 0.0) == 0

    with pytest.raises((ValueError, TypeError, OverflowError)):
        placing.choose(*{**ASKED, **changed}.values())


def test_hostile_sizes_are_bounded():
    numbers = np.ones((t.NUMBERS, 4))
    numbers[t.LEGS] = 0.0
    numbers[t.BLOCK_SIZE] = [0.0, -1.0, np.nan, 1e300]
    placing = native(numbers)
    assert placing.fit(4, MASK, None, None, None, 0.0) == 4
    slots = np.array([-1, 7, -(2**62), 2**62], np.int64)
    hostile = {
        "question": QUESTION._replace(tokens=2**53, tokens_out=-(2**53), fetch_tokens_min=-(2**53)),
        "depths": np.ones(4, np.int32),
        "slots": slots,
        "in_use": np.array([-1, 2**31 - 1, 1, -(2**31)], np.int32),
    }

    chosen = placing.choose(*{**ASKED, **hostile}.values())

    assert not isinstance(chosen, bool)
    assert [PACKED.unpack_from(chosen[5], PACKED.size * number)[2] for number in range(4)] == [0.0] * 4


def test_candidates_are_packed_as_python_reads_them():
    from services.router.native import _placement

    assert PACKED.size == _placement.CANDIDATE_BYTES
