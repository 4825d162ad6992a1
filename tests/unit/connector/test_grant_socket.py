"""Grants between engines of one machine: what is sent arrives, and what cannot be sent is known at once."""

from __future__ import annotations

import queue
import socket
import threading
from pathlib import Path

import msgspec
import pytest

from connector.scheduler.grant_socket import PREFIX, GrantSocket, new_socket_path
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import LEASE_BLOCKS_MAX, GroupBlocks, KvGrant
from tests.support.kv_messages import one_group

SOON_S = 10.0


def grant(**fields) -> KvGrant:
    known = {"reader_id": WorkerId("r"), "worker_id": WorkerId("h"), "epoch": Epoch(1), "ask_id": "ask"}
    return KvGrant(**known | fields)


@pytest.fixture
def arrived():
    return queue.Queue()


@pytest.fixture
def receiver(tmp_path, arrived):
    receiver = GrantSocket(new_socket_path(tmp_path), arrived.put)
    yield receiver
    receiver.close()


@pytest.fixture
def sender():
    sender = GrantSocket("", lambda _grant: None)
    yield sender
    sender.close()


def test_the_largest_grant_arrives_as_it_was_sent(sender, receiver, arrived):
    sent = grant(lease_id="ask", groups=one_group(range(LEASE_BLOCKS_MAX)), last_hash=b"h" * 32, until_s=7.5)

    assert sender.send(receiver.path, sent)
    assert arrived.get(timeout=SOON_S) == sent


def test_an_engine_that_is_gone_or_elsewhere_is_known_at_once(sender, receiver, tmp_path):
    receiver.close()

    assert not sender.send(receiver.path, grant())
    assert not sender.send(new_socket_path(tmp_path / "on another machine"), grant())
    assert not Path(receiver.path).exists()


def test_an_engine_that_is_behind_gets_nothing_more(sender, tmp_path):
    go_on = threading.Event()
    slow = GrantSocket(new_socket_path(tmp_path), lambda _grant: go_on.wait(SOON_S))
    try:
        assert any(not sender.send(slow.path, grant()) for _time in range(10_000))
    finally:
        go_on.set()
        slow.close()


def test_an_engine_that_fails_to_take_a_grant_gets_no_more(sender, tmp_path, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _args: None)

    def fail(_grant):
        raise RuntimeError

    broken = GrantSocket(new_socket_path(tmp_path), fail)
    assert sender.send(broken.path, grant())
    broken._thread.join(SOON_S)

    assert not sender.send(broken.path, grant())
    broken.close()


def test_only_sockets_for_grants_are_written_to(sender, tmp_path):
    """Another worker names the path."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(tmp_path / "syslog"))
        other.setblocking(False)

        assert not sender.send(str(tmp_path / "syslog"), grant())
        assert not sender.send(f"{PREFIX}relative", grant())
        assert not sender.send(f"/{PREFIX}\0", grant())
        assert not sender.send(f"/{'x' * 200}/{PREFIX}", grant())
        with pytest.raises(BlockingIOError):
            other.recv(1)


@pytest.mark.parametrize(
    "rubbish",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(grant(groups=[GroupBlocks(first=0, block_ids=b"odd")])),
        msgspec.msgpack.encode(["grant"]),
    ],
)
def test_rubbish_is_ignored(sender, receiver, arrived, rubbish):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(rubbish, receiver.path)

    assert sender.send(receiver.path, grant())
    assert arrived.get(timeout=SOON_S) == grant()
    assert arrived.empty()


def test_an_engine_that_cannot_receive_says_so_and_goes_on(tmp_path, caplog):
    deaf = GrantSocket(new_socket_path(tmp_path / ("x" * 200)), lambda _grant: None)

    assert deaf.path == ""
    assert "take the bus" in caplog.text
    deaf.close()
