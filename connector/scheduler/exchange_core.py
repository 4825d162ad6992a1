"""The KV exchange of one engine, whichever engine it is: decides about leases, fetches and peers.

A real engine (``ConnectorScheduler``), a simulated engine and a store each use one. They supply memory, a clock and
something that moves bytes, and call in from the thread of their scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from connector.groups import GroupPlan
from connector.holder.boundaries import FindBoundary
from connector.holder.holder import NO_LEASES, Holder, HolderSettings, Pool
from connector.holder.hot_chains import EVICTION_BLOCKS_MAX, EVICTION_SHARE, HotChains
from connector.holder.lease_digests import LeaseDigests
from connector.layout.routes import part_blocks_of
from connector.layout.tensors import why_not
from connector.messages import (
    BlocksDigested,
    Chain,
    Connected,
    EngineCall,
    EngineNotification,
    Notice,
    Orders,
    Peer,
    PeerConnected,
    PeerKey,
    ReadMeasured,
    ReadPart,
)
from connector.reader.fetch import FetchLimits, Shortcuts
from connector.reader.grant_test import GrantTests, GrantTimes
from connector.reader.peers import Peers, key_of
from connector.reader.prefetch import BlockAllocator, Prefetch, Prefetcher
from connector.reader.prefetched_blocks import PrefetchedBlocks, WithoutRequest
from connector.reader.reader import Reader
from connector.reader.speed_test import SpeedTests
from connector.scheduler.grant_ways import GrantWays
from shared.bounded import Bounded
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import (
    KvExchangeState,
    KvGrant,
    KvHandshake,
    KvOffer,
    KvTransferReport,
    LeaseKv,
    LegOrder,
)
from shared.contracts.workers import looks_for_notices

NOTICE_BYTES_MAX = 1 << 15
"""Larger grants take the bus alone."""
MEASURES_MAX = 16
ANSWERED_MAX = 4096
"""Requests that are reported as answered at a time. The worker keeps any other one open until it is released."""


_encode = msgspec.msgpack.Encoder().encode


class ExchangeStats:
    """Counters as reported in ``KvExchangeState``: counts reads and tokens; the holder counts leases."""

    def __init__(self, prefetched: PrefetchedBlocks) -> None:
        self._prefetched = prefetched
        self._reads = 0
        self._reads_failed = 0
        self._read_bytes = 0
        self._read_seconds = 0.0
        self._prefetch_s = 0.0
        self._refused = 0
        self._recomputed_tokens = 0
        self._first_tokens = 0
        self._slowed_s = 0.0
        self._reported: KvExchangeState | None = None
        self.has_reported_any = False
        """The last report names leases or reads."""

    def part(self, part: ReadPart, *, for_request: bool) -> None:
        """Count a part of a read that has ended."""
        self._reads += 1
        if part.failure:
            self._reads_failed += 1
            return
        seconds = max(0.0, part.ended_s - part.started_s)
        self._read_bytes += part.bytes
        self._read_seconds += seconds
        if not for_request:
            self._prefetch_s += seconds

    def request(self, transfer_report: KvTransferReport, groups: GroupPlan, *, handed_over: bool) -> None:
        """Count an ended request. Tokens that a decode leg computes, beyond the tail after the last boundary, were
        computed twice.
        """
        self._refused += transfer_report.refused
        self._first_tokens += transfer_report.first_token_received
        self._slowed_s += transfer_report.recompute_slowed_s
        if handed_over:
            prompt = transfer_report.prompt_tokens
            tail = prompt - groups.last_boundary(prompt) or 1
            self._recomputed_tokens += (
                max(0, transfer_report.recomputed_tokens - tail) + transfer_report.reprefilled_tokens
            )

    def state(self, holder: Holder, *, reads: int) -> KvExchangeState:
        """The counters now; remembered for ``changed``."""
        counts = holder.counts
        self._reported = KvExchangeState(
            leases=counts.leases,
            pinned_blocks=counts.pinned_blocks,
            blocks=holder.blocks,
            next_expiry_s=counts.next_expiry_s,
            reads=reads,
            leases_granted_total=counts.granted_total,
            leases_released_total=counts.released_total,
            leases_expired_total=counts.expired_total,
            leases_refused_total=counts.refused_total,
            reads_total=self._reads,
            reads_failed_total=self._reads_failed,
            read_bytes_total=self._read_bytes,
            read_seconds_total=self._read_seconds,
            refused_requests_total=self._refused,
            recomputed_tokens_total=self._recomputed_tokens,
            first_tokens_received_total=self._first_tokens,
            recompute_slowed_seconds_total=self._slowed_s,
            prefetched_blocks_total=self._prefetched.fetched,
            prefetch_used_blocks_total=self._prefetched.used,
            prefetch_wasted_blocks_total=self._prefetched.wasted,
            prefetch_seconds_total=self._prefetch_s,
        )
        self.has_reported_any = bool(counts.leases or reads)
        return self._reported

    def changed(self, holder: Holder, reads: Callable[[], int]) -> bool:
        """Whether leases changed since the last report, or all reads ended. Cheap: every step asks.

        The worker wakes an idle engine when its next lease expires, so it must know that instant.
        """
        reported, now = self._reported, holder.lease_state
        if reported is None:
            return now is not NO_LEASES
        if now != (reported.leases, reported.pinned_blocks, reported.next_expiry_s):
            return True
        prefetched = self._prefetched
        if prefetched.fetched and prefetched.unused != reported.prefetched_unused_blocks:
            return True
        return bool(reported.reads) and not reads()


@dataclass(slots=True)
class PendingReplies:
    """Replies to the worker's calls that are not sent yet."""

    grants: list[KvGrant] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)
    connected: list[PeerConnected] = field(default_factory=list)
    chains: list[Chain] = field(default_factory=list)
    lost_blocks: int = 0

    def __bool__(self) -> bool:
        return bool(self.grants or self.connected or self.chains)


class ExchangeCore:
    """Reads and cancellations are in ``reader.outbox``; the caller hands them to its mover of bytes."""

    def __init__(
        self,
        settings: HolderSettings,
        groups: GroupPlan,
        limits: FetchLimits,
        now: Callable[[], float],
        grant_ways: GrantWays | None = None,
    ) -> None:
        self.handshake: KvHandshake | None = None
        """What peers need to read this engine's memory; None until the memory is registered."""
        self.orders = Orders()
        """Orders for the mover of bytes: peers to connect and to forget."""
        self.connecting: set[PeerKey] = set()
        self._now = now
        self._groups = groups
        self._peers = Peers()
        self._replies = PendingReplies()
        self._grant_ways = grant_ways or GrantWays()
        self.holder = Holder(settings, now)
        me = settings.worker_id, settings.epoch
        self._without_notices: set[PeerKey] = set()
        """Peers on this machine, and those whose notices come no sooner than the bus."""
        self._is_listening = False
        self._prefetched = blocks = PrefetchedBlocks()
        self._stats = ExchangeStats(blocks)
        under_way: list[Prefetch] = []
        reply_to = self._grant_ways.reply_to
        shortcuts = Shortcuts(reply_to, self._may_listen)
        self.reader = Reader(me, groups, self._peers, limits, now, shortcuts, WithoutRequest(under_way, blocks))
        self.prefetcher = Prefetcher(self.reader, now, under_way, blocks)
        self._grant_tests = GrantTests(me, self.reader.outbox, now, reply_to)
        self._grant_times = Bounded[str, GrantTimes](MEASURES_MAX)
        """Results by measure id, until the speed is known, too."""
        self._speed_tests = SpeedTests(self.reader.outbox, self.reader.numbers, now)
        self._digests = LeaseDigests(self.holder, now)
        self._hot: HotChains
        self._allocator: BlockAllocator

    def bind(self, pool: Pool, allocator: BlockAllocator, find_boundary: FindBoundary | None = None) -> None:
        """Set the engine's blocks. Called once, before all other methods. ``find_boundary``: see ``Holder.bind``."""
        self.holder.bind(pool, self._groups, find_boundary, self._on_freed)
        self.prefetcher.bind(allocator)
        self._speed_tests.bind(allocator)
        self._allocator = allocator
        self._hot = HotChains(self.holder.held, keeps_prefix=self._groups.keeps_prefix)

    def describe(self, handshake: KvHandshake) -> None:
        """The engine's memory is registered, so that peers can read it."""
        self.handshake = handshake
        groups = range(len(handshake.groups))
        self.reader.outbox.part_blocks = [part_blocks_of(handshake.ranks, group) for group in groups]

    def handle(self, call: EngineCall) -> None:
        """Carry out a call of the worker; its reply is ``notifications``."""
        self._prefetched.sweep(self._held, self._now())
        for peer in call.peers:
            self._add_peer(peer)
        for gone in call.gone:
            self._forget_peer((gone.worker_id, gone.epoch))
        for release in call.releases:
            self.holder.release(release)
            self._grant_ways.forget(release.ask_ids)
        for ask in call.leases:
            self._grant_ways.note(ask)
            self._reply(self.holder.lease(ask))
        for grant in call.grants:
            self._on_grant(grant, noticed=False)
        for fetch in call.fetches:
            self.prefetcher.start(fetch)
        for measure in call.measures:
            memory = self._peers.memory((measure.worker_id, measure.epoch))
            self._grant_tests.start(measure, is_known=memory is not None)
        for digest in call.digests:
            if (blocks := self._digests.start(digest)) is not None:
                self.orders.digests.append(blocks)
        if call.chains_max:
            self._tell_chains(call)
        if call.release_all:
            self.holder.release_all()
        self._on_grants_tested()

    def _held(self, hashes: Sequence[bytes]) -> int:
        return self.holder.held(list(hashes))

    def _tell_chains(self, call: EngineCall) -> None:
        count, now, hot, replies = call.chains_max, self._now(), self._hot, self._replies
        wishes: dict[str, Any] = {"uses_min": call.chains_uses_min, "idle_s_max": call.chains_idle_s_max}
        if not call.chains_for_store:
            replies.chains = hot.hottest(count, now, **wishes)
            return
        soon, least = min(EVICTION_BLOCKS_MAX, int(self.holder.blocks * EVICTION_SHARE)), call.chains_blocks_min
        evicted_next = partial(self._allocator.evicted_next, soon)
        replies.chains = hot.for_store(count, now, **wishes, evicted_next=evicted_next, blocks_min=least)
        replies.lost_blocks += hot.take_lost()

    def _on_freed(self, block_ids: list[int]) -> None:
        """What a store has just copied is evicted next, as it was to be. To the engine's cache a read is a use, after
        which it would evict what nobody has copied.
        """
        if self._hot.leaving:
            self._allocator.evict_first(block_ids, self._hot.leaving)

    def say_coming(self, ask: LeaseKv) -> None:
        """The blocks of a lease request are not here yet, but will be."""
        self._reply(self.holder.coming(ask))

    def grant(self) -> None:
        """Grant newly computed blocks of followed prompts, and end expired leases."""
        for grant in self.holder.advance():
            self._reply(grant)

    def on_direct_grant(self, grant: KvGrant) -> None:
        """A grant came from the holder's engine: through this engine's socket or, what the bus repeats, as a notice."""
        if grant.number >= 0:
            self._on_grant(grant, noticed=True)
            self._on_grants_tested()
            return
        if self._peers.memory((grant.worker_id, grant.epoch)) is not None:
            self._without_notices.add((grant.worker_id, grant.epoch))
        if self._grant_tests.on_near(grant):
            self._on_grants_tested()
        else:
            self._on_grant(grant, noticed=False)
        if grant.final:
            self._replies.answered.append(grant.ask_id)
            del self._replies.answered[:-ANSWERED_MAX]

    def on_time(self) -> None:
        """Give up what is overdue and begin what can begin. Called in every step."""
        if not self.reader.idle:
            self.reader.on_time()
        if not self.prefetcher.idle:
            self.prefetcher.advance()
        self._grant_tests.on_time()
        self._on_grants_tested()
        self._speed_tests.on_time()
        self._digests.on_time()

    def on_connected(self, ended: Iterable[Connected]) -> None:
        """Connection attempts have ended, with or without success."""
        for one in ended:
            self.connecting.discard(one.peer)
            if one.failure:
                self._forget_peer(one.peer)
                self._peers.shun(one.peer)
            self._reply_connected(one.peer, one.seconds, one.failure)

    def on_part(self, part: ReadPart) -> None:
        """A part of a read has ended."""
        if self._speed_tests.on_part(part):
            return  # Nothing was received.
        is_for_request = self.reader.on_part(part)
        self._stats.part(part, for_request=is_for_request)
        if not is_for_request:
            self.prefetcher.on_part(part)

    def on_digested(self, result: BlocksDigested) -> None:
        """The digests of some blocks are computed."""
        self._digests.on_digested(result)

    def finished(self, request_id: str, offer: KvOffer | None, order: LegOrder) -> KvTransferReport | None:
        """A request has ended; returns its report."""
        if order.leg_id:
            self.holder.leg_ended(order.leg_id)
        transfer_report = self.reader.finished(request_id, offer, order)
        handed_over = order.take is not None or any(source.follow for source in order.sources)
        if transfer_report is not None:
            self._stats.request(transfer_report, self._groups, handed_over=handed_over)
        return transfer_report

    def used(self, hashes: Sequence[bytes], computed_tokens: int) -> None:
        """Note the full blocks of an ended request, prompt and completion, as a recently used chain."""
        self._hot.note(list(hashes[: computed_tokens // self._groups.unit]), self._now())

    @property
    def reads(self) -> int:
        """Number of reads under way, with and without a request."""
        return self.reader.reads_under_way + self.prefetcher.reads_under_way + self._speed_tests.reads_under_way

    @property
    def works_without_request(self) -> bool:
        """Whether it fetches, measures or computes digests for no request: the engine must step without one."""
        tests = self._speed_tests.under_way or self._grant_tests.under_way
        return bool(self.prefetcher.under_way or tests or self._digests.under_way)

    @property
    def computes_digests(self) -> bool:
        return bool(self._digests.under_way)

    @property
    def is_idle(self) -> bool:
        """Nothing is fetched, measured or connected, and there is nothing to order or to say, except of leases.

        Each step of an engine asks several times, so this calls nothing.
        """
        reader, prefetcher, tests, digests = self.reader, self.prefetcher, self._speed_tests, self._digests
        outbox, orders, replies = reader.outbox, self.orders, self._replies
        return not (
            reader.fetching
            or reader.unfinished
            or reader.unknown_peers
            or outbox.lease_requests
            or outbox.releases
            or outbox.reads
            or outbox.cancel
            or orders.connect
            or orders.forget
            or orders.reads
            or orders.cancel
            or orders.digests
            or orders.notices
            or orders.listens is not None
            or self._is_listening
            or replies.grants
            or replies.connected
            or replies.chains
            or self.connecting
            or prefetcher.under_way
            or prefetcher.ended
            or self._grant_tests.under_way
            or tests.under_way
            or tests.ended
            or digests.under_way
            or digests.ended
        )

    @property
    def lends_nothing(self) -> bool:
        """Nothing is leased, and the worker knows it."""
        return not (self.holder.has_leases or self._stats.has_reported_any)

    @property
    def has_notifications(self) -> bool:
        """Whether ``notifications`` would say something new."""
        outbox, ended = self.reader.outbox, self.prefetcher.ended or self._speed_tests.ended or self._digests.ended
        has_messages = outbox.lease_requests or outbox.releases or self._replies or ended or self.reader.unknown_peers
        return bool(has_messages) or self._stats.changed(self.holder, lambda: self.reads)

    def notifications(self, *, describe: bool = False) -> EngineNotification:
        """Everything new for the worker, once; with the handshake if ``describe``."""
        outbox, reader, replies = self.reader.outbox, self.reader, self._replies
        handshake = self.handshake if describe else None
        if handshake is not None:
            handshake = msgspec.structs.replace(handshake, clock_s=self._now())
        notifications = EngineNotification(
            handshake=handshake,
            unknown_peers=self._peers.unknown(list(reader.unknown_peers)),
            leases=outbox.lease_requests,
            grants=replies.grants,
            releases=outbox.releases,
            answered=replies.answered,
            connected=replies.connected,
            fetched=self.prefetcher.ended,
            measured=[self._with_grant_times(one) for one in self._speed_tests.ended],
            digested=self._digests.ended,
            chains=replies.chains,
            lost_blocks=replies.lost_blocks,
            state=self._stats.state(self.holder, reads=self.reads),
        )
        outbox.lease_requests, outbox.releases = [], []
        self.prefetcher.ended, self._speed_tests.ended, self._digests.ended = [], [], []
        self._replies = PendingReplies()
        reader.unknown_peers.clear()
        return notifications

    def listen(self) -> None:
        """Order to look for notices, or not to any more, as requests need it. Called before orders are given."""
        wanted = self.reader.listens or self.prefetcher.listens or bool(self._grant_tests.under_way)
        if wanted != self._is_listening:
            self._is_listening = self.orders.listens = wanted

    def _may_listen(self, peer: PeerKey) -> bool:
        """Whether its grants may come as notices that are worth looking for."""
        return bool(self._grant_ways.reply_to) and peer not in self._without_notices

    def _on_grant(self, grant: KvGrant, *, noticed: bool) -> None:
        if not self._grant_tests.on_grant(grant, noticed=noticed):
            self.reader.on_grant(grant)
            self.prefetcher.on_grant(grant)

    def _on_grants_tested(self) -> None:
        """How long grants take is known: use notices where they pay, and measure the speed of reads next."""
        ended, self._grant_tests.ended = self._grant_tests.ended, []
        for order, times in ended:
            peer = order.worker_id, order.epoch
            memory = self._peers.memory(peer)
            if memory is not None and times.notice_s and times.bus_s:
                change = set.discard if looks_for_notices(times.notice_s, times.bus_s) else set.add
                change(self._without_notices, peer)
            self._grant_times[order.measure_id] = times
            self._speed_tests.start(order, memory, self._device)

    def _with_grant_times(self, measured: ReadMeasured) -> ReadMeasured:
        times = self._grant_times.pop(measured.measure_id, GrantTimes())
        return msgspec.structs.replace(measured, notice_s=times.notice_s, bus_s=times.bus_s)

    @property
    def _device(self) -> str:
        """Device of this engine's blocks."""
        return self.handshake.ranks[0].device if self.handshake is not None and self.handshake.ranks else ""

    def _add_peer(self, peer: Peer) -> None:
        key = key_of(peer)
        if self.handshake is not None and (reason := why_not(self.handshake, peer.handshake)):
            self._reply_connected(key, 0.0, reason)
            self._peers.shun(key)
            return
        ended = self._peers.know(peer)
        if ended is None:
            return
        for other in ended:
            self._forget_peer(other)
        self.connecting.add(key)
        self.orders.connect.append(peer)
        self.reader.on_peer()
        self.prefetcher.on_peer()

    def _forget_peer(self, key: PeerKey) -> None:
        if not self._peers.forget(key):
            return
        self._without_notices.discard(key)
        self.connecting.discard(key)
        self.orders.connect = [peer for peer in self.orders.connect if key_of(peer) != key]
        self.orders.forget.append(key)
        self.reader.on_peer_gone(key)
        self.prefetcher.on_peer_gone(key)
        self._speed_tests.on_peer_gone(key)

    def _reply(self, grant: KvGrant) -> None:
        over_bus = self._grant_ways.send(grant)
        if over_bus is not None:
            self._replies.grants.append(over_bus)
        for noticed in self._grant_ways.take_notices():
            packed = _encode(noticed)
            if (peer := self._peers.newest(noticed.reader_id)) is not None and len(packed) <= NOTICE_BYTES_MAX:
                self.orders.notices.append(Notice(peer, packed))

    def _reply_connected(self, key: PeerKey, seconds: float, failure: str) -> None:
        connected = PeerConnected(worker_id=WorkerId(key[0]), epoch=Epoch(key[1]), seconds=seconds, failure=failure)
        self._replies.connected.append(connected)
