"""Read plans, carried out on numpy memory: every byte of every wanted head of every block, once, to its right place."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest

from connector.layout.routes import ReaderRank, block_bytes_of, halves_of, parts_of, routes_to, spans_of
from connector.layout.tensors import UnsupportedLayout, heads_of
from tests.support.kv_engines import RankMemory, ReadingRank, Shape, handshake

HEADS_AND_RANKS = [(heads, ranks) for heads in (1, 2, 4, 8) for ranks in (1, 2, 4, 8) if heads % ranks == 0 or ranks % heads == 0]  # fmt: skip


def shapes(seed: int) -> tuple[Shape, Shape, list[int], list[int]]:
    chance = random.Random(seed)
    heads = chance.choice((1, 2, 4, 8))
    ranks = [ranks for of, ranks in HEADS_AND_RANKS if of == heads]
    kernel_blocks = chance.choice((1, 2))
    common = {"kv_heads": heads, "layers": chance.randint(1, 4), "kernel_blocks": kernel_blocks}
    pair = "K" if chance.random() < 0.5 else ""
    dims = ["KBHNC", "BKHNC"] if pair and kernel_blocks == 1 else ["KBHNC"] if pair else ["BHNC"]
    holder = Shape(ranks=chance.choice(ranks), blocks=chance.randint(4, 24), dims=chance.choice(dims), **common)
    reader = Shape(ranks=chance.choice(ranks), blocks=chance.randint(4, 24), dims=chance.choice(dims), **common)
    wanted = chance.randint(1, min(holder.blocks, reader.blocks))
    return holder, reader, blocks(chance, holder, wanted), blocks(chance, reader, wanted)


def blocks(chance: random.Random, shape: Shape, count: int) -> list[int]:
    """Runs and single ones, as a block pool hands them out."""
    start = chance.randint(0, shape.blocks - count)
    numbers = list(range(start, start + count))
    if chance.random() < 0.5:
        numbers = chance.sample(range(shape.blocks), count)
    return numbers[::-1] if chance.random() < 0.2 else numbers


def copy(there: np.ndarray, here: np.ndarray) -> None:
    for (source, length, _), (target, again, _) in zip(there.tolist(), here.tolist(), strict=True):
        assert length == again
        ctypes.memmove(target, source, length)


@pytest.mark.parametrize("seed", range(300))
def test_what_a_rank_reads_is_its_heads_of_the_wanted_blocks_and_nothing_else(seed):
    of_holder, of_reader, remote, local = shapes(seed)
    holders = [RankMemory(of_holder, rank) for rank in range(of_holder.ranks)]
    for memory in holders:
        memory.fill()
    peer = handshake([memory.described() for memory in holders], of_holder)

    for rank in range(of_reader.ranks):
        reading = ReadingRank(RankMemory(of_reader, rank))
        reader = ReaderRank(reading.memory.described(), of_reader.ranks, of_reader.kv_heads)
        copied = 0
        for route in routes_to(reader, peer):
            there, here = spans_of(route, remote, local)
            copy(there, here)
            copied += int(here[:, 1].sum())

        reading.assert_holds(dict(zip(local, remote, strict=True)))
        assert copied == block_bytes_of(reader.memory) * len(local)  # nothing twice


def bytes_of(there: np.ndarray, here: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Where each byte comes from and goes to, with both devices."""
    return [
        (source + at, source_device, target + at, target_device)
        for (source, length, source_device), (target, _, target_device) in zip(
            there.tolist(), here.tolist(), strict=True
        )
        for at in range(length)
    ]


@pytest.mark.parametrize("seed", range(300))
def test_two_halves_of_a_read_are_the_same_bytes_as_many_in_each(seed):
    chance = random.Random(seed)
    lengths = [chance.choice((1, 2, 3, 8, 50)) for _ in range(chance.randint(1, 8))] + [chance.randint(2, 9)]
    there, here = (
        np.array([(chance.randint(0, 2**62), length, device) for length in lengths], dtype=np.uint64)
        for device in (3, 5)
    )

    first, second = halves_of(there, here)

    assert bytes_of(*first) + bytes_of(*second) == bytes_of(there, here)
    assert len(bytes_of(*second)) - len(bytes_of(*first)) in (0, 1)
    assert all(spans[:, 1].all() for half in (first, second) for spans in half), "no empty piece"


@pytest.mark.parametrize("seed", range(100))
def test_no_piece_can_be_made_longer(seed):
    of_holder, of_reader, remote, local = shapes(seed)
    peer = handshake([RankMemory(of_holder, rank).described() for rank in range(of_holder.ranks)], of_holder)
    reader = ReaderRank(RankMemory(of_reader, 0).described(), of_reader.ranks, of_reader.kv_heads)

    for route in routes_to(reader, peer):
        there, here = spans_of(route, remote, local)
        ends = {(int(a + n), int(b + n)) for (a, n, _), (b, _, _) in zip(there, here, strict=True)}
        begins = {(int(a), int(b)) for (a, _, _), (b, _, _) in zip(there, here, strict=True)}

        assert not ends & begins


def test_a_run_of_blocks_is_one_piece_in_each_layer():
    shape = Shape(layers=3)
    peer = handshake([RankMemory(shape, 0).described()], shape)
    reader = ReaderRank(RankMemory(shape, 0).described(), 1, shape.kv_heads)

    there, _ = spans_of(routes_to(reader, peer)[0], [3, 4, 5, 6], [9, 10, 11, 12])

    assert len(there) == 3


def test_two_ranks_of_a_reader_share_the_ranks_that_hold_a_latent_cache():
    shape = Shape(ranks=2, kv_heads=1)
    peer = handshake([RankMemory(shape, rank).described() for rank in range(2)], shape)
    readers = [ReaderRank(RankMemory(shape, rank).described(), 2, 1) for rank in range(2)]

    assert [[route.rank for route in routes_to(reader, peer)] for reader in readers] == [[0], [1]]


@pytest.mark.parametrize(("kv_heads", "ranks"), HEADS_AND_RANKS)
def test_all_heads_are_held_and_equally_often(kv_heads, ranks):
    held = [head for rank in range(ranks) for head in heads_of(rank, ranks, kv_heads)]

    assert sorted(held) == sorted(list(range(kv_heads)) * max(1, ranks // kv_heads))


def test_heads_that_do_not_divide_over_the_ranks_are_refused():
    with pytest.raises(UnsupportedLayout, match="6 KV heads do not divide over 4"):
        heads_of(0, 4, 6)


@pytest.mark.parametrize("seed", range(50))
def test_parts_cover_a_read_in_order_without_overlap(seed):
    chance = random.Random(seed)
    blocks_wanted, block_bytes = chance.randint(1, 500), chance.randint(1, 1 << 20)

    parts = list(parts_of(blocks_wanted, block_bytes, part_bytes=4 << 20))

    covered = [block for first, count in parts for block in range(first, first + count)]
    assert covered == list(range(blocks_wanted))
    assert all(count * block_bytes <= 4 << 20 or count == 1 for _, count in parts)
