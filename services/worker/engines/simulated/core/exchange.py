"""A simulated engine's side of the KV exchange, on the thread of its scheduler.

The real connector's scheduler side decides about leases and fetches. It works on the simulated cache instead of vLLM's
block pool, and reads pass a simulated link before bytes are copied.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from connector.holder.holder import HolderSettings
from connector.messages import EngineCall, EngineNotification, Orders, Read, ReadPart, Results
from connector.reader.fetch import FetchLimits
from connector.scheduler.exchange_core import ExchangeCore
from services.worker.engines.simulated.core.batch import Sequence
from services.worker.engines.simulated.core.block_cache import BlockCache, CacheBlockAllocator, LeasablePool
from services.worker.engines.simulated.core.groups import group_plan
from services.worker.engines.simulated.core.settings import SimulationSettings, TransferLink
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import FirstToken, KvHandshake, KvOffer, KvTransferReport, first_token_basis

POLL_S = 0.05
"""Interval at which deadlines are checked while a fetch runs or a prompt is followed."""


class Exchange:
    """``now`` returns the time on the engine's clock."""

    def __init__(self, settings: SimulationSettings, cache: BlockCache, now: Callable[[], float]) -> None:
        self._settings = settings
        self._now = now
        self._link = SimulatedLink(settings)
        holding = HolderSettings(
            worker_id=WorkerId(settings.worker_id),
            epoch=Epoch(settings.epoch),
            lease_s=settings.kv_lease_s,
            lease_s_max=settings.kv_lease_s,
            lease_share_max=settings.kv_lease_share_max,
        )
        size, pool = settings.block_size, LeasablePool(cache)
        self._core = ExchangeCore(holding, group_plan(settings.groups, size), FetchLimits(), now)
        self._core.bind(pool, CacheBlockAllocator(cache), partial(pool.find_boundary, block_size=size))
        self.holder = self._core.holder
        self.reader = self._core.reader

    def describe(self, handshake: KvHandshake) -> None:
        """Set the handshake that peers need to read the memory, which must be registered already."""
        self._core.describe(handshake)

    def call(self, call: EngineCall) -> EngineNotification:
        """Execute a call of the worker and return its immediate results."""
        self._core.handle(call)
        self.poll()
        return self._core.notifications(describe=call.describe)

    def poll(self) -> None:
        """Grant the leases that are ready and end what has expired. Call it after each step and at ``wakes_at``."""
        self._core.grant()
        self._core.on_time()
        self.send()
        self._core.orders.reads += self._link.arrivals(self._now())

    def wakes_at(self) -> float | None:
        """When ``poll`` must run next."""
        polls = not self.reader.idle or self._core.works_without_request or self.holder.has_followed
        expiry = self.holder.counts.next_expiry_s or None
        times = (self._link.next_arrival(), self._now() + POLL_S if polls else None, expiry)
        return min((at for at in times if at is not None), default=None)

    def finished(self, sequence: Sequence, *, offers: bool) -> None:
        """A sequence has finished or was aborted. It still holds its blocks."""
        first_token = self._first_token(sequence)
        if first_token is not None and sequence.params.order.leg_id:
            self.holder.note_first_token(sequence.params.order.leg_id, first_token)
        offer = self._offer(sequence, first_token) if offers else None
        self._core.used(sequence.hashes, sequence.computed)
        sequence.stats.transfer_report = self._core.finished(sequence.request_id, offer, sequence.params.order)
        self.send()

    def transfer_report(self, sequence: Sequence) -> KvTransferReport:
        """Where the sequence's KV came from, as known so far."""
        self.reader.admitted.discard(sequence.request_id)
        return self.reader.transfer_report(sequence.request_id)

    def scheduled(self, sequence: Sequence) -> None:
        """The computation of a prompt begins. Its cached tokens are noted for readers that follow the prompt."""
        leg_id, cached_tokens = sequence.params.order.leg_id, sequence.stats.cached_tokens
        self.holder.note_prompt(sequence.hashes, sequence.prompt_tokens, cached_tokens, leg_id)

    def take_orders(self) -> Orders:
        orders, self._core.orders = self._core.orders, Orders()
        return orders

    def results(self, results: Results) -> None:
        self._core.on_connected(results.connected)
        for part in results.parts:
            landed = self._link.landed(part, self._now())
            if landed is not None:
                self._core.on_part(landed)
        for digested in results.digested:
            self._core.on_digested(digested)
        self.send()

    @property
    def moving(self) -> bool:
        return bool(self._core.connecting) or self._link.copying or self._core.computes_digests

    def take_notifications(self) -> EngineNotification | None:
        return self._core.notifications() if self._core.has_notifications else None

    def _offer(self, sequence: Sequence, first_token: FirstToken | None) -> KvOffer | None:
        order = sequence.params.order
        blocks = [sequence.blocks]
        return self.holder.offer(sequence.hashes, sequence.prompt_tokens, blocks, order.offer_id, first_token)

    def basis_of(self, sequence: Sequence) -> bytes | None:
        """See ``FirstToken``; None for a prompt without a full block. What else has an effect on a token is the same in
        all legs of a request.
        """
        size, end = self._settings.block_size, sequence.prompt_tokens
        full = end // size
        return first_token_basis(sequence.hashes[full - 1], sequence.tokens[full * size : end]) if full else None

    def _first_token(self, sequence: Sequence) -> FirstToken | None:
        if not sequence.generated or (basis := self.basis_of(sequence)) is None:
            return None
        return FirstToken(token_id=sequence.tokens[sequence.prompt_tokens], basis=basis)

    def send(self) -> None:
        """Put new reads on the link, and take cancelled ones off it."""
        outbox = self.reader.outbox
        while outbox.reads or outbox.cancel:
            reads, outbox.reads = outbox.reads, []
            cancel, outbox.cancel = outbox.cancel, []
            now = self._now()
            for read in reads:
                self._link.begin(read, now)
            for read_id in cancel:
                if (end := self._link.cancel(read_id, now)) is not None:
                    self._core.on_part(end)
                else:
                    self._core.orders.cancel.append(read_id)


@dataclass(slots=True)
class _Transfer:
    read: Read
    began_s: float
    left: int
    """Blocks whose result is not final."""


class SimulatedLink:
    """Reads in progress. Times are on the engine's clock."""

    def __init__(self, settings: SimulationSettings) -> None:
        self._wire = TransferLink(settings)
        self._block_bytes = settings.block_size * settings.kv_bytes_per_token
        self._due: list[tuple[float, int]] = []
        self._waiting: dict[int, _Transfer] = {}
        """Reads whose simulated bytes have not arrived, by read id."""
        self._copying: dict[int, _Transfer] = {}

    def begin(self, read: Read, now: float) -> None:
        began, arrives = self._wire.book(len(read.local_blocks) * self._block_bytes, now)
        self._waiting[read.read_id] = _Transfer(read, began, len(read.local_blocks))
        heapq.heappush(self._due, (arrives, read.read_id))

    def next_arrival(self) -> float | None:
        """When the next read's bytes must be copied."""
        while self._due and self._due[0][1] not in self._waiting:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def arrivals(self, now: float) -> list[Read]:
        """Reads whose bytes have arrived: copy them now, then report to ``landed``."""
        arrived: list[Read] = []
        while (at := self.next_arrival()) is not None and at <= now:
            read_id = heapq.heappop(self._due)[1]
            self._copying[read_id] = self._waiting.pop(read_id)
            arrived.append(self._copying[read_id].read)
        return arrived

    def landed(self, part: ReadPart, now: float) -> ReadPart | None:
        """The part with simulated bytes and times; None for an unknown read."""
        transfer = self._copying.get(part.read_id)
        if transfer is None:
            return None
        transfer.left -= part.count
        if not transfer.left:
            del self._copying[part.read_id]
        size = 0 if part.failure else part.count * self._block_bytes
        return replace(part, bytes=size, started_s=transfer.began_s, ended_s=now)

    def cancel(self, read_id: int, now: float) -> ReadPart | None:
        """Cancel a read; returns its final part, or None if its bytes are being copied already."""
        transfer = self._waiting.pop(read_id, None)
        if transfer is None:
            return None
        return ReadPart(read_id, 0, transfer.left, 0, transfer.began_s, now, "cancelled")

    @property
    def copying(self) -> bool:
        return bool(self._copying)
