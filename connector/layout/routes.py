"""Which bytes of which rank's memory are copied where, for blocks of a peer that are wanted here.

A rank reads the heads that it owns, of every layer, from whichever of the peer's ranks hold them. Where pieces are
neighbours on both sides they are copied as one: bigger pieces move faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from connector.layout.tensors import heads_of
from shared.contracts.kv_handshake import KvHandshake, KvLayer, KvRank

Numbers = NDArray[np.uint64]

PART_BYTES = 128 << 20
"""A read is cut into parts of about this size, which arrive or fail each for itself. In an engine each costs half a
millisecond to a whole one, beside the model's thread on its core; over shared memory this much takes twenty.
"""

FEW_PIECES = 256
"""Up to so many are counted sooner one by one."""


@dataclass(frozen=True, slots=True)
class ReaderRank:
    """The rank that reads."""

    memory: KvRank
    ranks: int
    """Of its engine."""
    kv_heads: int

    @property
    def heads(self) -> range:
        return heads_of(self.memory.rank, self.ranks, self.kv_heads)


@dataclass(frozen=True, slots=True)
class Route:
    """What one rank of a peer has for a reader: for each piece of a block, where it is in block 0 on either side."""

    rank: int
    """Of the peer."""
    devices: tuple[int, int]
    """Theirs and ours."""
    remote: Numbers
    remote_stride: Numbers
    local: Numbers
    local_stride: Numbers
    lengths: Numbers
    is_dense: bool
    """Of each piece, the next block's lies right behind this one's, on both sides."""
    rows: list[tuple[int, ...]]
    """The same numbers piece by piece, in the order of the peer's addresses."""


def routes_to(reader: ReaderRank, peer: KvHandshake) -> list[Route]:
    """One route for each of the peer's ranks that the reader needs. Expects compatible layouts."""
    return [_route(reader, peer, rank) for rank in _ranks_wanted(reader, peer)]


def _ranks_wanted(reader: ReaderRank, peer: KvHandshake) -> list[int]:
    holders: dict[range, list[int]] = {}
    for rank in range(len(peer.ranks)):
        holders.setdefault(heads_of(rank, len(peer.ranks), peer.kv_heads), []).append(rank)
    wanted = reader.heads
    return [
        ranks[reader.memory.rank % len(ranks)]  # those who hold the same share the load
        for heads, ranks in holders.items()
        if heads.start < wanted.stop and wanted.start < heads.stop
    ]


def _route(reader: ReaderRank, peer: KvHandshake, rank: int) -> Route:
    theirs = heads_of(rank, len(peer.ranks), peer.kv_heads)
    ours = reader.heads
    common = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
    layers = list(zip(peer.ranks[rank].layers, reader.memory.layers, strict=True))
    rows = sorted(row for remote, local in layers for row in _joined(_pieces(remote, local, common, (theirs, ours))))
    there, remote_stride, here, local_stride, lengths = np.array(rows, dtype=np.uint64).T
    return Route(
        rank=rank,
        devices=(peer.ranks[rank].device_id, reader.memory.device_id),
        remote=there,
        remote_stride=remote_stride,
        local=here,
        local_stride=local_stride,
        lengths=lengths,
        is_dense=bool((remote_stride == lengths).all() and (local_stride == lengths).all()),
        rows=rows,
    )


def _pieces(remote: KvLayer, local: KvLayer, common: range, heads: tuple[range, range]) -> Iterator[tuple[int, ...]]:
    for there, here in zip(remote.planes, local.planes, strict=True):
        yield (
            remote.base + there.offset + (common.start - heads[0].start) * there.head_bytes,
            remote.block_stride,
            local.base + here.offset + (common.start - heads[1].start) * here.head_bytes,
            local.block_stride,
            len(common) * here.head_bytes,
        )


def _joined(pieces: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Of one block: pieces that are neighbours on both sides are one."""
    joined: list[tuple[int, ...]] = []
    for there, there_stride, here, here_stride, length in pieces:
        last = joined[-1] if joined else (-1, 0, -1, 0, 0)
        if last == (there - last[4], there_stride, here - last[4], here_stride, last[4]):
            joined[-1] = (*last[:4], last[4] + length)
        else:
            joined.append((there, there_stride, here, here_stride, length))
    return joined


def spans_of(route: Route, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> tuple[Numbers, Numbers]:
    """Address, length and device of what to copy from and to, place by place; neighbours on both sides are one."""
    runs: Sequence[Sequence[int]] = (remote_blocks, local_blocks, [1] * len(local_blocks))
    if route.is_dense:
        runs = _runs(remote_blocks, local_blocks)
        if len(runs[0]) * len(route.rows) <= FEW_PIECES:
            return _few_spans(route, runs)
    there = _addresses(route.remote, route.remote_stride, runs[0])
    here = _addresses(route.local, route.local_stride, runs[1])
    lengths = (route.lengths[:, None] * np.array(runs[2], dtype=np.uint64)).ravel()
    if (there[1:] < there[:-1]).any():
        order = np.argsort(there)
        there, here, lengths = there[order], here[order], lengths[order]
    begins = np.ones(len(there), dtype=np.bool_)
    begins[1:] = (there[1:] != there[:-1] + lengths[:-1]) | (here[1:] != here[:-1] + lengths[:-1])
    firsts = np.flatnonzero(begins)
    joined = np.add.reduceat(lengths, firsts)
    return _spans(there[firsts], joined, route.devices[0]), _spans(here[firsts], joined, route.devices[1])


def _few_spans(route: Route, runs: Sequence[Sequence[int]]) -> tuple[Numbers, Numbers]:
    """The same without arrays, whose machinery a copy of many megabytes has just driven out of the core's caches."""
    there: list[tuple[int, int, int]] = []
    here: list[tuple[int, int, int]] = []
    next_there = next_here = -1
    for remote, remote_stride, local, local_stride, length in route.rows:
        for first_there, first_here, count in zip(*runs, strict=True):
            begin_there, begin_here = remote + remote_stride * first_there, local + local_stride * first_here
            size = length * count
            if begin_there == next_there and begin_here == next_here:
                size += there[-1][1]
                there[-1], here[-1] = (there[-1][0], size, route.devices[0]), (here[-1][0], size, route.devices[1])
            else:
                there.append((begin_there, size, route.devices[0]))
                here.append((begin_here, size, route.devices[1]))
            next_there, next_here = there[-1][0] + size, here[-1][0] + size
    return np.array(there, dtype=np.uint64), np.array(here, dtype=np.uint64)


def _runs(remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> list[list[int]]:
    """First blocks there, first blocks here, and how many: as far as blocks are neighbours on both sides. A prompt's
    blocks are few runs, and counting them is quicker than arrays of all of them.
    """
    there: list[int] = []
    here: list[int] = []
    counts: list[int] = []
    next_there = next_here = -1
    for remote, local in sorted(zip(remote_blocks, local_blocks, strict=True)):
        if remote == next_there and local == next_here:
            counts[-1] += 1
        else:
            there.append(remote)
            here.append(local)
            counts.append(1)
        next_there, next_here = remote + 1, local + 1
    return [there, here, counts]


def _addresses(base: Numbers, stride: Numbers, blocks: Sequence[int]) -> Numbers:
    """Piece by piece, in each the blocks in their order."""
    return (base[:, None] + stride[:, None] * np.array(blocks, dtype=np.uint64)).ravel()


def _spans(addresses: Numbers, lengths: Numbers, device: int) -> Numbers:
    spans = np.empty((len(addresses), 3), dtype=np.uint64)
    spans[:, 0], spans[:, 1], spans[:, 2] = addresses, lengths, device
    return spans


def halves_of(there: Numbers, here: Numbers) -> tuple[tuple[Numbers, Numbers], tuple[Numbers, Numbers]]:
    """Spans to copy from and to, cut where half of the bytes are behind; a piece that lies across is cut in two."""
    ends = np.cumsum(there[:, 1])
    half = ends[-1] // 2
    row = int(np.searchsorted(ends, half))
    rest = ends[row] - half
    firsts, seconds = [], []
    for spans in (there, here):
        first, second = spans[: row + 1].copy(), spans[row:].copy()
        first[-1, 1] -= rest
        second[0] += np.array([first[-1, 1], 0, 0], dtype=np.uint64)
        second[0, 1] = rest
        firsts.append(first)
        seconds.append(second if rest else second[1:])
    return (firsts[0], firsts[1]), (seconds[0], seconds[1])


def parts_of(blocks: int, block_bytes: int, part_bytes: int) -> Iterator[tuple[int, int]]:
    """(first, count) of each part. Depends on nothing that differs between an engine's ranks: all cut alike."""
    count = max(1, part_bytes // block_bytes)
    for first in range(0, blocks, count):
        yield first, min(count, blocks - first)


def block_bytes_of(memory: KvRank) -> int:
    """Bytes of one block in one rank, all layers."""
    return sum(plane.head_bytes * plane.heads for layer in memory.layers for plane in layer.planes)
