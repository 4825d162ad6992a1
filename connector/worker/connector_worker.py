"""The connector's worker role, one per tensor-parallel rank: connects to peers and reads blocks, as it is told to.

It decides nothing about requests. What it reports is final: no byte of a reported part moves any more.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from connector import settings
from connector.layout.compatibility import PROTOCOL_VERSION
from connector.layout.engine_layout import kv_heads_of, layers_of, regions_of
from connector.layout.routes import ReaderRank
from connector.orders import Orders, Results
from connector.transfer.agent import Region, TransferAgent
from connector.worker.connections import PROBE_BYTES, Own
from connector.worker.copier import Copier
from connector.worker.transfer_thread import TransferThread
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_handshake import KvHandshake, KvRank

MakeAgent = Callable[[str], TransferAgent]
"""From a name that is unique for ever."""


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):
    """One rank's part of its engine's handshake, on its way to the scheduler role."""

    packed: bytes
    """A KvRank, msgpack."""

    def rank(self) -> KvRank:
        """What is in it."""
        return msgspec.msgpack.decode(self.packed, type=KvRank)


class ConnectorWorker:
    """See the module. ``register_kv_caches`` comes first."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, make_agent: MakeAgent) -> None:
        self._settings = settings.read(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._parallel = vllm_config.parallel_config
        self._kv_heads = kv_heads_of(vllm_config)
        self._cache = kv_cache_config
        self._make_agent = make_agent
        self._scratch = np.zeros(PROBE_BYTES, dtype=np.uint8)
        self._memory: KvRank | None = None
        self._transfers: TransferThread | None = None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Make the engine's blocks readable by peers, and start the thread that reads theirs."""
        rank = int(self._parallel.rank) % int(self._parallel.tensor_parallel_size)
        name = f"{self._settings.worker_id}-{self._settings.epoch}-{rank}-{uuid.uuid4().hex[:8]}"
        agent = self._make_agent(name)
        _touch(kv_caches)
        regions = regions_of(kv_caches)
        scratch = Region(self._scratch.ctypes.data, PROBE_BYTES, "cpu", 0)
        agent.register([*regions, scratch])
        self._memory = KvRank(
            rank=rank,
            agent=agent.metadata(),
            device=regions[0].device,
            device_id=regions[0].device_id,
            layers=layers_of(kv_caches, self._cache),
        )
        own = Own(
            ReaderRank(self._memory, self._parallel.tensor_parallel_size, self._kv_heads), self._own(), scratch.base
        )
        self._transfers = TransferThread(lambda: Copier(agent, own, time.monotonic), self._settings.copy_cores)

    def _own(self) -> KvHandshake:
        assert self._memory is not None
        return KvHandshake(
            worker_id=WorkerId(self._settings.worker_id),
            epoch=Epoch(self._settings.epoch),
            version=PROTOCOL_VERSION,
            fingerprint=self._settings.fingerprint,
            clock_s=0.0,
            block_size=self._cache.kv_cache_groups[0].kv_cache_spec.block_size,
            blocks=self._cache.num_blocks,
            kv_heads=self._kv_heads,
            ranks=[self._memory],
        )

    def handshake_rank(self) -> RankHandshake | None:
        """What a peer must know of this rank's memory; None before it is registered."""
        return RankHandshake(msgspec.msgpack.encode(self._memory)) if self._memory is not None else None

    def wake_on_results(self, ring: Callable[[], None]) -> None:
        """Called, on another thread, whenever there are results."""
        assert self._transfers is not None
        self._transfers.ring = ring

    def submit(self, orders: Orders) -> None:
        """Take the step's orders on; answers at once."""
        if self._transfers is not None:
            self._transfers.submit(orders)

    def results(self, wait_s: float = 0.0) -> Results:
        """What became final since the last call; if nothing did, wait for it so long."""
        return self._transfers.take_results(wait_s) if self._transfers is not None else Results()

    def close(self) -> None:
        """Disconnect; reads under way fail."""
        if self._transfers is not None:
            self._transfers.close()
            self._transfers = None


def _touch(kv_caches: dict[str, Any]) -> None:
    """Have all of an engine's memory made now: pages never written to are made one by one while a read waits."""
    for cache in kv_caches.values():
        if cache.device.type == "cpu":
            cache.zero_()
