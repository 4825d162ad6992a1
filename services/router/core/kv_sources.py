"""Who holds more of a prompt than the worker that is to compute it: whom that worker should ask before it computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.router.core.cluster_view import WorkerView
from shared.contracts.ids import WorkerId
from shared.contracts.kv_exchange import KvSource
from shared.contracts.workers import WorkerRecord

CONNECTOR = "baton"
"""Names of connectors that lease, offer and fetch KV by content begin with it."""
SOURCES_MAX = 2
"""The second is asked for what the first no longer has."""


def exchanges_kv(record: WorkerRecord) -> bool:
    """Whether its engine can be asked for KV by content."""
    return record.fingerprint.connector.startswith(CONNECTOR)


class Holders:
    """Who holds how many blocks of one prompt, from its start, the longest first. Too few tokens count as none."""

    __slots__ = ("_ranked", "_tokens_min")

    def __init__(self, views: Iterable[WorkerView], matches: Mapping[WorkerId, int], tokens_min: int) -> None:
        self._tokens_min = max(1, tokens_min)
        self._ranked: list[tuple[int, WorkerView]] = []
        for view in views:
            blocks = matches.get(view.record.worker_id, 0)
            if blocks * view.record.hashing.block_size >= self._tokens_min and exchanges_kv(view.record):
                self._ranked.append((blocks, view))
        self._ranked.sort(key=lambda ranked: -ranked[0])

    def blocks_beyond(self, view: WorkerView, first: int, blocks_max: int) -> int:
        """How many blocks from ``first`` on, up to ``blocks_max``, ``view`` may have from somebody."""
        for blocks, holder in self._ranked:
            gain = min(blocks, blocks_max) - first
            if gain * view.record.hashing.block_size < self._tokens_min:
                return 0
            if holder is not view and holder.pairs_with == view.pairs_with:
                return gain
        return 0

    def sources(self, view: WorkerView, first: int, blocks_max: int) -> tuple[KvSource, ...]:
        """Whom ``view`` should ask for them."""
        sources: list[KvSource] = []
        for blocks, holder in self._ranked:
            end = min(blocks, blocks_max)
            if len(sources) == SOURCES_MAX or (end - first) * view.record.hashing.block_size < self._tokens_min:
                break
            if holder is not view and holder.pairs_with == view.pairs_with:
                sources.append(source_of(holder, first=first, end=end))
        return tuple(sources)


NOBODY = Holders((), {}, 0)


def source_of(view: WorkerView, *, first: int = 0, end: int = 0, follow: bool = False) -> KvSource:
    """A worker's present life as a source; without ``end``, as far as the prompt goes."""
    record = view.record
    return KvSource(worker_id=record.worker_id, epoch=record.epoch, first=first, end=end, follow=follow)
