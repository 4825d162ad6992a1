"""The scheduler role: answers other workers' asks, has this engine's requests fetch, orders the worker role about.

All on the engine's scheduler thread. Two ways in: the scheduler's own hooks, once a step, and ``exchange``, a utility
call by the worker service that also an idle engine answers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from connector.core.calls import EngineCall, EngineNews, Peer, PeerConnected
from connector.core.compatibility import PROTOCOL_VERSION, why_not
from connector.core.fetch_plan import Limits
from connector.core.orders import Orders, PeerKey, ReadPart, Results
from connector.core.peers import Peers, key_of
from connector.core.votes import Votes
from connector.holder import Holder, HolderSettings
from connector.metadata import StepOrders, StepReport
from connector.news import NewsPort
from connector.pool_shelf import PoolShelf
from connector.prefetch import Prefetcher
from connector.reader import Reader
from connector.rest import READ_REST_S_MAX, Rest
from connector.settings import Settings
from connector.tally import Tally
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import KvGrant, KvHandshake, KvOffer, KvProof, KvRank, LegOrder

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
        me = (settings.worker_id, settings.epoch)
        self._settings = settings
        self._shape = shape
        self._handshake: KvHandshake | None = None
        self._peers = Peers()
        self._votes = Votes(shape.ranks)
        self._orders = Orders()
        self._connecting: set[PeerKey] = set()
        self._out = Outbox(NewsPort(settings.news))
        self.rest = Rest()
        self.holder = Holder(
            HolderSettings(
                worker_id=WorkerId(settings.worker_id),
                epoch=Epoch(settings.epoch),
                lease_s=settings.lease_s,
                lease_s_max=settings.lease_s_max,
                lease_share_max=settings.lease_share_max,
            ),
            time.monotonic,
        )
        limits = Limits(answer_s_max=settings.answer_s_max)
        self.reader = Reader(me, shape.block_tokens, self._peers, limits, time.monotonic)
        self._prefetcher = Prefetcher(self.reader, time.monotonic)

    def bind(self, pool: BlockPool) -> None:
        """The engine's blocks."""
        self.holder.bind(pool, self._shape.block_tokens)
        self._prefetcher.bind(PoolShelf(pool, self._shape.block_tokens))

    def describe(self, ranks: list[KvRank], blocks: int) -> None:
        """Every rank has registered its memory, all of the same number of blocks."""
        self._handshake = KvHandshake(
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
        """An ``EngineCall`` from the worker; answers ``EngineNews``. An idle engine does it without a step."""
        self.rest.stir()
        call = _call.decode(packed)
        for peer in call.peers:
            self._know(peer)
        for gone in call.gone:
            self._forget((gone.worker_id, gone.epoch))
        for release in call.releases:
            self.holder.release(release)
        self._out.grants += [self.holder.ask(ask) for ask in call.leases]
        for grant in call.grants:
            self._granted(grant)
        for fetch in call.fetches:
            self._prefetcher.start(fetch)
        if call.release_all:
            self.holder.release_all()
        self._out.grants += self.holder.advance()
        handshake = self._handshake if call.describe else None
        if handshake is not None:
            handshake = msgspec.structs.replace(handshake, clock_s=time.monotonic())
        return _encode(self._news(handshake))

    def finished(self, request_id: str, offer: KvOffer | None, order: LegOrder) -> KvProof | None:
        """A request has ended."""
        proof = self.reader.finished(request_id, offer, order)
        handed_over = order.take is not None or any(source.follow for source in order.sources)
        if proof is not None:
            self._out.tally.request(proof, self._shape.block_tokens, handed_over=handed_over)
        return proof

    def orders(self, scheduled_tokens: int) -> StepOrders:
        """For the step that begins; and the asks of this pass leave before it computes. A step that computes nothing
        may wait for a read to end where that does not ring: the sooner it is known, the sooner its request goes on.
        """
        self._take_effects()
        self.tell()
        orders, self._orders = self._orders, Orders()
        waits = self._is_moving and not scheduled_tokens and not self.rest.hears_reads
        return StepOrders(orders, wait_s=READ_WAIT_S if waits else 0.0)

    def digest(self, report: StepReport | None) -> tuple[set[str], set[int]]:
        """After a step, before the scheduler sees its output: requests whose blocks came, and blocks that did not."""
        if report is not None:
            self.rest.stir()
            for one in report.results:
                results = self._votes.count(one)
                self._note_connected(results)
                for part in results.parts:
                    self._read(part)
        if not self.reader.idle:
            self.reader.on_time()
        if not self._prefetcher.idle:
            self._prefetcher.go_on()
        return self.reader.settle()

    def stepped(self) -> None:
        """After the scheduler has taken in a step's output."""
        self._out.grants += self.holder.advance()
        self._take_effects()
        self.tell()

    def pause(self) -> None:
        """Before a step: rest, if all that can be done is to look again whether an answer came, or a read's end."""
        if self._orders:
            return
        if not self._is_moving:
            if not self.reader.idle:
                self.rest.take()
        elif self.rest.hears_reads:
            self.rest.take(READ_REST_S_MAX)

    @property
    def _is_moving(self) -> bool:
        return bool(self._connecting or self.reader.reads_under_way or not self._prefetcher.idle)

    @property
    def pressing(self) -> bool:
        """The engine must step though it has no request: something is to be ordered, or a byte moves for nobody's."""
        return bool(self._orders or self._connecting) or not (self._prefetcher.idle and self.reader.nothing_lingers)

    def close(self) -> None:
        """The engine ends."""
        self.holder.release_all()
        self._out.port.close()

    def _know(self, peer: Peer) -> None:
        key = key_of(peer)
        if self._handshake is not None and (why := why_not(self._handshake, peer.handshake)):
            self._out.connected.append(_said(key, failure=why))
            self._peers.shun(key)
            return
        ended = self._peers.know(peer)
        if ended is None:
            return
        for other in ended:
            self._forget(other)
        self._connecting.add(key)
        self._orders.connect.append(peer)
        self.reader.on_peer()
        self._prefetcher.on_peer()

    def _forget(self, key: PeerKey) -> None:
        if not self._peers.forget(key):
            return
        self._connecting.discard(key)
        self._orders.connect = [peer for peer in self._orders.connect if key_of(peer) != key]
        self._orders.forget.append(key)
        self.reader.on_peer_gone(key)
        self._prefetcher.on_peer_gone(key)

    def _granted(self, grant: KvGrant) -> None:
        self.reader.on_grant(grant)
        self._prefetcher.on_grant(grant)

    def _read(self, part: ReadPart) -> None:
        self._out.tally.part(part)
        if not self.reader.on_part(part):
            self._prefetcher.on_part(part)

    def _note_connected(self, results: Results) -> None:
        for connected in results.connected:
            self._connecting.discard(connected.peer)
            if connected.failure:
                self._forget(connected.peer)
                self._peers.shun(connected.peer)
            self._out.connected.append(_said(connected.peer, connected.seconds, connected.failure))

    def _take_effects(self) -> None:
        effects = self.reader.effects
        self._orders.reads += effects.reads
        self._orders.cancel += effects.cancel
        effects.reads, effects.cancel = [], []

    def _news(self, handshake: KvHandshake | None = None) -> EngineNews:
        self._take_effects()
        effects, reader, out = self.reader.effects, self.reader, self._out
        news = EngineNews(
            handshake=handshake,
            wanted=self._peers.unknown(list(reader.wanted)),
            leases=effects.asks,
            grants=out.grants,
            releases=effects.releases,
            connected=out.connected,
            fetched=self._prefetcher.ended,
            state=out.tally.state(self.holder, reads=reader.reads_under_way),
        )
        effects.asks, effects.releases, self._prefetcher.ended = [], [], []
        out.grants, out.connected = [], []
        reader.wanted.clear()
        return news

    def tell(self) -> None:
        """Tell the worker, if there is something to tell."""
        effects, out = self.reader.effects, self._out
        pending = effects.asks or effects.releases or out.grants or out.connected or self._prefetcher.ended
        if pending or self.reader.wanted or out.tally.changed(self.holder, reads=self.reader.reads_under_way):
            out.port.push(self._news())


@dataclass(slots=True)
class Outbox:
    """What has been said since the worker was last told, and in all."""

    port: NewsPort
    grants: list[KvGrant] = field(default_factory=list)
    connected: list[PeerConnected] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)


def _said(key: PeerKey, seconds: float = 0.0, failure: str = "") -> PeerConnected:
    return PeerConnected(worker_id=WorkerId(key[0]), epoch=Epoch(key[1]), seconds=seconds, failure=failure)
