"""Messages between the bus and the engine: LeaseKv, KvGrant and ReleaseKv, and fetches by command (prefetch, replicate,
evacuate).
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections import deque
from typing import Any

import msgspec

from connector.messages import EngineCall, EngineNotification, FetchEnded, StartFetch
from services.worker.engines.port import Identity
from services.worker.kv_exchange.engine_calls import EngineCalls
from shared.bus.port import AskRefused, Bus, BusDown, Envelope, MessageTooLarge
from shared.contracts.channels import KV_GRANT, KV_LEASE, KV_RELEASE, Channel
from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import Epoch, WorkerId, is_subject_token
from shared.contracts.kv_exchange import (
    CHAIN_BLOCKS_MAX,
    FULL_HASH_BYTES,
    LEASE_BLOCKS_MAX,
    PROMPT_TOKENS_MAX,
    FetchedKv,
    FetchKv,
    KvGrant,
    LeaseKv,
    NoGrant,
    ReleaseKv,
    is_sound_grant,
)

ASKS_MAX = 8192
"""Requests for blocks open at a time; beyond that the oldest ends as unreachable."""


class OpenAsks:
    """Every LeaseKv that was sent, until its last grant, its release, or the report that it was not delivered."""

    def __init__(self) -> None:
        self._open: dict[str, LeaseKv] = {}

    def asked(self, lease: LeaseKv) -> list[KvGrant]:
        """It is sent. Returns grants for the engine that end older asks, if there are too many."""
        self._open[lease.ask_id] = msgspec.structs.replace(lease, hashes=b"")
        if len(self._open) <= ASKS_MAX:
            return []
        return [no_grant(self._open.pop(next(iter(self._open))), NoGrant.UNREACHABLE)]

    def released(self, release: ReleaseKv) -> None:
        for ask_id in release.ask_ids:
            self._open.pop(ask_id, None)

    def answered(self, grant: KvGrant) -> KvGrant | ReleaseKv | None:
        """A grant arrived. Returns the grant for the engine, a release for the holder if the engine did not ask for it,
        or None. A grant of another epoch or a malformed one becomes a grant of nothing.
        """
        ask = self._open.get(grant.ask_id)
        if ask is None or ask.worker_id != grant.worker_id:
            return unclaimed(grant) if grant.lease_id and is_subject_token(grant.worker_id) else None
        if grant.epoch != ask.epoch or grant.reason is NoGrant.EPOCH:
            del self._open[grant.ask_id]
            return no_grant(ask, NoGrant.EPOCH)
        if not is_sound_grant(grant):
            del self._open[grant.ask_id]
            return no_grant(ask, NoGrant.UNREACHABLE)
        if grant.final:
            del self._open[grant.ask_id]
        return grant

    def answered_directly(self, ask_ids: list[str]) -> None:
        """The engine has received the last grants of these from the holder's engine."""
        for ask_id in ask_ids:
            self._open.pop(ask_id, None)

    def unreachable(self, ask_id: str) -> KvGrant | None:
        """The ask was not delivered."""
        ask = self._open.pop(ask_id, None)
        return None if ask is None else no_grant(ask, NoGrant.UNREACHABLE)

    def all_unreachable(self) -> list[KvGrant]:
        """Grants may have been lost: all open asks end."""
        grants = [no_grant(ask, NoGrant.UNREACHABLE) for ask in self._open.values()]
        self._open.clear()
        return grants

    def gone(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """That epoch of a holder has ended. The engine learns of it by ``PeerGone``."""
        self._open = {
            ask_id: ask for ask_id, ask in self._open.items() if (ask.worker_id, ask.epoch) != (worker_id, epoch)
        }


def no_grant(ask: LeaseKv, reason: NoGrant) -> KvGrant:
    """The last grant of an ask, without blocks."""
    return KvGrant(reader_id=ask.reader_id, worker_id=ask.worker_id, epoch=ask.epoch, ask_id=ask.ask_id, reason=reason)


def unclaimed(grant: KvGrant) -> ReleaseKv:
    """Releases a grant that its reader does not wait for, or will never receive."""
    return ReleaseKv(worker_id=grant.worker_id, epoch=grant.epoch, reader_id=grant.reader_id, ask_ids=[grant.ask_id])


def is_sound_lease(lease: LeaseKv) -> bool:
    """Whether it can be read, and its reader can be addressed."""
    hashes, rest = divmod(len(lease.hashes), FULL_HASH_BYTES)
    return (
        rest == 0
        and 0 <= lease.first <= CHAIN_BLOCKS_MAX
        and 0 <= lease.have <= PROMPT_TOKENS_MAX
        and 0 < hashes <= LEASE_BLOCKS_MAX
        and is_subject_token(lease.reader_id)
        and is_subject_token(lease.ask_id)
        and (not lease.leg_id or is_subject_token(lease.leg_id))
        and _is_duration(lease.hold_s)
        and _is_duration(lease.follow_s)
    )


def _is_duration(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0.0


log = logging.getLogger("baton.worker")

MESSAGES_WAITING_MAX = 65536
"""Messages waiting for the bus. Beyond that the oldest is dropped; the deadline of what it asked for ends it."""
RELEASES_KEPT_MAX = 1024
"""Releases kept until NATS is reachable again. The blocks stay pinned until then, or until their leases end."""

NO_ENVELOPE = Envelope(headers={}, size=0)
"""Envelope of messages that did not come over the bus."""

Message = LeaseKv | KvGrant | ReleaseKv
CHANNELS: dict[type[Message], Channel[Any]] = {LeaseKv: KV_LEASE, KvGrant: KV_GRANT, ReleaseKv: KV_RELEASE}
FETCHES_AT_ONCE_MAX = 32
FETCH_S_MAX = 300.0
OVERTIME_S = 2.0
"""Time after a fetch's deadline for the engine's notification to arrive."""


class MessageHandler:
    """Never waits for the engine."""

    def __init__(self, bus: Bus, identity: Identity, calls: EngineCalls) -> None:
        self.is_closed = False
        """Whether every request for blocks is refused."""
        self._bus = bus
        self._me = identity
        self._calls = calls
        self._asks = OpenAsks()
        self._out: deque[Message] = deque(maxlen=MESSAGES_WAITING_MAX)
        self._is_sending = False
        self._has_out = asyncio.Event()
        self._unsent: deque[ReleaseKv] = deque(maxlen=RELEASES_KEPT_MAX)

    async def open(self) -> None:
        """Subscribe; live when it returns."""
        me = self._me.worker_id
        self._bus.on_unreachable(self._on_unreachable)
        self._bus.on_disconnect(self._on_disconnect)
        self._bus.on_reconnect(self._on_reconnect)
        await self._bus.subscribe(KV_LEASE, self._on_lease, worker_id=me)
        await self._bus.subscribe(KV_RELEASE, self._on_release, worker_id=me)
        await self._bus.subscribe(KV_GRANT, self._on_grant, reader_id=me)

    def send(self, notifications: EngineNotification) -> None:
        """Send the engine's messages to other workers. Releases go last, after the leases that they end."""
        for lease in notifications.leases:
            self._to_engine(self._asks.asked(lease))
        for release in notifications.releases:
            self._asks.released(release)
        self._asks.answered_directly(notifications.answered)
        messages: list[Message] = [*notifications.leases, *notifications.grants, *notifications.releases]
        for message in messages:
            self._send(message)

    def give_back(self, release: ReleaseKv) -> None:
        """Release a lease of this engine or of another worker's."""
        if release.worker_id == self._me.worker_id:
            self._on_release(release, NO_ENVELOPE)
        else:
            self._send(release)

    def tell_engine(self, call: EngineCall) -> None:
        """Pass changes of peers on; open asks to peers that are gone end."""
        for gone in call.gone:
            self._asks.gone(gone.worker_id, gone.epoch)
        self._calls.add(call)

    async def follow(self) -> None:
        while True:
            await self._has_out.wait()
            self._has_out.clear()
            while self._out:
                message = self._out.popleft()
                self._is_sending = True
                try:
                    await self._bus.publish(CHANNELS[type(message)], message, key=_key(message))
                except (BusDown, MessageTooLarge) as error:
                    self._not_sent(message, error)
                finally:
                    self._is_sending = False

    def _send(self, message: Message) -> None:
        """At once where the bus takes it. Where it has to wait, or others wait before it, ``follow`` sends it."""
        if self._out or self._is_sending or not self._sent_now(message):
            self._out.append(message)
            self._has_out.set()

    def _sent_now(self, message: Message) -> bool:
        """False: it has to wait for the bus."""
        try:
            return self._bus.publish_now(CHANNELS[type(message)], message, key=_key(message))
        except (BusDown, MessageTooLarge) as error:
            self._not_sent(message, error)
            return True

    def _not_sent(self, message: Message, error: Exception) -> None:
        log.debug("%s was not sent: %s", type(message).__name__, error)
        if isinstance(message, LeaseKv):
            self._on_unreachable(message.ask_id)
        elif isinstance(message, KvGrant) and message.lease_id:
            self._calls.add(EngineCall(releases=[unclaimed(message)]))
        elif isinstance(message, ReleaseKv):
            self._unsent.append(message)

    def _on_lease(self, lease: LeaseKv, _envelope: Envelope) -> None:
        if not is_sound_lease(lease):
            log.warning("a malformed lease request of %s is ignored", lease.reader_id[:64])
        elif reason := self._refusal(lease):
            self._send(no_grant(lease, reason))
        else:
            self._calls.add(EngineCall(leases=[lease]))

    def _refusal(self, lease: LeaseKv) -> NoGrant | None:
        """Why an ask is refused without the engine."""
        if lease.epoch != self._me.epoch:
            return NoGrant.EPOCH
        if self.is_closed:
            return NoGrant.DRAINING
        return NoGrant.FULL if self._calls.full else None

    def _on_release(self, release: ReleaseKv, _envelope: Envelope) -> None:
        if release.epoch == self._me.epoch:
            self._calls.add(EngineCall(releases=[release]))

    def _on_grant(self, grant: KvGrant, _envelope: Envelope) -> None:
        match self._asks.answered(grant):
            case KvGrant() as checked:
                self._calls.add(EngineCall(grants=[checked]))
            case ReleaseKv() as unwanted:
                self._send(unwanted)
            case None:
                log.warning("an unrequested grant of %s is ignored", grant.worker_id[:64])

    def _on_unreachable(self, ask_id: str) -> None:
        if refusal := self._asks.unreachable(ask_id):
            self._to_engine([refusal])

    def _on_disconnect(self) -> None:
        """Grants may be lost with the connection: computing now is better than waiting for them."""
        self._to_engine(self._asks.all_unreachable())

    def _on_reconnect(self) -> None:
        self._out += self._unsent
        self._unsent.clear()
        self._has_out.set()

    def _to_engine(self, grants: list[KvGrant]) -> None:
        if grants:
            self._calls.add(EngineCall(grants=grants))


def _key(message: Message) -> str:
    """The key by which the bus tells that a lease request reaches nobody."""
    return message.ask_id if isinstance(message, LeaseKv) else ""


class FetchHandler:
    def __init__(self, calls: EngineCalls) -> None:
        self.is_closed = False
        """Whether the worker drains, so that fetched blocks would be lost."""
        self._calls = calls
        self._under_way: dict[str, asyncio.Future[FetchedKv]] = {}

    async def answer(self, fetch: FetchKv, _envelope: Envelope) -> FetchedKv:
        """Handler of KV_FETCH. Raises AskRefused."""
        return await self.run(fetch)

    async def run(self, fetch: FetchKv, *, is_prefetch: bool = False) -> FetchedKv:
        """Have the engine fetch. ``is_prefetch``: see ``StartFetch``. Raises AskRefused."""
        if refusal := self._refusal(fetch):
            raise AskRefused(refusal)
        fetch_id = uuid.uuid4().hex
        done: asyncio.Future[FetchedKv] = asyncio.get_running_loop().create_future()
        self._under_way[fetch_id] = done
        self._calls.add(EngineCall(fetches=[StartFetch(fetch_id=fetch_id, fetch=fetch, is_prefetch=is_prefetch)]))
        try:
            async with asyncio.timeout(fetch.deadline_s + OVERTIME_S):
                return await done
        except TimeoutError:
            return FetchedKv(failure=f"the engine had not finished after {fetch.deadline_s:g} s")
        finally:
            del self._under_way[fetch_id]

    def ended(self, ends: list[FetchEnded]) -> None:
        for end in ends:
            done = self._under_way.get(end.fetch_id)
            if done is not None and not done.done():
                done.set_result(end.result)

    def _refusal(self, fetch: FetchKv) -> Failure | None:
        if self.is_closed:
            return Failure(reason=Reason.WORKER_DRAINING, message="this worker drains")
        if len(self._under_way) >= FETCHES_AT_ONCE_MAX or self._calls.full:
            return Failure(reason=Reason.WORKER_BUSY, message=f"{len(self._under_way)} fetches are under way already")
        blocks, rest = divmod(len(fetch.hashes), FULL_HASH_BYTES)
        if rest or not 0 < blocks <= LEASE_BLOCKS_MAX:
            message = f"{len(fetch.hashes)} bytes are not 1 to {LEASE_BLOCKS_MAX} hashes of {FULL_HASH_BYTES} bytes"
            return Failure(reason=Reason.BAD_MESSAGE, message=message)
        if not 0.0 < fetch.deadline_s <= FETCH_S_MAX:
            return Failure(
                reason=Reason.BAD_MESSAGE, message=f"the deadline must be above 0 and at most {FETCH_S_MAX:g} s"
            )
        return None
