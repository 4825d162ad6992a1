"""The page of a process that waits for NATS answers only where NATS does not respond at once."""

from __future__ import annotations

import asyncio
import socket

import pytest

from shared.runtime.waiting import PAGE_AFTER_S, Waits, waiting_page

REQUEST = b"GET / HTTP/1.1\r\n\r\n"


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"from its own server")
    writer.close()


async def test_a_connection_to_a_process_that_starts_waits_for_its_server():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with waiting_page(listener, Waits(asyncio.get_running_loop().time)):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(REQUEST)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), PAGE_AFTER_S / 8)
        server = await asyncio.start_server(serve, sock=listener.dup())

        assert await reader.read() == b"from its own server"
        writer.close()
        server.close()


async def test_a_process_that_waits_for_longer_says_for_what():
    waits, never = Waits(asyncio.get_running_loop().time), asyncio.Event()
    waiting = asyncio.create_task(waits.until("NATS", never.wait))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with waiting_page(listener, waits):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(REQUEST)
            said = await asyncio.wait_for(reader.read(), 10 * PAGE_AFTER_S)
            writer.close()
    never.set()
    await waiting

    assert said.startswith(b"HTTP/1.1 503 ")
    assert b"it waits for NATS" in said
