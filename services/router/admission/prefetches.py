"""Has workers read the KV of prompts before their requests' legs begin. Placement says whether that is of use: a worker
reads what it would fetch for the request, from the same sources.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from enum import StrEnum
from typing import Any, Final

import msgspec

from services.router.placement.placement import Placement
from services.router.placement.specification import EVICTED_MIN
from services.router.request.context import RequestContext
from services.router.state.cluster_view import ClusterView
from services.router.state.fleet_table import EVICTED_BLOCKS, RESTORED_BLOCKS
from services.router.state.worker_view import WorkerView
from shared.bus.port import AskRefused, AskTimedOut, Bus, BusError
from shared.contracts.channels import KV_PREFETCH
from shared.contracts.decisions import PrefetchRecord
from shared.contracts.inference import PREFETCH_S_MAX, PrefetchedKv, PrefetchKv
from shared.fair_slots import FairSlots, NoTurn
from shared.runtime.clock import Clock

log = logging.getLogger("baton.router")

AT_ONCE_MAX: Final = 32
WAITING_MAX: Final = 256
TENANT_WAITING_MAX: Final = 16
"""Prefetches that wait for their turn, of all tenants and of one."""
FETCH_S_MIN: Final = 5.0
FETCH_TIMES: Final = 4.0
"""A prefetch may take so many times its prediction, and so long at least."""
OVERTIME_S: Final = 3.0
"""Time for the answer to arrive after the deadline."""

NOTHING_TO_FETCH: Final = "no other worker has more of it, or computing the rest is predicted to be faster"
TOO_LATE: Final = "the request has begun, or its client has left"
TOO_MANY: Final = "too many prefetches wait already"


class Outcome(StrEnum):
    """How a prefetch ended."""

    DONE = "done"
    """All that was expected was read."""
    PARTLY = "partly"
    NOTHING = "nothing"
    """There was nothing to read."""
    REFUSED = "refused"
    """The worker had no time or memory for it, or drains."""
    FAILED = "failed"
    """No block was read, or the worker did not answer."""


Spawn = Callable[[RequestContext, Coroutine[Any, Any, None], str], asyncio.Task[None]]


class Prefetches:
    """``fetch`` is for clients that order it, ``begin`` for requests that wait."""

    def __init__(self, bus: Bus, clock: Clock, cluster: ClusterView, spawn: Spawn) -> None:
        """``spawn`` runs a task of a request."""
        self._bus = bus
        self._now = clock.now
        self._cluster = cluster
        self._spawn = spawn
        self._slots = FairSlots(AT_ONCE_MAX, waiting_max=WAITING_MAX, tenant_waiting_max=TENANT_WAITING_MAX)
        self.counts: dict[str, int] = dict.fromkeys(Outcome, 0)
        """How often each outcome occurred, for metrics."""

    def begin(self, context: RequestContext, placement: Placement | None) -> None:
        """A request that would go to these workers waits, and what it would fetch may come meanwhile. Once for each
        request: if it goes elsewhere, the blocks are there for others.
        """
        if placement is None or placement.fetched_tokens <= 0 or context.is_prefetched:
            return
        context.is_prefetched = True
        self._spawn(context, self.fetch(context, placement), "prefetch").add_done_callback(_report_bug)

    async def fetch(self, context: RequestContext, placement: Placement) -> None:
        """Have the worker that computes the prompt read what it would fetch for it, and note the result. Bounded in
        time.
        """
        record, outcome = await self._fetch(context, placement)
        self.counts[outcome] += 1
        context.prefetch = record
        if context.decision is not None:
            context.decision.prefetch = record

    async def _fetch(self, context: RequestContext, placement: Placement) -> tuple[PrefetchRecord, Outcome]:
        view = placement.prefill or placement.decode
        is_order = context.facts.options.prefetch
        nothing = PrefetchRecord(
            worker_id=view.record.worker_id, is_order=is_order, held_tokens=placement.cached_tokens
        )
        if placement.cached_tokens and placement.uncached_tokens < view.record.hashing.block_size:
            return nothing, Outcome.NOTHING  # It has all that can be handed over.
        if not placement.sources:
            return msgspec.structs.replace(nothing, failure=NOTHING_TO_FETCH), Outcome.NOTHING
        begun_at = self._now()
        try:
            async with self._slots.slot(context.http_request.head.tenant_of_key()):
                if context.http_request.left or context.placement is not None:
                    return msgspec.structs.replace(nothing, failure=TOO_LATE), Outcome.NOTHING
                done = await self._ask(context, placement)
        except NoTurn:
            return msgspec.structs.replace(nothing, failure=TOO_MANY), Outcome.REFUSED
        except AskRefused as refused:
            return msgspec.structs.replace(nothing, failure=refused.failure.message), Outcome.REFUSED
        except (AskTimedOut, BusError) as error:
            log.info("%s did not prefetch: %s", view.record.worker_id, error or type(error).__name__)
            why = f"the worker did not answer ({type(error).__name__})"
            return msgspec.structs.replace(nothing, failure=why), Outcome.FAILED
        prompt_tokens = context.prompt.tokens if context.prompt is not None else 0
        record = PrefetchRecord(
            worker_id=view.record.worker_id,
            is_order=is_order,
            held_tokens=max(0, min(done.held_tokens, prompt_tokens)),
            fetched_tokens=max(0, min(done.fetched_tokens, prompt_tokens)),
            seconds=self._now() - begun_at,
            failure=done.failure,
        )
        if not done.failure:
            return record, Outcome.DONE
        return record, Outcome.PARTLY if record.fetched_tokens else Outcome.FAILED

    async def _ask(self, context: RequestContext, placement: Placement) -> PrefetchedKv:
        """Raises AskRefused, and other BusErrors."""
        view, facts = placement.prefill or placement.decode, context.facts
        worker_id, epoch = view.record.worker_id, view.record.epoch
        deadline_s = min(PREFETCH_S_MAX, max(FETCH_S_MIN, FETCH_TIMES * placement.predicted.fetch_s))
        order = PrefetchKv(
            worker_id=worker_id,
            epoch=epoch,
            path=context.http_request.head.path,
            body=context.http_request.upload.body(),
            cache_salt=facts.salt,
            media_salt=facts.media_salt,
            sources=list(placement.sources),
            tokens=placement.fetched_tokens,
            eviction_cost=self._eviction_cost(view),
            deadline_s=deadline_s,
        )
        return await self._bus.ask(KV_PREFETCH, order, timeout_s=deadline_s + OVERTIME_S)

    def _eviction_cost(self, view: WorkerView) -> float:
        """See ``PrefetchKv``; ``specification.eviction_price`` has it from the same counts (DECISIONS 69)."""
        numbers = self._cluster.table.of(view.row)
        return min(1.0, numbers[RESTORED_BLOCKS] / max(numbers[EVICTED_BLOCKS], EVICTED_MIN))


def _report_bug(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (bug := task.exception()) is not None:
        log.error("a prefetch failed with an internal error", exc_info=bug)
