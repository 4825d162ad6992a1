"""Calls to the engine's end of the KV exchange: small calls that wait together become one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from connector.messages import EngineCall, EngineNotification, PeerGone
from services.worker.engines.port import EngineDead, EngineExchange
from shared.contracts.kv_exchange import LeaseKv


def merge_calls(calls: Sequence[EngineCall]) -> EngineCall:
    """One call with the effect of all calls in their order. An engine handles each kind together, so a lease that a
    later release ends is left out, and so is the end of a peer that came back.
    """
    if len(calls) == 1:
        return calls[0]
    leases: dict[tuple[str, str], LeaseKv] = {}
    ended: dict[tuple[str, int], PeerGone] = {}
    for call in calls:
        for peer in call.peers:
            ended.pop((peer.handshake.worker_id, peer.handshake.epoch), None)
        ended.update({(gone.worker_id, gone.epoch): gone for gone in call.gone})
        for release in call.releases:
            for ask_id in release.ask_ids:
                leases.pop((release.reader_id, ask_id), None)
        leases.update({(lease.reader_id, lease.ask_id): lease for lease in call.leases})
    return EngineCall(
        describe=any(call.describe for call in calls),
        peers=[peer for call in calls for peer in call.peers],
        gone=list(ended.values()),
        releases=[release for call in calls for release in call.releases],
        leases=list(leases.values()),
        grants=[grant for call in calls for grant in call.grants],
        fetches=[fetch for call in calls for fetch in call.fetches],
        measures=[measure for call in calls for measure in call.measures],
        digests=[digest for call in calls for digest in call.digests],
        chains_max=max(call.chains_max for call in calls),
        release_all=any(call.release_all for call in calls),
    )


log = logging.getLogger("baton.worker")

CALLS_AT_ONCE_MAX = 4
"""Calls that a busy engine has not answered yet; further calls wait and are merged."""
CALL_S_MAX = 60.0
"""Time limit for the engine to answer, longer than any step. What a call asked for has deadlines of its own."""
STUCK_S_MAX = 180.0
"""Time after which an engine that has answered no call is stuck, as it answers while it computes a step, too. One stood
still for minutes when it and another engine had just connected; probably a thread waited in UCX and held Python's
GIL."""
CALLS_WAITING_MAX = 16384


class EngineCalls:
    """Queues calls to the engine and dispatches its notifications."""

    def __init__(self, exchange: EngineExchange, on_notifications: Callable[[EngineNotification], None]) -> None:
        self._exchange = exchange
        self._on_notifications = on_notifications
        self._waiting: list[EngineCall] = []
        self._arrived = asyncio.Event()
        self._free = asyncio.Semaphore(CALLS_AT_ONCE_MAX)
        self._unanswered_since: float | None = None

    @property
    def full(self) -> bool:
        """Whether the engine has taken no call for a long time."""
        return len(self._waiting) >= CALLS_WAITING_MAX

    @property
    def unanswered_s(self) -> float:
        """For how long the engine has answered no call; 0 when it owes no answer."""
        since = self._unanswered_since
        return 0.0 if since is None else asyncio.get_running_loop().time() - since

    def add(self, more: EngineCall) -> None:
        """Queue a call. A full queue drops it: everything that is asked by a call has a deadline."""
        if self.full:
            log.warning("the engine takes no calls; one call was dropped")
            return
        self._waiting.append(more)
        self._arrived.set()

    async def ask(self, call: EngineCall) -> EngineNotification:
        """Call at once and return the result; also dispatches its notifications. Raises TimeoutError, EngineDead."""
        if self._unanswered_since is None:
            self._unanswered_since = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(CALL_S_MAX):
                notifications = await self._exchange.call(call)
        except (TimeoutError, asyncio.CancelledError):
            self.add(EngineCall())  # No other call may come: this one finds out when the engine answers again.
            raise
        self._unanswered_since = None
        self._on_notifications(notifications)
        return notifications

    async def follow(self) -> None:
        """Call the engine until cancelled. Raises a group of EngineDead when the engine is stuck."""
        async with asyncio.TaskGroup() as calls:
            while True:
                await self._arrived.wait()
                await self._free.acquire()
                self._arrived.clear()
                call, self._waiting = merge_calls(self._waiting), []
                calls.create_task(self._perform(call), name="engine-call")

    async def _perform(self, call: EngineCall) -> None:
        try:
            await self.ask(call)
        except TimeoutError:
            log.warning("the engine did not take a call within %g s", CALL_S_MAX)
            since = self._unanswered_since
            if since is not None and asyncio.get_running_loop().time() - since >= STUCK_S_MAX:
                raise EngineDead(f"it is stuck: it has answered no call for {STUCK_S_MAX:g} s") from None
        except EngineDead as dead:
            log.info("the engine is dead, the KV exchange stops: %s", dead)
        finally:
            self._free.release()
