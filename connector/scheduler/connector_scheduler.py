"""The scheduler role: answers other workers' asks, has this engine's requests fetch, orders the worker role about.

All on the engine's scheduler thread. Two ways in: the scheduler's own hooks, once a step, and ``exchange``, a utility
call by the worker service that also an idle engine answers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from connector.holder.holder import HolderSettings
from connector.layout.compatibility import PROTOCOL_VERSION
from connector.messages import EngineCall
from connector.orders import Orders, Results
from connector.reader.fetch_plan import FetchLimits
from connector.reader.pool_allocator import PoolBlockAllocator
from connector.scheduler.exchange_core import ExchangeCore
from connector.scheduler.idle_wait import READ_WAIT_S_MAX, IdleWait
from connector.scheduler.notification_socket import NotificationSocket
from connector.scheduler.rank_aggregation import RankAggregation
from connector.settings import Settings
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import KvOffer, KvTransferReport, LegOrder
from shared.contracts.kv_handshake import KvHandshake, KvRank

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

REPORT_WAIT_S = 0.003
"""How long an engine that computes nothing waits for another process's read before it looks at its requests."""

_call = msgspec.msgpack.Decoder(EngineCall)
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What of an engine its peers must know, beside its memory."""

    block_tokens: int
    kv_heads: int
    ranks: int


@dataclass
class StepOrders(KVConnectorMetadata):
    """Scheduler role to worker role, once per step."""

    orders: Orders = field(default_factory=Orders)
    wait_s: float = 0.0
    """How long the worker role waits at the end of the step for a result."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Worker role to scheduler role, after a step in which something became final; one ``Results`` per rank."""

    results: list[Results] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join the reports of all ranks."""
        assert isinstance(other, StepReport)
        return StepReport(self.results + other.results)


class ConnectorScheduler:
    """See the module."""

    def __init__(self, settings: Settings, shape: EngineShape) -> None:
        self._settings = settings
        self._shape = shape
        self._aggregation = RankAggregation(shape.ranks)
        self._socket = NotificationSocket(settings.notifications)
        self.idle_wait = IdleWait()
        holding = HolderSettings(
            worker_id=WorkerId(settings.worker_id),
            epoch=Epoch(settings.epoch),
            lease_s=settings.lease_s,
            lease_s_max=settings.lease_s_max,
            lease_share_max=settings.lease_share_max,
        )
        limits = FetchLimits(answer_s_max=settings.answer_s_max)
        self._core = ExchangeCore(holding, shape.block_tokens, limits, time.monotonic)
        self.holder = self._core.holder
        self.reader = self._core.reader

    def bind(self, pool: BlockPool) -> None:
        """The engine's blocks."""
        self._core.bind(pool, PoolBlockAllocator(pool, self._shape.block_tokens))

    def describe(self, ranks: list[KvRank], blocks: int) -> None:
        """Every rank has registered its memory, all of the same number of blocks."""
        self._core.handshake = KvHandshake(
            worker_id=WorkerId(self._settings.worker_id),
            epoch=Epoch(self._settings.epoch),
            version=PROTOCOL_VERSION,
            fingerprint=self._settings.fingerprint,
            clock_s=time.monotonic(),
            block_size=self._shape.block_tokens,
            blocks=blocks,
            kv_heads=self._shape.kv_heads,
            ranks=ranks,
        )

    def exchange(self, packed: bytes) -> bytes:
        """An ``EngineCall`` from the worker; answers ``EngineNotification``. An idle engine does it without a step."""
        self.idle_wait.note_change()
        call = _call.decode(packed)
        self._core.handle(call)
        self._core.grant()
        self._take_effects()
        return _encode(self._core.notifications(describe=call.describe))

    def used(self, hashes: Sequence[bytes], computed_tokens: int) -> None:
        """A request has ended that had the KV of so many tokens."""
        self._core.used(hashes, computed_tokens)

    def finished(self, request_id: str, offer: KvOffer | None, order: LegOrder) -> KvTransferReport | None:
        """A request has ended."""
        return self._core.finished(request_id, offer, order)

    def step_orders(self, scheduled_tokens: int) -> StepOrders:
        """For the step that begins; and the asks of this pass leave before it computes. A step that computes nothing
        may wait for a read to end where that does not ring: the sooner it is known, the sooner its request goes on.
        """
        self._take_effects()
        self.push_notifications()
        orders, self._core.orders = self._core.orders, Orders()
        waits = self._is_moving and not scheduled_tokens and not self.idle_wait.wakes_on_reads
        return StepOrders(orders, wait_s=REPORT_WAIT_S if waits else 0.0)

    def take_report(self, report: StepReport | None) -> tuple[set[str], set[int]]:
        """After a step, before the scheduler sees its output: requests whose blocks came, and blocks that did not."""
        if report is not None:
            self.idle_wait.note_change()
            for one in report.results:
                results = self._aggregation.add(one)
                self._core.on_connected(results.connected)
                for part in results.parts:
                    self._core.on_part(part)
        self._core.on_time()
        return self.reader.settle()

    def finish_step(self) -> None:
        """After the scheduler has taken in a step's output."""
        self._core.grant()
        self._take_effects()
        self.push_notifications()

    def wait_if_idle(self) -> None:
        """Before a step: rest, if all that can be done is to look again whether an answer came, or a read's end."""
        if self._core.orders:
            return
        if not self._is_moving:
            if not self.reader.idle:
                self.idle_wait.wait()
        elif self.idle_wait.wakes_on_reads:
            self.idle_wait.wait(READ_WAIT_S_MAX)

    @property
    def must_step(self) -> bool:
        """The engine must step though it has no request: something is to be ordered, or a byte moves for nobody's."""
        core = self._core
        return bool(core.orders or core.connecting) or not (core.prefetcher.idle and self.reader.has_only_wanted_reads)

    def push_notifications(self) -> None:
        """Tell the worker, if there is something to tell."""
        if self._core.has_notifications:
            self._take_effects()
            self._socket.push(self._core.notifications())

    def close(self) -> None:
        """The engine ends."""
        self.holder.release_all()
        self._socket.close()

    @property
    def _is_moving(self) -> bool:
        core = self._core
        return bool(core.connecting or self.reader.reads_under_way or not core.prefetcher.idle)

    def _take_effects(self) -> None:
        outbox, orders = self.reader.outbox, self._core.orders
        orders.reads += outbox.reads
        orders.cancel += outbox.cancel
        outbox.reads, outbox.cancel = [], []
