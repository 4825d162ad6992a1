"""The worker's KV exchange: handshakes, leases, grants and fetches, between the bus and one engine."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Generic, TypeVar

import msgspec

from connector.groups import GroupPlan
from connector.messages import (
    Chain,
    DigestLease,
    EngineCall,
    EngineNotification,
    LeaseDigested,
    MeasureRead,
    ReadMeasured,
)
from services.worker.engines.port import EngineDead, EngineExchange, Identity
from services.worker.kv_exchange.engine_calls import EngineCalls
from services.worker.kv_exchange.message_handler import FetchHandler, MessageHandler
from services.worker.kv_exchange.peers import PeerTable, PeerWatch
from services.worker.kv_exchange.trials import PASSED, Trials, Verdict, trial_command
from services.worker.legs.body import read_offer
from shared.bus.port import Bus, Envelope
from shared.contracts.channels import KV_FETCH, KV_HANDSHAKE
from shared.contracts.ids import Epoch, LegId, WorkerId
from shared.contracts.inference import LegKind, StartLeg
from shared.contracts.kv_exchange import AskKvHandshake, FetchedKv, FetchKv, KvExchangeState, KvHandshake, ReleaseKv
from shared.contracts.workers import Fingerprint, WorkerRecord
from shared.runtime.clock import Clock

log = logging.getLogger("baton.worker")
Result = TypeVar("Result")

EXPIRY_MARGIN_S = 0.01
"""Time after a lease's end, so that the engine finds it expired."""


class WorkerExchange:
    """Construct it on a running event loop."""

    def __init__(self, bus: Bus, clock: Clock, identity: Identity, engine: EngineExchange, own: Fingerprint) -> None:
        self.state = KvExchangeState()
        """State that the engine reported last."""
        self._copies = 0, 0
        """Blocks that stores have copied, and that were evicted before."""
        self._bus = bus
        self._clock = clock
        self._me = identity
        self._handshake: KvHandshake | None = None
        self._listeners: list[Callable[[], None]] = []
        self._calls = EngineCalls(engine, self._on_notifications)
        self._handler = MessageHandler(bus, identity, self._calls)
        self._fetches = FetchHandler(self._calls)
        self._measured = Awaited[ReadMeasured]()
        self._digested = Awaited[LeaseDigested]()
        table = PeerTable(identity.worker_id, own)
        self._backend = own.kv_backend if engine.nixl_package else ""
        self._trials = Trials(trial_command(engine.nixl_package, self._backend)) if self._backend else None
        self.peers = PeerWatch(bus, clock, identity.worker_id, table, self._handler.tell_engine, self._try_peer)
        engine.on_notifications(self._on_notifications)

    @property
    def unanswered_s(self) -> float:
        """For how long the engine has answered no call; 0 when it owes no answer."""
        return self._calls.unanswered_s

    async def open(self) -> None:
        """Every subscription is live when it returns. Raises EngineDead."""
        notifications = await self._calls.ask(EngineCall(describe=True))
        if notifications.handshake is None:
            raise EngineDead("the engine has no handshake for its KV memory")
        self._handshake = notifications.handshake
        await self._handler.open()
        await self.peers.open()
        await self._bus.answer(KV_HANDSHAKE, self._describe, worker_id=self._me.worker_id)
        await self._bus.answer(KV_FETCH, self._fetches.answer, worker_id=self._me.worker_id)

    async def follow(self) -> None:
        async with self._trials or nullcontext(), asyncio.TaskGroup() as tasks:
            tasks.create_task(self._calls.follow(), name="call-engine")
            tasks.create_task(self._handler.follow(), name="send-exchange")
            tasks.create_task(self.peers.follow(), name="follow-peers")
            tasks.create_task(self._watch_expiry(), name="watch-expiry")

    def on_changed(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    async def unpinned(self) -> None:
        """Wait until no block is leased."""
        changed = asyncio.Event()
        self.on_changed(changed.set)
        while self.state.pinned_blocks:
            changed.clear()
            await changed.wait()

    async def hot_chains(self, chains_max: int, *, uses_min: int = 1, idle_s_max: float = math.inf) -> list[Chain]:
        """The prefixes that recent requests used most, the hottest first; none if the engine does not answer."""
        call = EngineCall(chains_max=chains_max, chains_uses_min=uses_min, chains_idle_s_max=idle_s_max)
        try:
            return (await self._calls.ask(call)).chains
        except (TimeoutError, EngineDead) as error:
            log.info("the engine's hot prefixes are unknown: %s", error or "no response")
            return []

    async def chains_for_store(
        self, chains_max: int, *, uses_min: int, idle_s_max: float, blocks_min: int
    ) -> tuple[list[Chain], int]:
        """Chains to copy to a store, those that the engine evicts next before the hottest (see ``EngineCall``), and the
        blocks of others that it has evicted since the last call. Nothing if the engine does not answer.
        """
        call = EngineCall(
            chains_max=chains_max,
            chains_uses_min=uses_min,
            chains_idle_s_max=idle_s_max,
            chains_for_store=True,
            chains_blocks_min=blocks_min,
        )
        try:
            reply = await self._calls.ask(call)
        except (TimeoutError, EngineDead) as error:
            log.info("the engine's prefixes for a store are unknown: %s", error or "no response")
            return [], 0
        return reply.chains, reply.lost_blocks

    def note_copies(self, copied: int, lost: int) -> None:
        """Stores have copied so many blocks of this engine, and so many were evicted before they had."""
        if copied or lost:
            self._copies = self._copies[0] + copied, self._copies[1] + lost
            self._set_state(self.state)

    async def prefetch(self, fetch: FetchKv) -> FetchedKv:
        """Have this engine fetch blocks for a request that is to come. Raises AskRefused."""
        return await self._fetches.run(fetch, is_prefetch=True)

    @property
    def awaits_use(self) -> bool:
        """Whether there are prefetched blocks of which nothing has come yet."""
        return self.state.prefetched_unused_blocks > 0

    def wake(self) -> None:
        """Have the engine look what has changed; an idle one takes no step."""
        self._calls.add(EngineCall())

    @property
    def records(self) -> list[WorkerRecord]:
        """Records of the workers that exchange KV with this one."""
        return self.peers.records

    @property
    def groups(self) -> GroupPlan:
        """KV cache groups of the engine, after ``open``."""
        assert self._handshake is not None
        shake = self._handshake
        return GroupPlan(shake.groups, shake.hash_block_size, shake.alignment, beyond=shake.beyond)

    async def measure_read(self, worker_id: WorkerId, epoch: Epoch) -> ReadMeasured:
        """A result with ``failure`` if nothing could be measured. The caller bounds the wait."""
        measure_id = uuid.uuid4().hex
        order = MeasureRead(measure_id=measure_id, worker_id=worker_id, epoch=epoch)
        return await self._measured.result(measure_id, lambda: self._calls.add(EngineCall(measures=[order])))

    async def digest(self, lease_id: str) -> LeaseDigested:
        """Digests of the blocks of this worker's own lease, which ends. A result with ``failure`` if there are none.
        The caller bounds the wait.
        """
        digest_id = uuid.uuid4().hex
        order = DigestLease(digest_id=digest_id, lease_id=lease_id)
        return await self._digested.result(digest_id, lambda: self._calls.add(EngineCall(digests=[order])))

    def way_from(self, worker_id: WorkerId) -> str:
        """See ``KvReadSpeed.way``."""
        return f"{self._backend} {self.peers.transport_from(worker_id)}".strip()

    def refuse_fetches(self) -> None:
        """For a worker that drains."""
        self._fetches.is_closed = True

    async def release_all(self) -> None:
        """Grant nothing more and unpin every block: the engine is about to end."""
        self._handler.is_closed = True
        try:
            await self._calls.ask(EngineCall(release_all=True))
        except (TimeoutError, EngineDead) as error:
            log.info("the engine did not release its leases, they end with it: %s", error or "no response")

    def give_back(self, *, worker_id: WorkerId, epoch: Epoch, lease_id: str) -> None:
        """Release a lease whose blocks no worker will read; harmless when the holder does not know it."""
        me = self._me
        self._handler.give_back(
            ReleaseKv(worker_id=worker_id, epoch=epoch, reader_id=me.worker_id, lease_ids=[lease_id])
        )

    async def _describe(self, _ask: AskKvHandshake, _envelope: Envelope) -> KvHandshake:
        """Handler of KV_HANDSHAKE. The engine's clock is this machine's, so the engine need not be asked."""
        assert self._handshake is not None
        return msgspec.structs.replace(self._handshake, clock_s=self._clock.now())

    async def _try_peer(self, peer: KvHandshake) -> Verdict:
        if self._trials is None:
            return PASSED
        assert self._handshake is not None
        return await self._trials.verdict(peer, self._handshake)

    def _on_notifications(self, notifications: EngineNotification) -> None:
        self._handler.send(notifications)
        self._fetches.ended(notifications.fetched)
        self._measured.ended((one.measure_id, one) for one in notifications.measured)
        self._digested.ended((one.digest_id, one) for one in notifications.digested)
        if notifications.unknown_peers:
            self.peers.want(notifications.unknown_peers)
        self.peers.connected(notifications.connected)
        if notifications.state is not None and events(notifications.state) >= events(self.state):
            self._set_state(notifications.state)

    def _set_state(self, state: KvExchangeState) -> None:
        """``state`` is the engine's; of copies to stores it does not know."""
        copied, lost = self._copies
        self.state = msgspec.structs.replace(state, copied_blocks_total=copied, lost_blocks_total=lost)
        for listener in self._listeners:
            listener()

    async def _watch_expiry(self) -> None:
        """An idle engine does not check its leases: wake it when the next one ends."""
        changed = asyncio.Event()
        self.on_changed(changed.set)
        while True:
            changed.clear()
            ends_at = self.state.next_expiry_s
            wait_s = max(0.0, ends_at - self._clock.now()) + EXPIRY_MARGIN_S if ends_at else None
            try:
                async with asyncio.timeout(wait_s):
                    await changed.wait()
            except TimeoutError:
                self.wake()
                await changed.wait()


def events(state: KvExchangeState) -> int:
    """Grows with every change of the state. States arrive over two connections, and the older one may arrive last."""
    leases = state.leases_granted_total + state.leases_released_total + state.leases_expired_total
    prefetched = state.prefetched_blocks_total + state.prefetch_used_blocks_total + state.prefetch_wasted_blocks_total
    return leases + state.leases_refused_total + state.reads_total + state.reads_failed_total + prefetched


class Awaited(Generic[Result]):
    """Matches results that the engine notifies of with the calls that asked for them, by id."""

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Future[Result]] = {}

    async def result(self, ask_id: str, ask: Callable[[], None]) -> Result:
        """Ask, and wait for the result."""
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._under_way[ask_id] = done
        try:
            ask()
            return await done
        finally:
            del self._under_way[ask_id]

    def ended(self, results: Iterable[tuple[str, Result]]) -> None:
        for ask_id, result in results:
            done = self._under_way.get(ask_id)
            if done is not None and not done.done():
                done.set_result(result)


class UnreadOffers:
    """Releases the offers of legs that broke off."""

    def __init__(self, exchange: WorkerExchange, identity: Identity) -> None:
        self._exchange = exchange
        self._me = identity

    def broken_off(self, start: StartLeg) -> None:
        """Release the leg's own offer, made or about to be made, or the one that it was to read."""
        if start.kind is LegKind.PREFILL and start.kv_offer:
            self.unwanted(start.leg_id)
        elif start.kind is LegKind.DECODE and (offer := read_offer(start.kv_transfer)):
            self._exchange.give_back(worker_id=offer.worker_id, epoch=offer.epoch, lease_id=offer.lease_id)

    def unwanted(self, leg_id: LegId) -> None:
        """The router does not want the ended leg's offer; the offer has the leg's id."""
        self._exchange.give_back(worker_id=self._me.worker_id, epoch=self._me.epoch, lease_id=leg_id)
