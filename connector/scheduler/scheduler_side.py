"""The scheduler role: answers other workers' asks, has this engine's requests fetch, orders the worker role about.

All on the engine's scheduler thread. Two ways in: the scheduler's own hooks, once a step, and ``exchange``, a utility
call by the worker service that also an idle engine answers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from connector.holder.holder import HolderSettings
from connector.layout.compatibility import PROTOCOL_VERSION
from connector.reader.fetch_plan import Limits
from connector.reader.pool_shelf import PoolShelf
from connector.scheduler.calls import EngineCall
from connector.scheduler.engine_exchange import EngineExchange
from connector.scheduler.idle_wait import READ_REST_S_MAX, IdleWait
from connector.scheduler.metadata import StepOrders, StepReport
from connector.scheduler.notifications import NotificationSocket
from connector.scheduler.orders import Orders
from connector.scheduler.rank_aggregation import RankAggregation
from connector.settings import Settings
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import KvOffer, KvTransferReport, LegOrder
from shared.contracts.kv_handshake import KvHandshake, KvRank

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

READ_WAIT_S = 0.003
"""How long an engine that computes nothing waits for another process's read before it looks at its requests."""

_call = msgspec.msgpack.Decoder(EngineCall)
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What of an engine its peers must know, beside its memory."""

    block_tokens: int
    kv_heads: int
    ranks: int


class SchedulerSide:
    """See the module."""

    def __init__(self, settings: Settings, shape: EngineShape) -> None:
        self._settings = settings
        self._shape = shape
        self._votes = RankAggregation(shape.ranks)
        self._port = NotificationSocket(settings.notifications)
        self.rest = IdleWait()
        holding = HolderSettings(
            worker_id=WorkerId(settings.worker_id),
            epoch=Epoch(settings.epoch),
            lease_s=settings.lease_s,
            lease_s_max=settings.lease_s_max,
            lease_share_max=settings.lease_share_max,
        )
        limits = Limits(answer_s_max=settings.answer_s_max)
        self._parts = EngineExchange(holding, shape.block_tokens, limits, time.monotonic)
        self.holder = self._parts.holder
        self.reader = self._parts.reader

    def bind(self, pool: BlockPool) -> None:
        """The engine's blocks."""
        self._parts.bind(pool, PoolShelf(pool, self._shape.block_tokens))

    def describe(self, ranks: list[KvRank], blocks: int) -> None:
        """Every rank has registered its memory, all of the same number of blocks."""
        self._parts.handshake = KvHandshake(
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
        self.rest.stir()
        call = _call.decode(packed)
        self._parts.obey(call)
        self._parts.grant()
        self._take_effects()
        return _encode(self._parts.notifications(describe=call.describe))

    def used(self, hashes: Sequence[bytes], computed_tokens: int) -> None:
        """A request has ended that had the KV of so many tokens."""
        self._parts.used(hashes, computed_tokens)

    def finished(self, request_id: str, offer: KvOffer | None, order: LegOrder) -> KvTransferReport | None:
        """A request has ended."""
        return self._parts.finished(request_id, offer, order)

    def orders(self, scheduled_tokens: int) -> StepOrders:
        """For the step that begins; and the asks of this pass leave before it computes. A step that computes nothing
        may wait for a read to end where that does not ring: the sooner it is known, the sooner its request goes on.
        """
        self._take_effects()
        self.tell()
        orders, self._parts.orders = self._parts.orders, Orders()
        waits = self._is_moving and not scheduled_tokens and not self.rest.hears_reads
        return StepOrders(orders, wait_s=READ_WAIT_S if waits else 0.0)

    def digest(self, report: StepReport | None) -> tuple[set[str], set[int]]:
        """After a step, before the scheduler sees its output: requests whose blocks came, and blocks that did not."""
        if report is not None:
            self.rest.stir()
            for one in report.results:
                results = self._votes.count(one)
                self._parts.on_connected(results.connected)
                for part in results.parts:
                    self._parts.on_part(part)
        self._parts.on_time()
        return self.reader.settle()

    def stepped(self) -> None:
        """After the scheduler has taken in a step's output."""
        self._parts.grant()
        self._take_effects()
        self.tell()

    def pause(self) -> None:
        """Before a step: rest, if all that can be done is to look again whether an answer came, or a read's end."""
        if self._parts.orders:
            return
        if not self._is_moving:
            if not self.reader.idle:
                self.rest.take()
        elif self.rest.hears_reads:
            self.rest.take(READ_REST_S_MAX)

    @property
    def pressing(self) -> bool:
        """The engine must step though it has no request: something is to be ordered, or a byte moves for nobody's."""
        parts = self._parts
        return bool(parts.orders or parts.connecting) or not (parts.prefetcher.idle and self.reader.nothing_lingers)

    def tell(self) -> None:
        """Tell the worker, if there is something to tell."""
        if self._parts.has_notifications:
            self._take_effects()
            self._port.push(self._parts.notifications())

    def close(self) -> None:
        """The engine ends."""
        self.holder.release_all()
        self._port.close()

    @property
    def _is_moving(self) -> bool:
        parts = self._parts
        return bool(parts.connecting or self.reader.reads_under_way or not parts.prefetcher.idle)

    def _take_effects(self) -> None:
        effects, orders = self.reader.effects, self._parts.orders
        orders.reads += effects.reads
        orders.cancel += effects.cancel
        effects.reads, effects.cancel = [], []
