"""Prefetches that routers order: the prompt is rendered as the engine would get it, and its KV read from the sources.

Requests come first: prefetches get a share of the link's time (``LinkShare``), and their unused blocks a share of the
engine's (``connector.reader.prefetch``).
"""

from __future__ import annotations

import asyncio
import logging
import math

from services.worker.engines.port import Identity
from services.worker.kv_exchange.link_share import LinkShare, UsedShare
from services.worker.kv_exchange.worker_exchange import WorkerExchange
from services.worker.prompt_handlers import RenderHandler
from shared.bus.port import AskRefused, Bus, Envelope
from shared.contracts.channels import KV_PREFETCH
from shared.contracts.failures import Failure, Reason
from shared.contracts.inference import PREFETCH_S_MAX, PrefetchedKv, PrefetchKv
from shared.contracts.kv_exchange import (
    LEASE_BLOCKS_MAX,
    PROMPT_TOKENS_MAX,
    FetchedKv,
    FetchKv,
    NoGrant,
    pack_full_hashes,
)
from shared.runtime.clock import Clock

AT_ONCE_MAX = 4
"""Prefetches at a time."""
SOURCES_MAX = 64
NO_MORE = "no source has more of it"
NOTICE_S = 5.0
"""How often the engine looks what came of prefetched blocks."""
RETRY_S_MAX = 60.0

log = logging.getLogger("baton.worker")


class PrefetchHandler:
    """``open`` does nothing for an engine that renders no prompts."""

    def __init__(
        self, bus: Bus, clock: Clock, identity: Identity, renderer: RenderHandler, exchange: WorkerExchange
    ) -> None:
        self._bus = bus
        self._now = clock.now
        self._me = identity
        self._renderer = renderer
        self._exchange = exchange
        self._link = LinkShare(clock.now())
        self._uses = UsedShare(clock.now())
        self._count = 0

    async def open(self) -> None:
        if self._renderer.renders:
            await self._bus.answer(KV_PREFETCH, self.prefetch, worker_id=self._me.worker_id)

    async def follow(self) -> None:
        """Have the engine look what came of prefetched blocks, while there are any, until cancelled."""
        while True:
            await asyncio.sleep(NOTICE_S)
            if self._exchange.awaits_use:
                self._exchange.wake()

    async def prefetch(self, order: PrefetchKv, _envelope: Envelope) -> PrefetchedKv:
        """Handler of KV_PREFETCH. Raises AskRefused."""
        state = self._exchange.state
        self._link.observe(state.read_seconds_total - state.prefetch_seconds_total, self._now())
        self._uses.observe(state.prefetch_used_blocks_total, state.prefetch_wasted_blocks_total, self._now())
        if refusal := self._refusal(order):
            raise AskRefused(refusal)
        self._count += 1
        aside_s, done = self._link.begin(order.tokens), PrefetchedKv(worker_id=order.worker_id, epoch=order.epoch)
        try:
            done = await self._prefetched(order)
            return done
        finally:
            self._count -= 1
            self._link.end(aside_s, done.fetched_tokens, done.seconds)

    async def _prefetched(self, order: PrefetchKv) -> PrefetchedKv:
        prompt = await self._renderer.prompt_of(order)
        if prompt.refusal or not prompt.hashes:
            why = prompt.refusal or "the prompt has no whole block"
            return PrefetchedKv(worker_id=self._me.worker_id, epoch=self._me.epoch, failure=why)
        fetch = FetchKv(
            worker_id=self._me.worker_id,
            sender_id=self._me.worker_id,
            hashes=pack_full_hashes(prompt.hashes[:LEASE_BLOCKS_MAX]),
            sources=order.sources,
            deadline_s=order.deadline_s,
        )
        fetched: FetchedKv = await self._exchange.prefetch(fetch)
        unit = self._exchange.groups.unit
        if fetched.fetched:
            log.info("%d tokens of a prompt were prefetched in %.3f s", fetched.fetched * unit, fetched.seconds)
        return PrefetchedKv(
            worker_id=self._me.worker_id,
            epoch=self._me.epoch,
            prompt_tokens=prompt.tokens,
            held_tokens=fetched.held * unit,
            fetched_tokens=fetched.fetched * unit,
            bytes=fetched.bytes,
            seconds=fetched.seconds,
            failure=failure_of(fetched, expected=fetched.fetched * unit >= order.tokens > 0),
        )

    def _refusal(self, order: PrefetchKv) -> Failure | None:
        if order.epoch != self._me.epoch:
            message = f"the prefetch is for epoch {order.epoch} of {self._me.worker_id}; this is epoch {self._me.epoch}"
            return Failure(reason=Reason.WORKER_LOST, message=message)
        is_sound = 0.0 < order.deadline_s <= PREFETCH_S_MAX and 0 <= order.tokens <= PROMPT_TOKENS_MAX
        is_sound = is_sound and 0.0 <= order.eviction_cost <= 1.0
        if not is_sound or not 0 < len(order.sources) <= SOURCES_MAX:
            return Failure(
                reason=Reason.BAD_MESSAGE, message="the order's deadline, tokens or sources are out of bounds"
            )
        if self._count >= AT_ONCE_MAX:
            return Failure(reason=Reason.WORKER_BUSY, message=f"{self._count} prefetches are under way already")
        if order.eviction_cost > (use := self._uses.share):
            message = (
                f"requests find {use:.0%} of what is prefetched here, but need {order.eviction_cost:.0%} of what it "
                "would evict again"
            )
            return Failure(reason=Reason.WORKER_BUSY, message=message, retry_after_s=RETRY_S_MAX)
        if wait_s := self._link.wait_s():
            return Failure(
                reason=Reason.WORKER_BUSY,
                message=f"prefetches have used their share of the link ({self._link.share:.0%} of its time now)",
                retry_after_s=min(RETRY_S_MAX, math.ceil(wait_s) if wait_s < math.inf else RETRY_S_MAX),
            )
        return None


def failure_of(fetched: FetchedKv, *, expected: bool) -> str:
    """Why no more was read; empty if as much was as the router expected. The end of a next turn is new to all."""
    if expected:
        return ""
    return NO_MORE if fetched.failure == NoGrant.NOT_HELD else fetched.failure
