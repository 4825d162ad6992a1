"""What every engine's end of the exchange does with calls and says of them, real or simulated."""

from __future__ import annotations

import msgspec
import pytest

from connector.holder.holder import HolderSettings
from connector.messages import Connected, EngineCall, Peer, PeerGone
from connector.reader.fetch import FetchLimits
from connector.scheduler.exchange_core import ExchangeCore
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_handshake import KvHandshake
from tests.support.kv_engines import RankMemory, Shape, handshake

HOLDER = ("holder", 1)


class End:
    def __init__(self):
        self.now = 5.0
        holding = HolderSettings(worker_id=WorkerId("me"), epoch=Epoch(1))
        self.exchange = ExchangeCore(holding, Shape().block_size, FetchLimits(), lambda: self.now)
        self.exchange.handshake = described("me")

    def is_told_of(self, peer: KvHandshake):
        self.exchange.handle(EngineCall(peers=[Peer(handshake=peer, clock_ahead_s=0.0)]))


@pytest.fixture
def end():
    return End()


def described(worker_id: str = "holder", **other) -> KvHandshake:
    shape = Shape()
    return msgspec.structs.replace(handshake([RankMemory(shape, 0).described()], shape, worker_id), **other)


def test_a_peer_that_is_told_of_is_to_be_connected(end):
    end.is_told_of(described())

    assert [peer.handshake.worker_id for peer in end.exchange.orders.connect] == ["holder"]
    assert end.exchange.connecting == {HOLDER}


def test_an_incompatible_peer_is_refused_with_a_reason(end):
    end.is_told_of(described(fingerprint="another model"))

    assert not end.exchange.orders
    (said,) = end.exchange.notifications().connected
    assert "fingerprint differs" in said.failure


def test_a_peer_lost_before_connecting_is_not_connected(end):
    end.is_told_of(described())
    end.exchange.handle(EngineCall(gone=[PeerGone(worker_id=WorkerId("holder"), epoch=Epoch(1))]))

    assert end.exchange.orders.connect == []
    assert end.exchange.orders.forget == [HOLDER]
    assert not end.exchange.connecting


@pytest.mark.parametrize("failure", ["", "refused"])
def test_the_end_of_a_connection_attempt_is_said_once(end, failure):
    end.is_told_of(described())
    assert not end.exchange.has_notifications

    end.exchange.on_connected([Connected(HOLDER, 0.2, failure)])

    assert end.exchange.has_notifications
    (said,) = end.exchange.notifications().connected
    assert (said.worker_id, said.seconds, said.failure) == ("holder", 0.2, failure)
    assert not end.exchange.has_notifications
    assert end.exchange.orders.forget == ([HOLDER] if failure else [])


def test_the_handshake_is_sent_on_demand_with_the_current_clock(end):
    end.now = 7.5

    assert end.exchange.notifications().handshake is None
    assert end.exchange.notifications(describe=True).handshake.clock_s == 7.5
