"""What is published goes to the socket at once, or together with what is held back beside it. Reading pauses while much
arrives.
"""

from __future__ import annotations

import asyncio

import pytest

from shared.bus.nats_client import CONNECTED, READS_AT_ONCE_MAX, DirectClient
from tests.support.virtual_time import in_virtual_time

PAUSE_S = 0.005


class Socket(asyncio.Transport):
    """Keeps each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.pauses = 0
        self.is_paused = False

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data) -> None:
        self.writes.append(data)

    def pause_reading(self) -> None:
        self.pauses += 1
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


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


@in_virtual_time
async def test_reading_pauses_while_many_messages_come_and_not_for_few():
    client, socket = DirectClient(PAUSE_S), Socket()
    client._socket = socket
    for _ in range(10 * READS_AT_ONCE_MAX):
        client._heard()
        await asyncio.sleep(0.9 * PAUSE_S)  # A pause would join two of these.
    assert socket.pauses == 0

    for _ in range(READS_AT_ONCE_MAX + 1):
        await asyncio.sleep(0.1 * PAUSE_S)
        client._heard()
    for _ in range(5):
        assert socket.is_paused
        await asyncio.sleep(1.1 * PAUSE_S)
        assert not socket.is_paused
        client._heard()
    assert socket.pauses == 6

    await asyncio.sleep(1.9 * PAUSE_S)
    client._heard()
    assert not socket.is_paused


async def test_a_pong_for_a_flush_that_has_given_up_is_taken(client):
    given_up, waiting = (asyncio.get_running_loop().create_future() for _ in range(2))
    given_up.cancel()
    client._pongs = [given_up, waiting]

    await client._process_pong()
    assert not waiting.done()
    await client._process_pong()

    assert waiting.result() is True
