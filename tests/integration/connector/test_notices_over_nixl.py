"""Notices between processes over real NIXL: they arrive, and nobody who does not take them holds up the sender."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest

from connector.transfer.agent import TransferFailed, TransferState
from tests.support.kv_engines import RankMemory, Shape
from tests.support.kv_holders import start_holder

pytestmark = pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")

SOON_S = 10.0
LARGEST = 1 << 15
FLOOD = 1000
SENDING_S_MAX = 5.0
"""For ``FLOOD`` messages, on a busy machine. Each takes some microseconds."""


class Agent:
    def __init__(self, number: int) -> None:
        from connector.transfer.nixl_agent import NixlAgent

        self.nixl = NixlAgent(f"notices-{os.getpid()}-{number}-{time.monotonic_ns()}")
        self.memory = RankMemory(Shape(), 0)
        self.nixl.register(self.memory.regions())

    def connect(self, metadata: bytes, there: int) -> str:
        """As engines do, with a read of what lies ``there``."""
        connecting, ends = self.nixl.connect(metadata), time.monotonic() + SOON_S
        while (name := connecting.name()) is None:
            assert time.monotonic() < ends
            time.sleep(0.01)
        here = self.memory.regions()[0].base
        spans = [np.array([[base, 8, 0]], dtype=np.uint64) for base in (there, here)]
        probe = self.nixl.read(name, *spans, device="cpu", remote_device="cpu")
        while self.nixl.state(probe) is TransferState.RUNNING:
            assert time.monotonic() < ends
            time.sleep(0.001)
        assert self.nixl.state(probe) is TransferState.DONE
        self.nixl.release(probe)
        return name

    def connect_to(self, other: Agent) -> str:
        return self.connect(other.nixl.metadata(), other.memory.regions()[0].base)

    def wait_for(self, count: int) -> list[bytes]:
        came, ends = [], time.monotonic() + SOON_S
        while len(came) < count:
            assert time.monotonic() < ends, len(came)
            came += self.nixl.notices()
            time.sleep(0.001)
        return came


@pytest.fixture
def agents(monkeypatch) -> Iterator[tuple[Agent, Agent]]:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    both = Agent(1), Agent(2)
    yield both
    for one in both:
        one.nixl.close()


def test_notices_of_all_sizes_arrive_unchanged_and_in_order(agents):
    sender, receiver = agents
    name = sender.connect_to(receiver)
    sent = [bytes([number]) * size for number, size in enumerate((1, 600, 9000, LARGEST))]
    for message in sent:
        sender.nixl.notify(name, message)

    assert receiver.wait_for(len(sent)) == sent
    assert receiver.nixl.notices() == []


def test_a_peer_that_is_not_connected_gets_none(agents):
    sender, receiver = agents
    name = sender.connect_to(receiver)
    sender.nixl.forget(name)

    with pytest.raises(TransferFailed, match="not connected"):
        sender.nixl.notify(name, b"a grant")


@pytest.mark.parametrize("end", ["frozen", "dead"])
def test_a_peer_that_takes_none_holds_nobody_up(agents, end):
    sender, receiver = agents
    holder = start_holder(Shape())
    try:
        rank = holder.handshake.ranks[0]
        name = sender.connect(rank.agent, rank.layers[0].base)
        other = sender.connect_to(receiver)
        if end == "frozen":
            holder.freeze()
        else:
            holder.kill()
        began_at = time.monotonic()
        for _ in range(FLOOD):
            try:
                sender.nixl.notify(name, bytes(4096))
            except TransferFailed:
                assert end == "dead"
                break
        sender.nixl.notify(other, b"for another one")
        sender.nixl.forget(name)
        assert time.monotonic() - began_at < SENDING_S_MAX
        assert receiver.wait_for(1) == [b"for another one"]
    finally:
        if end == "frozen":
            holder.go_on()
        holder.close()
