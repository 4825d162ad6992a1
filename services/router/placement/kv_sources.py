"""Which workers hold how much of a prompt, and which of them a worker should ask for the KV that it lacks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.router.placement.candidates import Candidate
from services.router.placement.placement import PlacementRequest
from services.router.placement.specification import SOURCES_MAX
from services.router.state import fleet_table as t
from services.router.state.block_table import Boundaries, Depths
from services.router.state.cluster_view import ClusterView
from services.router.state.prefix_index import PrefixIndex
from services.router.state.worker_view import WorkerView
from shared.contracts.ids import WorkerId
from shared.contracts.kv_exchange import KvSource
from shared.contracts.workers import HashScheme


class PrefixDepths:
    """Counts how many blocks of a prompt, from its start, the worker of each row of the fleet table holds."""

    def __init__(self, cluster: ClusterView, index: PrefixIndex) -> None:
        self._cluster = cluster
        self._index = index
        self._slots: t.Ints = np.zeros(0, dtype=np.int64)
        self._as_of = (-1, -1)

    def by_slot(self, request: PlacementRequest) -> Depths:
        """Usable depth of each slot of the index, in hashes; ``slots`` has each row's slot."""
        scheme = self._cluster.boundaries(request.model)
        if scheme is None:
            return self._index.match_depths(request.hashes)
        hashes = request.hashes[: (scheme.usable(request.prompt_tokens) + scheme.beyond) // scheme.block_size]
        return self._index.match_boundaries(hashes, boundaries_of(scheme))

    def slots(self) -> t.Ints:
        """The index's slot of each row's worker; -1 for a worker that the index does not know."""
        table = self._cluster.table
        if self._as_of != (table.moves, self._index.moves):
            self._as_of = (table.moves, self._index.moves)
            self._slots = np.full(table.count, -1, dtype=np.int64)
            for worker_id, view in self._cluster.workers.items():
                self._slots[view.row] = self._index.slot(worker_id)
        return self._slots

    def beyond(self, hashes: Sequence[int], first: int, end: int, able: t.Bools) -> list[tuple[int, int, int]]:
        """The fewest ``able`` rows that together hold the blocks from ``first`` up to, not including, ``end``, each as
        (row, first block, end). They need not hold the blocks before ``first``.
        """
        rows = {int(self._slots[row]): row for row in np.flatnonzero(able).tolist()}
        mask = np.zeros(len(self._index.slots), dtype=np.bool_)
        mask[[slot for slot in rows if slot >= 0]] = True
        return [(rows[slot], begin, stop) for slot, begin, stop in self._index.cover(hashes, first, end, mask)]

    def further_sources(
        self, request: PlacementRequest, chosen: Candidate, able: t.Bools, tokens_min: int
    ) -> list[KvSource]:
        """Sources of the blocks after those that a worker fetches, although not of the ones before. Mostly none, and
        none for a model with boundaries, of which one source gives all that is read.
        ``able``: the rows that may be asked.
        """
        cluster, of, block_size = self._cluster, chosen.estimate, chosen.view.record.hashing.block_size
        first = (of.cached + of.fetched) // block_size
        last = min(max(0, request.prompt_tokens - 1) // block_size, len(request.hashes))
        if (
            chosen.view.record.hashing.boundaries
            or request.forced is not None
            or first >= last
            or not self._index.held(request.hashes[first])
        ):
            return []
        rows = able & (cluster.groups(request.model)[: len(able)] == of.group)
        rows[chosen.view.row] = False
        spans = self.beyond(request.hashes, first, last, rows)
        if sum(end - begin for _row, begin, end in spans) * block_size < tokens_min:
            return []
        holders = [(cluster.views[row], begin, end) for row, begin, end in spans[:SOURCES_MAX]]
        return [source_of(holder, first=begin, end=end) for holder, begin, end in holders if holder is not None]


def boundaries_of(scheme: HashScheme) -> Boundaries:
    """Where prefixes can be of use, in hashes."""
    size, window, step = scheme.block_size, scheme.window_stride, scheme.align // scheme.block_size
    beyond = scheme.window_beyond // size
    blocks = scheme.window_blocks + beyond // window
    # Where windows reach the prompt's beginning, vLLM cuts what it finds at a multiple of ``align`` before it drops the
    # drafter's block, and after it.
    short = step if beyond % step else 0
    return Boundaries(scheme.stride, step, window, blocks, scheme.full_beyond // size, beyond, scheme.narrow, short)


def named_sources(sources: Sequence[WorkerId], view: WorkerView, cluster: ClusterView, able: t.Bools) -> list[KvSource]:
    """The workers that a client wants ``view`` to ask for the prompt's KV. One that is lost, silent or excluded would
    only cost the time that the worker waits for a reply.
    """
    named = [cluster.workers.get(worker_id) for worker_id in sources]
    others = [holder for holder in named if holder is not None and holder is not view]
    return [source_of(holder) for holder in others if able[holder.row] and holder.pairs_with == view.pairs_with]


def source_of(
    view: WorkerView, *, first: int = 0, end: int = 0, follow: bool = False, worth_s: float = 0.0
) -> KvSource:
    """A worker in its present epoch as a source of a prompt's KV from hash ``first`` to before hash ``end`` (0: to the
    prompt's end), where a model with boundaries has one.
    """
    record = view.record
    of = record.hashing
    stride = of.stride or 1
    return KvSource(
        worker_id=record.worker_id,
        epoch=record.epoch,
        first=first // stride,
        end=-(-end // stride),
        boundary=end * of.block_size if of.boundaries else 0,
        follow=follow,
        worth_s=worth_s,
    )
