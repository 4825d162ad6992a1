"""What is published goes to the socket at once, or together with what is held back beside it."""

from __future__ import annotations

import asyncio

import pytest

from shared.bus.nats_client import CONNECTED, DirectClient


class Socket(asyncio.Transport):
    """Keeps each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data) -> None:
        self.writes.append(data)


@pytest.fixture
def client() -> DirectClient:
    client = DirectClient()
    client._status, client._socket = CONNECTED, Socket()
    return client


async def test_two_messages_that_were_held_back_are_one_write(client):
    client.hold()
    assert client.publish_now("a.b", b"one", "", None)
    assert client.publish_now("a.c", b"two", "r", {"h": "v"})
    assert client._socket.writes == []
    client.release()

    assert client._socket.writes == [b"PUB a.b  3\r\none\r\nHPUB a.c r 18 21\r\nNATS/1.0\r\nh: v\r\n\r\ntwo\r\n"]


async def test_nothing_is_held_back_after_a_release(client):
    client.hold()
    client.release()
    client.publish_now("a.b", b"one", "", None)

    assert client._socket.writes == [b"PUB a.b  3\r\none\r\n"]
