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
from connector.messages import Connected, EngineCall, MeasureRead, Orders, Peer, PeerGone
from connector.reader.fetch import FetchLimits, Outbox
from connector.reader.grant_test import ASKS_MAX, NOTICE_S_MAX, PAIRS, TEST_S_MAX
from connector.scheduler.exchange_core import ExchangeCore, PendingReplies
from connector.scheduler.grant_ways import GrantWays
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
    *(f"orders.{one.name}" for one in fields(Orders) if one.name != "listens"),
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
    assert len(holder.ways._ways) == 1

    holder.exchange.handle(EngineCall(releases=[release("ask-1")]))

    assert not holder.ways._ways


def test_the_worker_learns_which_asks_were_answered_past_the_bus(engine):
    grant = KvGrant(reader_id="me", worker_id="holder", epoch=1, ask_id="ask", final=False)
    engine.exchange.on_direct_grant(grant)
    assert engine.exchange.notifications().answered == []

    engine.exchange.on_direct_grant(msgspec.structs.replace(grant, final=True))

    assert engine.exchange.notifications().answered == ["ask"]
    assert engine.exchange.notifications().answered == []


def test_a_grant_to_another_machine_goes_as_a_notice_too(holder):
    hashes = chain(2)
    holder.holding.hold(hashes)
    holder.exchange.describe(described(str(ME["worker_id"])))
    reader = lease_request(hashes).reader_id
    holder.exchange.handle(EngineCall(peers=[Peer(handshake=described(reader), clock_ahead_s=0.0)]))
    holder.ask(hashes, listens=True)

    (notice,) = holder.exchange.orders.notices
    assert notice.peer == (reader, 1)
    assert [msgspec.msgpack.decode(notice.packed, type=KvGrant)] == holder.on_the_bus()


def test_a_reader_that_is_not_connected_gets_no_notice(holder):
    holder.holding.hold(chain(2))
    holder.ask(chain(2), listens=True)

    assert holder.exchange.orders.notices == []
    assert len(holder.on_the_bus()) == 1


class ListeningEngine(Engine):
    """An engine with a socket, connected to ``HOLDER``, that measures how long its grants take."""

    def __init__(self):
        super().__init__()
        ways = GrantWays(reply_to="/run/kv-grants-me")
        holding = HolderSettings(worker_id=WorkerId("me"), epoch=Epoch(1))
        limits = FetchLimits()
        self.exchange = ExchangeCore(holding, full_attention(Shape().block_size), limits, lambda: self.now, ways)
        self.exchange.describe(described("me"))
        self.exchange.bind(SimpleNamespace(blocks=[]), SimpleNamespace(allocate=lambda _count: []))
        self.add_peer(described())

    def begin(self):
        order = MeasureRead(measure_id="m", worker_id=WorkerId("holder"), epoch=Epoch(1))
        self.exchange.handle(EngineCall(measures=[order]))

    def measure(self, *, notice_s=None, bus_s):
        """How long the holder's refusals take on both ways; returns the times that the worker is told."""
        self.begin()
        told = self.exchange.notifications()
        while told.leases:
            ((refusal, asked_at),) = [(refusal_of(ask), self.now) for ask in told.leases]
            ways = {bus_s: lambda one: self.exchange.handle(EngineCall(grants=[one]))}
            if notice_s is not None:
                ways[notice_s] = self.exchange.on_direct_grant
            for took_s in sorted(ways):
                self.now = asked_at + took_s
                ways[took_s](refusal)
            if notice_s is None:
                self.now += 2 * NOTICE_S_MAX
                self.exchange.on_time()
            told = self.exchange.notifications()
        (measured,) = told.measured
        return round(measured.notice_s, 6), round(measured.bus_s, 6)

    @property
    def listens_to_holder(self):
        return self.exchange._may_listen(HOLDER)


def refusal_of(ask, **fields):
    return KvGrant(**{"reader_id": "me", "worker_id": "holder", "epoch": 1, "ask_id": ask.ask_id, "number": 0} | fields)


@pytest.fixture
def listening():
    return ListeningEngine()


@pytest.mark.parametrize(
    ("notice_s", "bus_s", "chosen"), [(0.002, 0.004, True), (0.0039, 0.004, False), (0.005, 0.004, False)]
)
def test_notices_are_looked_for_where_they_come_before_the_bus(listening, notice_s, bus_s, chosen):
    assert listening.measure(notice_s=notice_s, bus_s=bus_s) == (notice_s, bus_s)
    assert listening.listens_to_holder is chosen
    listening.measure(notice_s=0.001, bus_s=0.004)
    assert listening.listens_to_holder  # The network has changed.


def test_where_no_notice_came_nothing_is_chosen(listening):
    """The holder may not be connected yet."""
    assert listening.measure(bus_s=0.004) == (0.0, 0.004)
    assert listening.listens_to_holder


def test_late_notices_while_engines_connect_choose_nothing(listening):
    """The holder sends none before it is connected."""
    listening.begin()
    for number in range(ASKS_MAX):
        (ask,) = listening.exchange.notifications().leases
        asked_at = listening.now
        listening.now = asked_at + 0.004
        listening.exchange.handle(EngineCall(grants=[refusal_of(ask)]))
        if number < PAIRS - 1:
            listening.now = asked_at + 0.005
            listening.exchange.on_direct_grant(refusal_of(ask))
        listening.now += 2 * NOTICE_S_MAX
        listening.exchange.on_time()

    (measured,) = listening.exchange.notifications().measured
    assert (measured.notice_s, round(measured.bus_s, 6)) == (0.0, 0.004)
    assert listening.listens_to_holder


def test_a_holder_on_this_machine_needs_no_notices(listening):
    listening.begin()
    (ask,) = listening.exchange.notifications().leases
    assert ask.listens
    listening.exchange.on_direct_grant(refusal_of(ask, number=-1))

    (measured,) = listening.exchange.notifications().measured
    assert (measured.notice_s, measured.bus_s) == (0.0, 0.0)
    assert not listening.listens_to_holder


def test_a_holder_that_answers_no_request_ends_the_measurement(listening):
    listening.begin()
    listening.now += TEST_S_MAX
    listening.exchange.on_time()

    assert [one.measure_id for one in listening.exchange.notifications().measured] == ["m"]
    assert not listening.exchange.works_without_request


def test_the_engine_looks_for_notices_while_it_waits_for_grants(listening):
    def ordered():
        listening.exchange.listen()
        said, listening.exchange.orders.listens = listening.exchange.orders.listens, None
        return said

    assert ordered() is None
    listening.begin()
    assert [ordered(), ordered()] == [True, None]
    assert not listening.exchange.is_idle
    listening.now += TEST_S_MAX
    listening.exchange.on_time()
    assert [ordered(), ordered()] == [False, None]


def test_an_engine_without_a_socket_does_not_listen(engine):
    engine.add_peer(described())

    assert not engine.exchange._may_listen(HOLDER)


def test_a_notice_ends_no_request_of_the_worker(engine):
    """The bus brings the same grant, and the worker must take it for this request's."""
    engine.exchange.on_direct_grant(KvGrant(reader_id="me", worker_id="holder", epoch=1, ask_id="ask", number=0))

    assert engine.exchange.notifications().answered == []
