"""How an engine, real or simulated, handles exchange calls and which notifications it sends."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from types import SimpleNamespace

import msgspec
import pytest

from connector.groups import full_attention
from connector.holder.holder import HolderSettings
from connector.layout.routes import PART_BYTES
from connector.messages import Connected, EngineCall, Orders, Peer, PeerGone
from connector.reader.fetch import FetchLimits, Outbox
from connector.scheduler.exchange_core import ExchangeCore, GrantWays, PendingReplies
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import KvGrant, KvHandshake
from tests.support.kv_engines import RankMemory, Shape, handshake
from tests.support.kv_messages import first_of
from tests.unit.connector.holding import BLOCK_TOKENS, ME, Holding, chain, lease_request, release

HOLDER = ("holder", 1)


class Engine:
    def __init__(self):
        self.now = 5.0
        holding = HolderSettings(worker_id=WorkerId("me"), epoch=Epoch(1))
        self.exchange = ExchangeCore(holding, full_attention(Shape().block_size), FetchLimits(), lambda: self.now)
        self.exchange.describe(described("me"))

    def add_peer(self, peer: KvHandshake):
        self.exchange.handle(EngineCall(peers=[Peer(handshake=peer, clock_ahead_s=0.0)]))


@pytest.fixture
def engine():
    return Engine()


def described(worker_id: str = "holder", **other) -> KvHandshake:
    shape = Shape()
    return msgspec.structs.replace(handshake([RankMemory(shape, 0).described()], shape, worker_id), **other)


def test_an_added_peer_is_to_be_connected(engine):
    engine.add_peer(described())

    assert [peer.handshake.worker_id for peer in engine.exchange.orders.connect] == ["holder"]
    assert engine.exchange.connecting == {HOLDER}


def test_an_incompatible_peer_is_refused_with_a_reason(engine):
    engine.add_peer(described(fingerprint="another model"))

    assert not engine.exchange.orders
    (connection,) = engine.exchange.notifications().connected
    assert "fingerprint differs" in connection.failure


def test_a_peer_lost_before_connecting_is_not_connected(engine):
    engine.add_peer(described())
    engine.exchange.handle(EngineCall(gone=[PeerGone(worker_id=WorkerId("holder"), epoch=Epoch(1))]))

    assert engine.exchange.orders.connect == []
    assert engine.exchange.orders.forget == [HOLDER]
    assert not engine.exchange.connecting


@pytest.mark.parametrize("failure", ["", "refused"])
def test_the_end_of_a_connection_attempt_is_reported_once(engine, failure):
    engine.add_peer(described())
    assert not engine.exchange.has_notifications

    engine.exchange.on_connected([Connected(HOLDER, 0.2, failure)])

    assert engine.exchange.has_notifications
    (connection,) = engine.exchange.notifications().connected
    assert (connection.worker_id, connection.seconds, connection.failure) == ("holder", 0.2, failure)
    assert not engine.exchange.has_notifications
    assert engine.exchange.orders.forget == ([HOLDER] if failure else [])


def test_the_handshake_is_sent_on_demand_with_the_current_clock(engine):
    engine.now = 7.5

    assert engine.exchange.notifications().handshake is None
    assert engine.exchange.notifications(describe=True).handshake.clock_s == 7.5


def test_reads_are_cut_by_the_blocks_of_the_largest_rank(engine):
    small, large = (RankMemory(Shape(layers=layers), 0).described() for layers in (1, 3))
    engine.exchange.describe(described("me", ranks=[small, large]))

    block_bytes = 3 * 4 * 8 * 16 * 4
    assert engine.exchange.reader.outbox.part_blocks == [PART_BYTES // block_bytes]


WORK = [
    *(f"orders.{one.name}" for one in fields(Orders)),
    *(f"reader.outbox.{one.name}" for one in fields(Outbox) if one.name != "part_blocks"),  # a measure, no work
    # These two are sent with the next message.
    *(f"_replies.{one.name}" for one in fields(PendingReplies) if one.name not in {"answered", "lost_blocks"}),
    *("reader.fetching", "reader.unfinished", "reader.unknown_peers", "connecting"),
    *("prefetcher.under_way", "prefetcher.ended", "_speed_tests.under_way", "_speed_tests.ended"),
]


@pytest.mark.parametrize("work", WORK)
def test_an_exchange_with_work_of_any_kind_is_not_idle(engine, work):
    assert engine.exchange.is_idle
    path, _, name = f"exchange.{work}".rpartition(".")
    owner = attrgetter(path)(engine)

    setattr(owner, name, type(getattr(owner, name))({"one": "piece"}))

    assert not engine.exchange.is_idle


class Socket:
    """Of a reader's engine on the same machine."""

    def __init__(self):
        self.works = True
        self.grants = []

    def send(self, path, grant):
        assert path == "/run/kv-grants-r"
        if self.works:
            self.grants.append(grant)
        return self.works


class HoldingEngine:
    """An engine with blocks; readers ask it, and may name a socket."""

    def __init__(self):
        self.holding = Holding()
        self.socket = Socket()
        self.ways = GrantWays(self.socket.send)
        self.exchange = ExchangeCore(
            HolderSettings(**ME), full_attention(BLOCK_TOKENS), FetchLimits(), lambda: 5.0, self.ways
        )
        self.exchange.bind(self.holding.pool, SimpleNamespace())  # it fetches nothing

    def ask(self, hashes, **fields):
        self.exchange.handle(EngineCall(leases=[lease_request(hashes, **fields)]))

    def on_the_bus(self):
        return self.exchange.notifications().grants


@pytest.fixture
def holder():
    pytest.importorskip("vllm")
    return HoldingEngine()


def test_an_engine_lends_something_until_its_worker_knows_that_it_is_over(holder):
    hashes = chain(2)
    holder.holding.hold(hashes)
    assert holder.exchange.lends_nothing

    holder.ask(hashes)
    (grant,) = holder.on_the_bus()
    assert not holder.exchange.lends_nothing

    holder.exchange.handle(EngineCall(releases=[release(lease_id=grant.lease_id)]))
    assert not holder.exchange.lends_nothing
    assert holder.exchange.notifications().state.leases == 0
    assert holder.exchange.lends_nothing


ASKED = {"reply_to": "/run/kv-grants-r", "follow_s": 5.0}


def test_grants_go_to_the_readers_socket_and_not_over_the_bus(holder):
    hashes = chain(4)
    holder.holding.hold(hashes[:2])
    holder.ask(hashes, **ASKED)
    holder.holding.hold(hashes[2:])
    holder.exchange.grant()

    assert [(first_of(grant), grant.final) for grant in holder.socket.grants] == [(0, False), (2, True)]
    assert holder.on_the_bus() == []


def test_after_a_grant_that_the_socket_did_not_take_all_of_its_lease_take_the_bus(holder):
    """Otherwise a later grant could overtake it, and would not fit."""
    hashes = chain(4)
    holder.holding.hold(hashes[:2])
    holder.socket.works = False
    holder.ask(hashes, **ASKED)
    holder.socket.works = True
    holder.holding.hold(hashes[2:])
    holder.exchange.grant()

    assert [(first_of(grant), grant.final) for grant in holder.on_the_bus()] == [(0, False), (2, True)]
    assert holder.socket.grants == []


def test_a_reader_without_a_socket_gets_its_grants_over_the_bus(holder):
    holder.holding.hold(chain(2))
    holder.ask(chain(2))

    assert [grant.final for grant in holder.on_the_bus()] == [True]
    assert holder.socket.grants == []


def test_a_released_lease_is_forgotten(holder):
    holder.ask(chain(1), **ASKED)
    assert len(holder.ways._paths) == 1

    holder.exchange.handle(EngineCall(releases=[release("ask-1")]))

    assert not holder.ways._paths


def test_the_worker_learns_which_asks_were_answered_past_the_bus(engine):
    grant = KvGrant(reader_id="me", worker_id="holder", epoch=1, ask_id="ask", final=False)
    engine.exchange.on_direct_grant(grant)
    assert engine.exchange.notifications().answered == []

    engine.exchange.on_direct_grant(msgspec.structs.replace(grant, final=True))

    assert engine.exchange.notifications().answered == ["ask"]
    assert engine.exchange.notifications().answered == []
