"""Records this router's decisions, answers questions about them over the bus, and asks other routers about theirs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import inf
from typing import Final

import msgspec

from services.router.decisions.decision import LISTED_MAX, Decision, DecisionLog, placed_s
from services.router.decisions.decision_filter import DecisionFilter
from services.router.decisions.odds import Odds
from services.router.placement.placement import Placement, Rejection
from services.router.request.context import RequestContext
from services.router.request.timings import NOT_BROKEN, total_s
from shared.bus.port import Bus, BusError, Envelope, Subscription
from shared.contracts.channels import DECISION
from shared.contracts.decisions import AskDecision, DecisionRecord, FoundDecision
from shared.contracts.failures import Failure
from shared.contracts.ids import DecisionId, RequestId, RouterId, is_subject_token, router_of
from shared.contracts.inference import RequestFinished
from shared.runtime.clock import Clock
from shared.runtime.random_ids import RandomIds

log = logging.getLogger("baton.router")

DECISION_S_MAX: Final = 2.0
"""Seconds that another router may take to reply."""
ENDING_S_MAX: Final = 1.5
"""Seconds to wait for the end of a request whose client has its response: its legs' reports may take one."""
ROUTERS_ASKED_MAX: Final = 64
"""Routers asked at a time for one decision."""
SLICE: Final = 500
"""Decisions that are looked at in one turn of the event loop."""
OK: Final = "ok"
ID_BYTES: Final = 16


class DecisionService:
    """A decision contains nothing of the prompt but its length."""

    def __init__(
        self,
        router_id: RouterId,
        bus: Bus,
        clock: Clock,
        others: Callable[[], Iterable[RouterId]],
        catch_up: Callable[[], None],
        *,
        bytes_max: int,
    ) -> None:
        """``others`` returns the other routers that are alive. ``catch_up``: see ``DecisionLog``."""
        ids = RandomIds(ID_BYTES)
        self.log = DecisionLog(router_id, ids.next, catch_up, bytes_max=bytes_max)
        self.router_id = router_id
        self.others = others
        self._odds = Odds()
        self._bus = bus
        self._clock = clock
        self._subscription: Subscription | None = None

    async def open(self) -> None:
        """Questions are answered when it returns."""
        self._subscription = await self._bus.answer(DECISION, self._on_ask, router_id=self.router_id)

    async def close(self) -> None:
        if self._subscription is not None:
            await self._subscription.close()

    def made(self, context: RequestContext, result: Placement | Rejection) -> None:
        """The request is placed, or cannot be."""
        assert context.request is not None
        context.decision = self.log.add(
            context.http_request.head.request_id,
            context.request,
            result,
            at_unix_s=self._clock.wall_s(),
            attempt=context.attempts + 1,
            exact=context.prompt is not None and context.prompt.exact,
            why_inexact=context.prompt.why if context.prompt is not None else "",
            earlier=context.decision,
        )
        context.decision.prefetch = context.prefetch
        if context.entry is not None:
            context.decision.gap_worker, context.decision.gap_step_s = (
                context.entry.gap_worker,
                context.entry.gap_step_s,
            )
        if isinstance(result, Placement):
            self._predict(context, context.decision, result)

    def failed(self, context: RequestContext, failure: Failure) -> None:
        """The attempt that was placed last has failed."""
        if context.decision is not None:
            context.decision.end(str(failure.reason))

    def finished(self, context: RequestContext, finished: RequestFinished) -> None:
        if context.decision is not None:
            context.decision.note_hit_share(context.report)
            context.decision.drafts = (finished.drafted_tokens, finished.accepted_tokens)
            context.decision.end(
                finished.reason or OK,
                measured=finished.ttft_parts,
                ttft_s=finished.ttft_s,
                itl_s=finished.itl_s,
                prompt_tokens=finished.prompt_tokens,
                cached_tokens=finished.cached_tokens,
                recompute_slowed_s=finished.recompute_slowed_s,
            )
            self._learn(context.decision)

    def _predict(self, context: RequestContext, decision: Decision, placement: Placement) -> None:
        """Note the probability to meet each target. Of a stream that is resumed, the first token has been sent."""
        targets = decision.request.targets
        if targets.ttft_s == inf and targets.itl_s == inf:
            return
        odds, timings = self._odds.of(placement.decode.record.model), context.timings
        if targets.ttft_s < inf and timings.broke_at == NOT_BROKEN:
            left_s = targets.ttft_s - timings.admission_s - timings.tokenize_s - timings.place_s - timings.failed_s
            decision.ttft_probability = odds.ttft.probability(total_s(placement.predicted), left_s)
        if targets.itl_s < inf:
            decision.itl_probability = odds.itl.probability(placement.predicted_itl_s, targets.itl_s)

    def _learn(self, decision: Decision) -> None:
        """Learn from a request that was served. An earlier attempt may have sent a part of its answer."""
        placement = decision.result
        if decision.outcome != OK or decision.attempt > 1 or not isinstance(placement, Placement):
            return
        odds = self._odds.of(placement.decode.record.model)
        if decision.measured is not None:
            odds.ttft.learn(total_s(placement.predicted), placed_s(decision.measured))
        if decision.itl_s > 0.0:
            odds.itl.learn(placement.predicted_itl_s, decision.itl_s)

    async def find(self, decision_id: str, tenant: str | None = None) -> DecisionRecord | None:
        """From the router that made it. None: it does not know the decision any more, does not reply, or the decision
        is not ``tenant``'s; None: any tenant's.
        """
        found = await self._find_here(decision_id, tenant)
        router_id = router_of(decision_id)
        if found is not None or router_id in ("", self.router_id):
            return found
        ask = AskDecision(router_id=router_id, decision_id=DecisionId(decision_id), tenant=tenant)
        return owned(await self._ask(ask), tenant)

    async def newest(self, tenant: str | None = None) -> DecisionRecord | None:
        """The newest of all routers."""
        asks = [AskDecision(router_id=router_id, tenant=tenant) for router_id in self.others()]
        return newest_of([await self._last(DecisionFilter(tenant=tenant)), *await self._ask_all(asks)])

    async def of_request(self, request_id: str, tenant: str | None = None) -> DecisionRecord | None:
        """The last decision for that request, of any router."""
        mine = await self._last(DecisionFilter(tenant=tenant, request_id=request_id))
        if mine is not None or not is_subject_token(request_id):
            return mine
        named = RequestId(request_id)
        asks = [AskDecision(router_id=router_id, request_id=named, tenant=tenant) for router_id in self.others()]
        return newest_of(await self._ask_all(asks))

    async def listed(self, wanted: DecisionFilter, *, with_candidates: bool = False) -> list[DecisionRecord]:
        """Decisions of this router, newest first. A filter that matches few has to look at all: other requests run in
        between.
        """
        decisions, found, limit = self.log.newest_first(), list[DecisionRecord](), min(wanted.limit, LISTED_MAX)
        for begin in range(0, len(decisions), SLICE):
            rest = msgspec.structs.replace(wanted, limit=limit - len(found))
            found += self.log.listed(rest, decisions[begin : begin + SLICE], with_candidates=with_candidates)
            if len(found) >= limit:
                break
            await asyncio.sleep(0)
        return found

    async def _find_here(self, decision_id: str, tenant: str | None) -> DecisionRecord | None:
        """In the log, complete: a client may ask sooner than its request's last leg has reported."""
        decision = self.log.ending(decision_id, tenant)
        if decision is not None:
            ended = asyncio.Event()
            decision.on_end += (ended.set,)
            with suppress(TimeoutError):
                async with asyncio.timeout(ENDING_S_MAX):
                    await ended.wait()
        return self.log.find(decision_id, tenant)

    async def _last(self, wanted: DecisionFilter) -> DecisionRecord | None:
        found = await self.listed(msgspec.structs.replace(wanted, limit=1), with_candidates=True)
        return found[0] if found else None

    async def _ask_all(self, asks: list[AskDecision]) -> list[DecisionRecord | None]:
        found = await asyncio.gather(*(self._ask(ask) for ask in asks[:ROUTERS_ASKED_MAX]))
        return [owned(one, ask.tenant) for one, ask in zip(found, asks, strict=False)]

    async def _ask(self, ask: AskDecision) -> DecisionRecord | None:
        try:
            return (await self._bus.ask(DECISION, ask, timeout_s=DECISION_S_MAX)).decision
        except BusError as error:
            log.debug("router %s did not reply about its decisions: %s", ask.router_id, error)
            return None

    async def _on_ask(self, ask: AskDecision, _envelope: Envelope) -> FoundDecision:
        if ask.decision_id:
            return FoundDecision(decision=await self._find_here(ask.decision_id, ask.tenant))
        return FoundDecision(decision=await self._last(DecisionFilter(tenant=ask.tenant, request_id=ask.request_id)))


def owned(found: DecisionRecord | None, tenant: str | None) -> DecisionRecord | None:
    """The decision if ``tenant`` may read it (None: all): a router of an earlier version does not check."""
    return found if found is None or tenant in (None, found.tenant) else None


def newest_of(found: Iterable[DecisionRecord | None]) -> DecisionRecord | None:
    return max((one for one in found if one is not None), key=lambda one: one.at_unix_s, default=None)
