"""Who holds more of a prompt than the worker that is to compute it: whom that worker should ask before it computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.router.core.cluster_view import WorkerView
from shared.contracts.ids import WorkerId
from shared.contracts.kv_exchange import KvSource
from shared.contracts.workers import WorkerRecord

CONNECTOR = "baton"
"""Names of connectors that lease, offer and fetch KV by content begin with it."""
SOURCES_MAX = 2
"""The second is asked for what the first no longer has."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker and how many blocks of the prompt, from its start, it is believed to hold."""

    view: WorkerView
    blocks: int


def exchanges_kv(record: WorkerRecord) -> bool:
    """Whether its engine can be asked for KV by content."""
    return record.fingerprint.connector.startswith(CONNECTOR)


def rank_holders(views: Iterable[WorkerView], matches: Mapping[WorkerId, int], tokens_min: int) -> list[Holder]:
    """Those that anybody might want to ask, the longest match first."""
    holders = [
        Holder(view, blocks)
        for view in views
        if (blocks := matches.get(view.record.worker_id, 0)) * view.record.hashing.block_size >= tokens_min
        and blocks
        and exchanges_kv(view.record)
    ]
    holders.sort(key=lambda holder: -holder.blocks)
    return holders


def sources_beyond(
    view: WorkerView, first: int, blocks_max: int, holders: list[Holder], tokens_min: int
) -> tuple[KvSource, ...]:
    """Whom ``view`` should ask for blocks from ``first`` on; nobody, when they have too few more to be worth it."""
    gain_min = max(1, -(-tokens_min // view.record.hashing.block_size))
    sources: list[KvSource] = []
    for holder in holders:
        end = min(holder.blocks, blocks_max)
        if len(sources) == SOURCES_MAX or end - first < gain_min:
            break
        if holder.view is not view and holder.view.pairs_with == view.pairs_with:
            sources.append(source_of(holder.view, first=first, end=end))
    return tuple(sources)


def source_of(view: WorkerView, *, first: int = 0, end: int = 0, follow: bool = False) -> KvSource:
    """A worker's present life as a source; without ``end``, as far as the prompt goes."""
    record = view.record
    return KvSource(worker_id=record.worker_id, epoch=record.epoch, first=first, end=end, follow=follow)
