"""Routes and spans, applied to numpy memory: each byte of the reader's heads of the given blocks is copied once."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from connector.layout.routes import ReaderRank, block_bytes_of, halves_of, part_blocks_of, parts_of, routes_to, spans_of
from connector.layout.tensors import UnsupportedLayout, heads_of
from shared.contracts.kv_exchange import GROUP, KvLayer, KvPlane, KvRank
from tests.support.examples import examples
from tests.support.kv_engines import RankMemory, ReadingRank, Shape, handshake, memories

HEADS_AND_RANKS = [
    (heads, ranks) for heads in (1, 2, 4, 8) for ranks in (1, 2, 4, 8) if heads % ranks == 0 or ranks % heads == 0
]
DIMS = {"": ["BHNC", "BLHNC"], "K": ["KBHNC", "BKHNC", "BLKHNC"]}
"""Layouts of a tensor, or with L of all layers' tensor, with keys and values side by side, or apart."""

Copy = tuple[Shape, Shape, list[int], list[int]]
"""Holder, reader, and the blocks of each, in pairs."""


@st.composite
def block_lists(draw: st.DrawFn, blocks: int, count: int) -> list[int]:
    """``count`` blocks as a block pool hands them out: a run, single blocks, or either reversed."""
    start = draw(st.integers(0, blocks - count))
    numbers = list(range(start, start + count))
    if draw(st.booleans()):
        numbers = draw(st.permutations(range(blocks)))[:count]
    return numbers[::-1] if draw(st.booleans()) else numbers


@st.composite
def copies(draw: st.DrawFn) -> Copy:
    """Two engines that differ in ranks, stages, number of blocks and order of dimensions."""
    heads = draw(st.sampled_from([1, 2, 4, 8]))
    ranks = st.sampled_from([ranks for of, ranks in HEADS_AND_RANKS if of == heads])
    kernel_blocks = draw(st.sampled_from([1, 2]))
    dims = st.sampled_from(DIMS[draw(st.sampled_from(["", "K"]))][: 1 if kernel_blocks > 1 else None])
    layers = draw(st.integers(1, 4))
    holder, reader = (
        Shape(
            ranks=draw(ranks),
            blocks=draw(st.integers(4, 24)),
            dims=draw(dims),
            kv_heads=heads,
            layers=layers,
            kernel_blocks=kernel_blocks,
            cut=draw(st.integers(0, layers - 1)),
        )
        for _ in range(2)
    )
    count = draw(st.integers(1, min(holder.blocks, reader.blocks)))
    return holder, reader, draw(block_lists(holder.blocks, count)), draw(block_lists(reader.blocks, count))


def ranks_case(held_by: int, read_by: int, kv_heads: int = 4, **of_both) -> Copy:
    """Runs and single blocks, between engines of these ranks."""
    shapes = [Shape(ranks=ranks, blocks=24, kv_heads=kv_heads, **of_both) for ranks in (held_by, read_by)]
    return shapes[0], shapes[1], [3, 4, 5, 9, 2], [7, 8, 9, 1, 0]


def copy(there: np.ndarray, here: np.ndarray) -> None:
    for (source, length, _), (target, again, _) in zip(there.tolist(), here.tolist(), strict=True):
        assert length == again
        ctypes.memmove(target, source, length)


@given(copies())
@example(ranks_case(1, 4))
@example(ranks_case(4, 1))
@example(ranks_case(4, 2, kv_heads=2))
@example(ranks_case(2, 4, kv_heads=1))
@example(ranks_case(2, 2, dims="KBHNC"))
@example(ranks_case(2, 1, dims="BKHNC"))
@example(ranks_case(1, 1, dims="BLHNC"))
@example(ranks_case(1, 2, dims="BLHNC"))
@example(ranks_case(2, 1, dims="BLKHNC"))
@example((Shape(blocks=1, dims="BLHNC"), Shape(blocks=4), [0], [2]))
@example(ranks_case(1, 2, kernel_blocks=2))
@example(ranks_case(1, 2, kernel_blocks=2, dims="KBHNC"))
@example((Shape(blocks=24), Shape(blocks=24), list(range(24)), list(range(24))[::-1]))
@example((Shape(cut=1), Shape(), [0], [2]))
@example((Shape(), Shape(cut=2, dims="BLHNC"), [0], [2]))
@example((Shape(cut=1, ranks=4), Shape(cut=2, ranks=2), [0, 1], [2, 3]))
@example((Shape(cut=1, ranks=4, kv_heads=2), Shape(ranks=2, kv_heads=2), [0, 1], [2, 3]))
@settings(max_examples=examples(200))
def test_a_rank_reads_its_heads_of_the_blocks_and_nothing_else(case):
    of_holder, of_reader, remote, local = case
    holders = memories(of_holder)
    for memory in holders:
        memory.fill()
    described = [memory.described() for memory in holders]
    peer = handshake([replace(rank, layers=rank.layers[::-1]) for rank in described], of_holder)  # paired by name

    for memory in memories(of_reader):
        reading = ReadingRank(memory)
        reader = ReaderRank(reading.memory.described(), of_reader.ranks)
        copied = 0
        for route in routes_to(reader, peer):
            there, here = spans_of(route, remote, local)
            copy(there, here)
            copied += int(here[:, 1].sum())

        reading.assert_holds(dict(zip(local, remote, strict=True)))
        assert copied == block_bytes_of(reader.memory, GROUP) * len(local)  # nothing twice


def bytes_of(there: np.ndarray, here: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Where each byte comes from and goes to, with both devices."""
    return [
        (source + at, source_device, target + at, target_device)
        for (source, length, source_device), (target, _, target_device) in zip(
            there.tolist(), here.tolist(), strict=True
        )
        for at in range(length)
    ]


LENGTHS = st.lists(st.sampled_from([1, 2, 3, 8, 50]), min_size=1, max_size=8)


@given(LENGTHS, st.integers(2, 9), st.integers(0, 2**32))
@example(lengths=[1], last=2, seed=0)
@example(lengths=[50, 50], last=2, seed=0)
@example(lengths=[8, 8], last=8, seed=0)
@example(lengths=[2, 2, 2], last=2, seed=0)
def test_halves_of_a_read_are_its_bytes_evenly_split(lengths, last, seed):
    rng, lengths = random.Random(seed), [*lengths, last]
    there, here = (
        np.array([(rng.randint(0, 2**62), length, device) for length in lengths], dtype=np.uint64) for device in (3, 5)
    )

    first, second = halves_of(there, here)

    assert bytes_of(*first) + bytes_of(*second) == bytes_of(there, here)
    assert len(bytes_of(*second)) - len(bytes_of(*first)) in (0, 1)
    assert all(spans[:, 1].all() for half in (first, second) for spans in half), "no empty piece"


@given(copies())
@example(ranks_case(1, 4))
@example(ranks_case(4, 1))
@example(ranks_case(2, 2, dims="KBHNC"))
@example(ranks_case(1, 2, kernel_blocks=2))
@example((Shape(blocks=24), Shape(blocks=24), list(range(24)), list(range(24))))
def test_no_span_can_be_joined_with_the_next(case):
    of_holder, of_reader, remote, local = case
    peer = handshake([memory.described() for memory in memories(of_holder)], of_holder)
    reader = ReaderRank(RankMemory(of_reader, 0).described(), of_reader.ranks)

    for route in routes_to(reader, peer):
        there, here = spans_of(route, remote, local)
        ends = {(int(a + n), int(b + n)) for (a, n, _), (b, _, _) in zip(there, here, strict=True)}
        begins = {(int(a), int(b)) for (a, _, _), (b, _, _) in zip(there, here, strict=True)}

        assert not ends & begins


def test_a_run_of_blocks_is_one_span_per_layer():
    shape = Shape(layers=3)
    peer = handshake([RankMemory(shape, 0).described()], shape)
    reader = ReaderRank(RankMemory(shape, 0).described(), 1)

    there, _ = spans_of(routes_to(reader, peer)[0], [3, 4, 5, 6], [9, 10, 11, 12])

    assert len(there) == 3


@pytest.mark.parametrize(
    ("holder", "reader", "spans"),
    [
        (Shape(dims="BLHNC"), Shape(dims="BLHNC"), 1),
        (Shape(dims="BLKHNC"), Shape(dims="BLKHNC"), 1),
        (Shape(dims="BLHNC", kv_heads=1), Shape(dims="BLHNC", kv_heads=1, ranks=4), 1),
        (Shape(dims="BLHNC"), Shape(dims="BHNC"), 3 * 4),
        (Shape(dims="BHNC"), Shape(dims="BLHNC"), 3 * 4),
        (Shape(dims="BLHNC", ranks=2), Shape(dims="BLHNC"), 3 * 4),
    ],
)
def test_a_run_of_blocks_is_one_span_where_both_engines_keep_layers_together(holder, reader, spans):
    peer = handshake([RankMemory(holder, rank).described() for rank in range(holder.ranks)], holder)
    rank = ReaderRank(RankMemory(reader, 0).described(), reader.ranks)

    there, _ = spans_of(routes_to(rank, peer)[0], [3, 4, 5, 6], [9, 10, 11, 12])

    assert len(there) == spans


def test_ranks_of_a_reader_read_a_latent_cache_from_different_ranks():
    shape = Shape(ranks=2, kv_heads=1)
    peer = handshake([RankMemory(shape, rank).described() for rank in range(2)], shape)
    readers = [ReaderRank(RankMemory(shape, rank).described(), 2) for rank in range(2)]

    assert [[route.rank for route in routes_to(reader, peer)] for reader in readers] == [[0], [1]]


def test_each_head_is_held_by_equally_many_ranks():
    for kv_heads, ranks in HEADS_AND_RANKS:
        held = [head for rank in range(ranks) for head in heads_of(rank, ranks, kv_heads)]

        assert sorted(held) == sorted(list(range(kv_heads)) * max(1, ranks // kv_heads)), (kv_heads, ranks)


def test_heads_that_do_not_divide_over_the_ranks_are_refused():
    with pytest.raises(UnsupportedLayout, match="6 KV heads do not divide over 4"):
        heads_of(0, 4, 6)


@given(st.integers(1, 500), st.lists(st.integers(1, 1 << 20), min_size=1, max_size=4))
@example(blocks=1, block_bytes=[1])
@example(blocks=500, block_bytes=[1 << 20])
@example(blocks=3, block_bytes=[8 << 20])
def test_parts_cover_a_read_in_order_without_overlap(blocks, block_bytes):
    planes = [KvPlane(offset=0, head_bytes=size, heads=1, total=1) for size in block_bytes]
    layers = [
        KvLayer(name="layer", group=GROUP, base=1, block_stride=plane.head_bytes, planes=[plane]) for plane in planes
    ]
    ranks = [KvRank(rank=0, agent=b"", device="cpu", device_id=0, layers=[layer]) for layer in layers]
    parts = list(parts_of(blocks, part_blocks_of(ranks, GROUP, part_bytes=4 << 20)))

    covered = [block for first, count in parts for block in range(first, first + count)]
    assert covered == list(range(blocks))
    assert all(count * max(block_bytes) <= 4 << 20 or count == 1 for _, count in parts)
