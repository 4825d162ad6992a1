"""A simulated engine's end of the KV exchange, on the thread of its scheduler.

Who leases, fetches and gives up is decided by the real connector's own parts (``Holder``, ``Reader``); here are its
surroundings: the simulated cache instead of vLLM's pool, and a simulated link before the copying.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from connector.core.calls import EngineCall, EngineNews, Peer, PeerConnected
from connector.core.fetch_plan import Limits
from connector.core.orders import Connected, Orders, PeerKey, ReadPart, Results
from connector.core.peers import Peers, key_of
from connector.holder import Holder, HolderSettings
from connector.prefetch import Prefetcher
from connector.reader import Reader
from connector.tally import Tally
from services.worker.core.simulation.block_cache import BlockCache
from services.worker.core.simulation.cache_shelf import CacheShelf
from services.worker.core.simulation.leasable import LeasablePool
from services.worker.core.simulation.link import SimulatedLink
from services.worker.core.simulation.sequence import Sequence
from services.worker.core.simulation.settings import SimulationSettings
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import KvGrant, KvHandshake, KvOffer, KvProof

LOOK_S = 0.05
"""While something is fetched or followed, how often to look whether its time is over."""


@dataclass(slots=True)
class _Said:
    """To be told to the worker."""

    grants: list[KvGrant] = field(default_factory=list)
    connected: list[PeerConnected] = field(default_factory=list)


class Exchange:
    """See the module. ``now`` is the engine's clock."""

    def __init__(self, settings: SimulationSettings, cache: BlockCache, now: Callable[[], float]) -> None:
        me = WorkerId(settings.worker_id), Epoch(settings.epoch)
        self._settings = settings
        self._now = now
        self._peers = Peers()
        self._link = SimulatedLink(settings)
        self._tally = Tally()
        self._orders = Orders()
        self._said = _Said()
        self._connecting: set[PeerKey] = set()
        self.handshake: KvHandshake | None = None
        """Who has registered the cache's memory says here what others need to read it."""
        self.holder = Holder(
            HolderSettings(*me, settings.kv_lease_s, settings.kv_lease_s, settings.kv_lease_share_max), now
        )
        self.holder.bind(LeasablePool(cache), settings.block_size)
        self.reader = Reader(me, settings.block_size, self._peers, Limits(), now)
        self._prefetcher = Prefetcher(self.reader, now)
        self._prefetcher.bind(CacheShelf(cache))

    def call(self, call: EngineCall) -> EngineNews:
        """Do what the worker asks."""
        for peer in call.peers:
            self._know(peer)
        for gone in call.gone:
            self._forget((gone.worker_id, gone.epoch))
        for release in call.releases:
            self.holder.release(release)
        self._said.grants += [self.holder.ask(ask) for ask in call.leases]
        for grant in call.grants:
            self.reader.on_grant(grant)
            self._prefetcher.on_grant(grant)
        for fetch in call.fetches:
            self._prefetcher.start(fetch)
        if call.release_all:
            self.holder.release_all()
        self.look()
        handshake = self.handshake if call.describe else None
        if handshake is not None:
            handshake = msgspec.structs.replace(handshake, clock_s=self._now())
        return self._news(handshake)

    def look(self) -> None:
        """End what is over, and grant what became ready: after each step, and when it wants to be woken."""
        self._said.grants += self.holder.advance()
        if not self.reader.idle:
            self.reader.on_time()
        if not self._prefetcher.idle:
            self._prefetcher.go_on()
        self.send()
        self._orders.reads += self._link.arrivals(self._now())

    def wakes_at(self) -> float | None:
        """When to look again."""
        looks = not self.reader.idle or not self._prefetcher.idle or self.holder.has_followings
        expiry = self.holder.counts.next_expiry_s or None
        times = (self._link.next_arrival(), self._now() + LOOK_S if looks else None, expiry)
        return min((at for at in times if at is not None), default=None)

    def finished(self, sequence: Sequence, *, offers: bool) -> None:
        """A sequence has ended, or nobody wants it. Its blocks are still its own."""
        offer = self._offer(sequence) if offers else None
        proof = self.reader.finished(sequence.request_id, offer, sequence.wish.order)
        order = sequence.wish.order
        if proof is not None:
            handed_over = order.take is not None or any(source.follow for source in order.sources)
            self._tally.request(proof, self._settings.block_size, handed_over=handed_over)
        sequence.account.proof = proof
        self.send()

    def proof(self, sequence: Sequence) -> KvProof:
        """Where its KV came from, as far as is known by now."""
        self.reader.admitted.discard(sequence.request_id)
        return self.reader.proof(sequence.request_id)

    def scheduled(self, sequence: Sequence) -> None:
        """A prompt is computed for the first time: those who follow it want to know what was cached of it."""
        full = sequence.prompt_tokens // self._settings.block_size
        if full:
            self.holder.note_prompt(sequence.hashes[full - 1], sequence.account.cached_tokens)

    def take_orders(self) -> Orders:
        """For the mover."""
        orders, self._orders = self._orders, Orders()
        return orders

    def results(self, results: Results) -> None:
        """What the mover has done."""
        for connected in results.connected:
            self._note_connected(connected)
        for part in results.parts:
            landed = self._link.landed(part, self._now())
            if landed is not None:
                self._landed(landed)
        self.send()

    @property
    def moving(self) -> bool:
        """Whether the mover has something that is not over."""
        return bool(self._connecting) or self._link.copying

    def take_news(self) -> EngineNews | None:
        """For the worker, if there is any."""
        effects = self.reader.effects
        pending = (effects.asks, effects.releases, self._said.grants, self._said.connected, self._prefetcher.ended)
        if any(pending) or self.reader.wanted or self._tally.changed(self.holder, reads=self._link.reads):
            return self._news(None)
        return None

    def _news(self, handshake: KvHandshake | None) -> EngineNews:
        effects = self.reader.effects
        news = EngineNews(
            handshake=handshake,
            wanted=self._peers.unknown(list(self.reader.wanted)),
            leases=effects.asks,
            grants=self._said.grants,
            releases=effects.releases,
            connected=self._said.connected,
            fetched=self._prefetcher.ended,
            state=self._tally.state(self.holder, reads=self._link.reads),
        )
        effects.asks, effects.releases, self._prefetcher.ended, self._said = [], [], [], _Said()
        self.reader.wanted.clear()
        return news

    def _offer(self, sequence: Sequence) -> KvOffer | None:
        full = sequence.prompt_tokens // self._settings.block_size
        return self.holder.offer(sequence.hashes[:full], sequence.blocks[:full], sequence.wish.order.offer_id)

    def send(self) -> None:
        """Put reads on the link, and take off it what nobody wants."""
        effects = self.reader.effects
        while effects.reads or effects.cancel:
            reads, effects.reads = effects.reads, []
            cancel, effects.cancel = effects.cancel, []
            now = self._now()
            for read in reads:
                self._link.begin(read, now)
            for read_id in cancel:
                if (end := self._link.cancel(read_id, now)) is not None:
                    self._landed(end)
                else:
                    self._orders.cancel.append(read_id)

    def _landed(self, part: ReadPart) -> None:
        self._tally.part(part)
        if not self.reader.on_part(part):
            self._prefetcher.on_part(part)

    def _know(self, peer: Peer) -> None:
        ended = self._peers.know(peer)
        if ended is None:
            return
        for other in ended:
            self._forget(other)
        self._connecting.add(key_of(peer))
        self._orders.connect.append(peer)
        self.reader.on_peer()
        self._prefetcher.on_peer()

    def _note_connected(self, connected: Connected) -> None:
        self._connecting.discard(connected.peer)
        worker_id, epoch = connected.peer
        self._said.connected.append(
            PeerConnected(
                worker_id=WorkerId(worker_id),
                epoch=Epoch(epoch),
                seconds=connected.seconds,
                failure=connected.failure,
            )
        )
        if connected.failure:
            self._forget(connected.peer)
            self._peers.shun(connected.peer)

    def _forget(self, key: PeerKey) -> None:
        if self._peers.forget(key):
            self._connecting.discard(key)
            self._orders.forget.append(key)
            self.reader.on_peer_gone(key)
            self._prefetcher.on_peer_gone(key)
