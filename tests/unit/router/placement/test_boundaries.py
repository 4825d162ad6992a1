"""A prefix of a model with windows or recurrent state is of use up to a boundary, and no further."""

from __future__ import annotations

import msgspec
import pytest

from services.router.placement.placement import Placement, PlacementPolicy, PlacementRequest
from services.router.placement.placer import CostPlacer
from services.router.request.facts import Mode
from services.router.state.cluster_view import ClusterView
from services.router.state.prefix_index import PrefixIndex
from services.router.state.record_check import record_fault
from services.router.state.worker_speed import WorkerSpeed
from services.router.tokenize.block_hash import goes_on
from shared.contracts.ids import WorkerId
from shared.contracts.kv_events import KvSnapshot, pack_hashes
from shared.contracts.kv_exchange import KvSource
from shared.contracts.workers import HashScheme, Role
from tests.support.fleet_builders import load, record

HASHES = tuple(range(101, 131))
UNIT = 32
STATE = HashScheme(block_size=UNIT, index_block=4 * UNIT, boundaries=True)
"""Recurrent state: boundaries at each hash, full-attention blocks of four."""
WINDOW = HashScheme(block_size=UNIT, index_block=UNIT, boundaries=True, alignment=2 * UNIT)
ONLY_WINDOWS = HashScheme(block_size=UNIT, boundaries=True)

THREE_BLOCKS = HashScheme(block_size=UNIT, index_block=UNIT, boundaries=True, window_block=UNIT, window_blocks=3)


class Fleet:
    """``at`` are numbers of hashes, from 1."""

    def __init__(self, scheme: HashScheme) -> None:
        self.cluster, self.index, self.scheme = ClusterView(), PrefixIndex(), scheme

    def add(self, worker_id: str, role: Role, full: int = 0, at: tuple[int, ...] = (), partial: int = 0) -> None:
        """A worker with ``full`` full-attention blocks, perhaps a ``partial`` one that ends there, and boundaries."""
        described = record(worker_id, role=role, connector="baton-1")
        self.cluster.record(msgspec.structs.replace(described, hashing=self.scheme), 0.0)
        self.cluster.set_speed(WorkerId(worker_id), WorkerSpeed(transfer_token_s=1e-9))
        self.cluster.report(load(worker_id, role=role), 0.0)
        self.index.join(WorkerId(worker_id), 1)
        blocks = list(HASHES[self.scheme.stride - 1 :: self.scheme.stride][:full]) if self.scheme.stride else []
        named = [*blocks, *HASHES[partial - 1 : partial]] if partial else blocks
        self.index.restore(
            KvSnapshot(
                worker_id=WorkerId(worker_id),
                epoch=1,
                seq=1,
                hashes=pack_hashes(named),
                boundary_hashes=pack_hashes(HASHES[one - 1] for one in at),
            )
        )

    def place(self, tokens: int, compiled: bool) -> Placement:
        request = PlacementRequest(
            model="m", may_decode_first=False, prompt_tokens=tokens, hashes=HASHES[: tokens // UNIT], fetch_tokens_min=1
        )
        placement = CostPlacer(self.cluster, self.index, PlacementPolicy(), compiled=compiled).place(request, 0.0)
        assert isinstance(placement, Placement)
        return placement


@pytest.fixture(params=[True, False], ids=["C", "Python"])
def compiled(request) -> bool:
    return bool(request.param)


@pytest.mark.parametrize(
    ("scheme", "held", "tokens", "cached"),
    [
        (STATE, {"full": 3, "at": (2, 7, 10)}, 20 * UNIT, 10),
        (STATE, {"full": 2, "at": (2, 7, 10)}, 20 * UNIT, 7),
        (STATE, {"full": 2, "at": (2, 7, 10), "partial": 10}, 20 * UNIT, 10),
        (STATE, {"full": 1, "at": (2, 7, 10), "partial": 10}, 20 * UNIT, 2),
        (STATE, {"full": 5}, 20 * UNIT, 0),
        (STATE, {"full": 5, "at": (7, 10)}, 10 * UNIT, 7),
        (STATE, {"full": 5, "at": (7, 10)}, 10 * UNIT + 1, 7),
        (STATE, {"at": (3,), "partial": 3}, 20 * UNIT, 3),
        (WINDOW, {"full": 9, "at": (4, 7, 8, 10)}, 20 * UNIT, 8),
        (WINDOW, {"full": 9, "at": (4, 8)}, 9 * UNIT, 8),
        (WINDOW, {"full": 9, "at": (4, 8)}, 8 * UNIT, 4),
        (ONLY_WINDOWS, {"at": (3, 9)}, 20 * UNIT, 9),
        (THREE_BLOCKS, {"full": 20, "at": (1, 2, 6, 7, 8, 12, 13)}, 20 * UNIT, 8),
        (THREE_BLOCKS, {"full": 7, "at": (1, 2, 6, 7, 8, 12, 13)}, 20 * UNIT, 2),
    ],
)
def test_what_is_cached_ends_at_the_longest_boundary_that_full_attention_reaches(
    scheme, held, tokens, cached, compiled
):
    fleet = Fleet(scheme)
    fleet.add("w1", Role.BOTH, **held)

    assert fleet.place(tokens, compiled).cached_tokens == cached * UNIT


def test_a_source_gives_all_up_to_its_boundary_in_full_attention_blocks(compiled):
    fleet = Fleet(STATE)
    fleet.add("p1", Role.PREFILL, full=2, at=(5,))
    fleet.add("d1", Role.DECODE, full=4, at=(5, 14), partial=14)
    fleet.add("d2", Role.DECODE, full=7, at=(12,))

    placement = fleet.place(29 * UNIT, compiled)

    assert (placement.cached_tokens, placement.fetched_tokens) == (5 * UNIT, 9 * UNIT)
    sources = [source for source in placement.sources if source.worker_id == "d1"]
    assert sources == [KvSource(worker_id=WorkerId("d1"), epoch=1, first=1, end=4, boundary=14 * UNIT)]


@pytest.mark.parametrize(("held", "is_handed_over"), [(7, True), (8, False)])
def test_a_worker_with_the_prompts_last_boundary_needs_no_handoff(held, is_handed_over, compiled):
    """Of a prompt of nine whole hashes the last one is computed: full attention alone would hand it over."""
    fleet = Fleet(STATE)
    fleet.add("p1", Role.PREFILL)
    fleet.add("d1", Role.DECODE, full=3, at=(held,))
    request = PlacementRequest(model="m", mode=Mode.DISAGGREGATED, prompt_tokens=9 * UNIT, hashes=HASHES[:9])

    placement = CostPlacer(fleet.cluster, fleet.index, PlacementPolicy(), compiled=compiled).place(request, 0.0)

    assert (placement.prefill is not None) == is_handed_over


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"index_block": -32}, "index block"),
        ({"index_block": 48}, "index block"),
        ({"index_block": 64, "boundaries": False}, "index block"),
        ({"index_block": 1 << 40}, "index block"),
        ({"alignment": 16}, "alignment"),
        ({"alignment": -1}, "alignment"),
        ({"block_size": 0}, "block size"),
        ({"window_block": 64}, "window"),
        ({"window_block": 31}, "window"),
        ({"window_blocks": 0}, "window"),
        ({"window_blocks": 1 << 40}, "window"),
        ({"dropped": 31}, "cached prefix"),
        ({"dropped": -32}, "cached prefix"),
        ({"dropped": 1 << 40}, "cached prefix"),
        ({"dropped": 32}, ""),
        ({}, ""),
        ({"index_block": 0}, ""),
        ({"index_block": 64, "alignment": 96}, ""),
        ({"alignment": 128, "window_block": 64, "window_blocks": 9}, ""),
    ],
)
def test_a_scheme_that_contradicts_itself_is_refused(changes, fault):
    scheme = msgspec.structs.replace(STATE, **changes)

    found = record_fault(msgspec.structs.replace(record(), hashing=scheme))

    assert fault in found if fault else not found


def test_a_prompt_is_hashed_on_while_its_last_whole_full_attention_block_is_held():
    held = {104, 108}.__contains__

    assert [goes_on(HASHES[:count], 4, held) for count in (0, 3, 4, 7, 8, 11, 12, 13)] == [True] * 6 + [False] * 2
    assert goes_on(HASHES, 0, held)
    assert [goes_on(HASHES[:count], 1, {101}.__contains__) for count in (0, 1, 2)] == [True, True, False]


def test_an_engine_with_a_drafter_uses_a_block_less_of_each_prompt():
    drafting = msgspec.structs.replace(THREE_BLOCKS, full_beyond=UNIT, window_beyond=UNIT)

    assert [drafting.usable(blocks * UNIT + more) // UNIT for blocks in (1, 2, 4) for more in (0, 1)] == [
        0,
        0,
        1,
        1,
        3,
        3,
    ]
    assert [THREE_BLOCKS.usable(blocks * UNIT + more) // UNIT for blocks in (1, 2) for more in (0, 1)] == [0, 1, 1, 2]
