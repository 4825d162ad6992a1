"""Computes the memory spans to copy for a read: addresses at the peer's ranks (remote) and at the reading rank (local).

A rank reads the heads that it owns, of each of its layers, from the peer's ranks that hold them, whose pipeline stages
may be others. Layers are paired by name.
Block ids are those of one KV cache group, so each group has routes of its own. Pieces that are adjacent on both sides
are copied as one, because larger pieces transfer faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from connector.groups import GroupPlan
from connector.layout.tensors import heads_of, stages_of, totals_of
from shared.contracts.kv_exchange import KvHandshake, KvLayer, KvRank

Numbers = NDArray[np.uint64]

PART_BYTES = 128 << 20
"""A read is cut into parts of about this size, each of which arrives or fails independently. In an engine, a part costs
0.5 to 1 ms of CPU on the core that the transfer thread shares with the model; over shared memory, this many bytes take
20 ms.
"""

FEW_PIECES = 256
"""Up to this many pieces, a Python loop is faster than arrays."""


@dataclass(frozen=True, slots=True)
class ReaderRank:
    memory: KvRank
    ranks: int
    """Tensor-parallel ranks of its pipeline stage."""

    def heads(self, total: int) -> range:
        """Its heads of those of the whole model."""
        return heads_of(self.memory.rank, self.ranks, total)


@dataclass(frozen=True, slots=True)
class Route:
    """What a reader copies of one group from one rank of a peer: for each piece of a block, its address in block 0 on
    both sides.
    """

    rank: int
    """Index in the peer's ``KvHandshake.ranks``."""
    group: int
    devices: tuple[int, int]
    """Remote and local."""
    remote: Numbers
    remote_stride: Numbers
    local: Numbers
    local_stride: Numbers
    lengths: Numbers
    is_dense: bool
    """Whether, for each piece on both sides, block n + 1 directly follows block n."""
    rows: list[tuple[int, ...]]
    """One row of all these numbers for each piece, ordered by remote address."""


@dataclass(frozen=True, slots=True)
class _Share:
    """Heads that a reader copies from one rank of a peer."""

    remote_first: int
    """Index among the heads of the peer's rank."""
    local_first: int
    count: int


def routes_to(reader: ReaderRank, peer: KvHandshake) -> list[Route]:
    """A route for each group and each of the peer's ranks that the reader needs. Expects compatible layouts."""
    remote_layers = [{layer.name: layer for layer in rank.layers} for rank in peer.ranks]
    stages = stages_of(peer)
    size = len(stages[0])
    stage_of = {layer.name: number for number, stage in enumerate(stages) for layer in stage[0].layers}
    shares = {total: _shares(reader, size, total) for total in totals_of(reader.memory)}
    pieces: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for local in reader.memory.layers:
        first = size * stage_of[local.name]
        for number, plane in enumerate(local.planes):
            for rank, share in shares[plane.total].items():
                piece = _piece(remote_layers[first + rank][local.name], local, number, share)
                pieces.setdefault((first + rank, local.group), []).append(piece)
    return [_route(reader, index, peer.ranks[index], group, of) for (index, group), of in sorted(pieces.items())]


def _shares(reader: ReaderRank, ranks: int, total: int) -> dict[int, _Share]:
    """What the reader copies from each of a stage's ranks, of planes with so many heads in the whole model."""
    holders: dict[range, list[int]] = {}
    for rank in range(ranks):
        holders.setdefault(heads_of(rank, ranks, total), []).append(rank)
    wanted, shares = reader.heads(total), {}
    for held, holding in holders.items():
        first, end = max(held.start, wanted.start), min(held.stop, wanted.stop)
        if first < end:
            chosen = holding[reader.memory.rank % len(holding)]  # spreads readers over ranks that hold the same heads
            shares[chosen] = _Share(first - held.start, first - wanted.start, end - first)
    return shares


def _piece(remote: KvLayer, local: KvLayer, number: int, share: _Share) -> tuple[int, ...]:
    there, here = remote.planes[number], local.planes[number]
    return (
        remote.base + there.offset + share.remote_first * there.head_bytes,
        remote.block_stride,
        local.base + here.offset + share.local_first * here.head_bytes,
        local.block_stride,
        share.count * here.head_bytes,
    )


def _route(reader: ReaderRank, index: int, remote: KvRank, group: int, pieces: list[tuple[int, ...]]) -> Route:
    rows = _joined(sorted(pieces))
    remote_base, remote_stride, local_base, local_stride, lengths = np.array(rows, dtype=np.uint64).T
    return Route(
        rank=index,
        group=group,
        devices=(remote.device_id, reader.memory.device_id),
        remote=remote_base,
        remote_stride=remote_stride,
        local=local_base,
        local_stride=local_stride,
        lengths=lengths,
        is_dense=bool((remote_stride == lengths).all() and (local_stride == lengths).all()),
        rows=rows,
    )


def _joined(pieces: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The pieces of one block, with pieces that are adjacent on both sides joined: all layers, where both engines keep
    the layers of a block together.
    """
    joined: list[tuple[int, ...]] = []
    for remote, remote_stride, local, local_stride, length in pieces:
        last = joined[-1] if joined else (-1, 0, -1, 0, 0)
        if last == (remote - last[4], remote_stride, local - last[4], local_stride, last[4]):
            joined[-1] = (*last[:4], last[4] + length)
        else:
            joined.append((remote, remote_stride, local, local_stride, length))
    return joined


def spans_of(route: Route, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> tuple[Numbers, Numbers]:
    """Spans (address, length, device) to copy from and to, in pairs; spans adjacent on both sides are joined."""
    runs: Sequence[Sequence[int]] = (remote_blocks, local_blocks, [1] * len(local_blocks))
    if route.is_dense:
        runs = _runs(remote_blocks, local_blocks)
        if len(runs[0]) * len(route.rows) <= FEW_PIECES:
            return _few_spans(route, runs)
    remote = _addresses(route.remote, route.remote_stride, runs[0])
    local = _addresses(route.local, route.local_stride, runs[1])
    lengths = (route.lengths[:, None] * np.array(runs[2], dtype=np.uint64)).ravel()
    if (remote[1:] < remote[:-1]).any():
        order = np.argsort(remote)
        remote, local, lengths = remote[order], local[order], lengths[order]
    begins = np.ones(len(remote), dtype=np.bool_)
    begins[1:] = (remote[1:] != remote[:-1] + lengths[:-1]) | (local[1:] != local[:-1] + lengths[:-1])
    firsts = np.flatnonzero(begins)
    joined = np.add.reduceat(lengths, firsts)
    return _spans(remote[firsts], joined, route.devices[0]), _spans(local[firsts], joined, route.devices[1])


def _few_spans(route: Route, runs: Sequence[Sequence[int]]) -> tuple[Numbers, Numbers]:
    """``spans_of`` without array operations, whose code a copy of many megabytes has evicted from the CPU's caches."""
    remote_spans: list[tuple[int, int, int]] = []
    local_spans: list[tuple[int, int, int]] = []
    next_remote = next_local = -1
    for remote, remote_stride, local, local_stride, length in route.rows:
        for remote_block, local_block, count in zip(*runs, strict=True):
            remote_begin, local_begin = remote + remote_stride * remote_block, local + local_stride * local_block
            size = length * count
            if remote_begin == next_remote and local_begin == next_local:
                size += remote_spans[-1][1]
                remote_spans[-1], local_spans[-1] = (
                    (remote_spans[-1][0], size, route.devices[0]),
                    (local_spans[-1][0], size, route.devices[1]),
                )
            else:
                remote_spans.append((remote_begin, size, route.devices[0]))
                local_spans.append((local_begin, size, route.devices[1]))
            next_remote, next_local = remote_spans[-1][0] + size, local_spans[-1][0] + size
    return np.array(remote_spans, dtype=np.uint64), np.array(local_spans, dtype=np.uint64)


def _runs(remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> list[list[int]]:
    """Runs of blocks that are consecutive on both sides: first remote blocks, first local blocks, counts.

    A prompt's blocks form few runs, so this loop is faster than arrays of all blocks.
    """
    remote_firsts: list[int] = []
    local_firsts: list[int] = []
    counts: list[int] = []
    next_remote = next_local = -1
    for remote, local in sorted(zip(remote_blocks, local_blocks, strict=True)):
        if remote == next_remote and local == next_local:
            counts[-1] += 1
        else:
            remote_firsts.append(remote)
            local_firsts.append(local)
            counts.append(1)
        next_remote, next_local = remote + 1, local + 1
    return [remote_firsts, local_firsts, counts]


def _addresses(base: Numbers, stride: Numbers, blocks: Sequence[int]) -> Numbers:
    """Ordered by piece, then by block."""
    return (base[:, None] + stride[:, None] * np.array(blocks, dtype=np.uint64)).ravel()


def _spans(addresses: Numbers, lengths: Numbers, device: int) -> Numbers:
    spans = np.empty((len(addresses), 3), dtype=np.uint64)
    spans[:, 0], spans[:, 1], spans[:, 2] = addresses, lengths, device
    return spans


def halves_of(remote: Numbers, local: Numbers) -> tuple[tuple[Numbers, Numbers], tuple[Numbers, Numbers]]:
    """Spans to copy from and to, in two halves of equal bytes; a span across the middle is split."""
    ends = np.cumsum(remote[:, 1])
    half = ends[-1] // 2
    row = int(np.searchsorted(ends, half))
    remainder = ends[row] - half
    firsts, seconds = [], []
    for spans in (remote, local):
        first, second = spans[: row + 1].copy(), spans[row:].copy()
        first[-1, 1] -= remainder
        second[0] += np.array([first[-1, 1], 0, 0], dtype=np.uint64)
        second[0, 1] = remainder
        firsts.append(first)
        seconds.append(second if remainder else second[1:])
    return (firsts[0], firsts[1]), (seconds[0], seconds[1])


def part_blocks_of(ranks: Sequence[KvRank], group: int, part_bytes: int = PART_BYTES) -> int:
    """Blocks of one part of a read: of the rank with the longest blocks it has about ``part_bytes``."""
    return max(1, part_bytes // max(block_bytes_of(rank, group) for rank in ranks))


def parts_of(blocks: int, part_blocks: int) -> Iterator[tuple[int, int]]:
    """(first, count) of each part."""
    for first in range(0, blocks, part_blocks):
        yield first, min(part_blocks, blocks - first)


def kv_sizes_of(handshake: KvHandshake) -> tuple[int, int]:
    """``GroupPlan.sizes`` of all ranks: each reads for itself, also heads that another one has."""
    plan = GroupPlan(handshake.groups, handshake.hash_block_size, handshake.alignment)
    groups = range(len(handshake.groups))
    return plan.sizes([sum(block_bytes_of(rank, group) for rank in handshake.ranks) for group in groups])


def block_bytes_of(memory: KvRank, group: int) -> int:
    """Bytes of one block in one rank, over all layers of the group."""
    layers = (layer for layer in memory.layers if layer.group == group)
    return sum(plane.head_bytes * plane.heads for layer in layers for plane in layer.planes)
