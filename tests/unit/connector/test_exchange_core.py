"""How an engine, real or simulated, handles exchange calls and which notifications it sends."""

from __future__ import annotations

import msgspec
import pytest

from connector.holder.holder import HolderSettings
from connector.messages import Connected, EngineCall, Peer, PeerGone
from connector.reader.fetch import FetchLimits
from connector.scheduler.exchange_core import ExchangeCore
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import KvHandshake
from tests.support.kv_engines import RankMemory, Shape, handshake

HOLDER = ("holder", 1)


class Engine:
    def __init__(self):
        self.now = 5.0
        holding = HolderSettings(worker_id=WorkerId("me"), epoch=Epoch(1))
        self.exchange = ExchangeCore(holding, Shape().block_size, FetchLimits(), lambda: self.now)
        self.exchange.handshake = described("me")

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
