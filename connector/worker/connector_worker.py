"""The connector's worker role, one for each rank of each pipeline stage: connects to peers and reads blocks.

It decides nothing about requests. No byte of a part moves after its report.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from connector.layout.engine_layout import (
    beyond_boundaries,
    groups_of,
    layers_of,
    memory_reader,
    model_heads_of,
    regions_of,
)
from connector.layout.routes import ReaderRank
from connector.layout.tensors import PROTOCOL_VERSION
from connector.messages import Orders, Results, read_settings
from connector.transfer.agent import Region, TransferAgent, set_ucx_defaults
from connector.worker.connections import PROBE_BYTES, Own
from connector.worker.notices import Notices
from connector.worker.transfer_thread import Copier, TransferThread
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import KvHandshake, KvRank

CLOCK_REPORT_S = 1.0
"""Interval at which a rank on another host than the scheduler says what its clock shows, while steps are made."""
MakeAgent = Callable[[str], TransferAgent]
"""Takes a name that is never used again."""


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):
    """One rank's part of the engine's handshake, for the scheduler role."""

    packed: bytes
    """A KvRank, msgpack."""
    node: int
    """Which of the engine's hosts the rank runs on; 0: its scheduler's."""
    clock_s: float
    """What the rank's monotonic clock shows."""

    def rank(self) -> KvRank:
        return msgspec.msgpack.decode(self.packed, type=KvRank)


class ConnectorWorker:
    """Call ``register_kv_caches`` first."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, make_agent: MakeAgent) -> None:
        self._settings = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._parallel = vllm_config.parallel_config
        self._heads = model_heads_of(vllm_config)
        self._cache = kv_cache_config
        self._beyond = max(beyond_boundaries(vllm_config, kv_cache_config))
        self._make_agent = make_agent
        self._node = int(self._parallel.node_rank_within_dp)
        self._clock_ahead_s = 0.0
        self._clock_told_at = -math.inf
        self._scratch = np.zeros(PROBE_BYTES, dtype=np.uint8)
        self._memory: KvRank | None = None
        self._thread: TransferThread | None = None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Make the engine's blocks readable by peers, and start the transfer thread."""
        size = int(self._parallel.tensor_parallel_size)
        stage, rank = divmod(int(self._parallel.rank) % (size * int(self._parallel.pipeline_parallel_size)), size)
        name = f"{self._settings.worker_id}-{self._settings.epoch}-{stage}-{rank}-{uuid.uuid4().hex[:8]}"
        set_ucx_defaults({cache.device.type for cache in kv_caches.values()})
        agent = self._make_agent(name)
        _create_pages(kv_caches)
        regions = regions_of(kv_caches)
        scratch = Region(self._scratch.ctypes.data, PROBE_BYTES, "cpu", 0)
        agent.register([*regions, scratch])
        self._memory = KvRank(
            rank=rank,
            agent=agent.metadata(),
            device=regions[0].device,
            device_id=regions[0].device_id,
            layers=layers_of(kv_caches, self._cache, self._heads),
            stage=stage,
        )
        own = Own(ReaderRank(self._memory, size), self._handshake(), scratch.base)
        read_memory = memory_reader(kv_caches)
        is_first = not (stage or rank)
        notices = Notices(agent, self._settings.grant_socket, time.monotonic) if is_first else None
        self._thread = TransferThread(
            lambda: Copier(agent, own, self._now, read_memory, notices), self._settings.copy_cores
        )

    def _handshake(self) -> KvHandshake:
        assert self._memory is not None
        return KvHandshake(
            worker_id=WorkerId(self._settings.worker_id),
            epoch=Epoch(self._settings.epoch),
            version=PROTOCOL_VERSION,
            fingerprint=self._settings.fingerprint_key(self._cache.hash_block_size),
            clock_s=0.0,
            hash_block_size=self._cache.hash_block_size,
            alignment=self._cache.cache_hit_alignment_tokens,
            beyond=self._beyond,
            groups=groups_of(self._cache),
            blocks=self._cache.num_blocks,
            ranks=[self._memory],
        )

    def handshake_rank(self) -> RankHandshake | None:
        """What a peer must know of this rank's memory; None until it is registered."""
        if self._memory is None:
            return None
        return RankHandshake(msgspec.msgpack.encode(self._memory), self._node, time.monotonic())

    def wake_on_results(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` on the transfer thread after each report."""
        assert self._thread is not None
        self._thread.wake_on_results(wake)

    def take_clock(self, ahead_s: Mapping[int, float]) -> None:
        """Before orders: how far the clock of each further host is ahead of the scheduler's, at least."""
        if self._node:
            self._clock_ahead_s = ahead_s[self._node]

    def submit(self, orders: Orders) -> None:
        """Queue the step's orders; returns at once."""
        if self._thread is not None:
            self._thread.submit(orders)

    def results(self, wait_s: float = 0.0) -> Results:
        """Results since the last call. If there are none, wait for at most ``wait_s``."""
        results = self._thread.take_results(wait_s) if self._thread is not None else Results()
        if self._node and (now := time.monotonic()) > self._clock_told_at + CLOCK_REPORT_S:
            self._clock_told_at = now
            results.clocks = {self._node: time.monotonic()}
        return results

    def _now(self) -> float:
        """The scheduler's clock, or later: see ``NodeClocks``. It may go back, when more is known of it."""
        return time.monotonic() - self._clock_ahead_s

    def close(self) -> None:
        """Disconnect from all peers; reads under way fail."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None


def _create_pages(kv_caches: dict[str, Any]) -> None:
    """Write to all CPU memory once. The kernel creates untouched pages one by one at the first write, which would be
    during a read.
    """
    for cache in kv_caches.values():
        if cache.device.type == "cpu":
            cache.zero_()
