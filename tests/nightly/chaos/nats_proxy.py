"""A proxy between one process and NATS that loses, delays or refuses whole messages, is slow, or falls silent."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

from shared.addresses import host_port

READ_BYTES_MAX = 256 * 1024
UNSENT_CHUNKS_MAX = 1024
"""Beyond this the line reads no further: the sender feels it."""
CARRIERS = (b"PUB ", b"HPUB ", b"MSG ", b"HMSG ")
"""Operations that are followed by as many bytes as their last word says."""
LOST = frozenset({b"leg", b"frames", b"kv", b"worker", b"router", b"fleet", b"request", b"service"})
"""What may be lost on core NATS. JetStream's own traffic is not: it travels on TCP, and would be sent again."""
END = b"\r\n"


class Trouble:
    """What is wrong with a line now; nothing, as it begins."""

    def __init__(self, seed: str = "") -> None:
        self.lost_share = 0.0
        self.delay_s = 0.0
        self.is_cut = False
        self.bytes_per_s = 0.0
        """Of each connection, in each direction; 0: as fast as can be."""
        self.is_silent = False
        """New connections are half open from the beginning."""
        self.lost = 0
        """Messages, so far."""
        self._chance = random.Random(seed)

    def loses(self, operation: bytes) -> bool:
        """Whether this message is lost."""
        if not self.lost_share or operation.split(b" ", 2)[1].split(b".", 1)[0] not in LOST:
            return False
        is_lost = self._chance.random() < self.lost_share
        self.lost += is_lost
        return is_lost


class Stream:
    """Cuts one direction's bytes into whole operations and leaves out what is lost."""

    def __init__(self, trouble: Trouble) -> None:
        self._trouble = trouble
        self._rest = bytearray()

    def passed(self, data: bytes) -> bytes:
        """What goes on of everything that is whole by now."""
        rest = self._rest
        rest += data
        kept: list[bytes] = []
        start = 0
        while (line_end := rest.find(END, start)) >= 0:
            operation = bytes(rest[start:line_end])
            end = line_end + len(END)
            if operation.startswith(CARRIERS):
                end += int(operation.rsplit(b" ", 1)[1]) + len(END)
                if end > len(rest):
                    break
                if self._trouble.loses(operation):
                    start = end
                    continue
            kept.append(bytes(rest[start:end]))
            start = end
        del rest[:start]
        return b"".join(kept)


class Line:
    """``async with Line(addresses) as line``: processes connect to ``line.url``, and reach the first of the servers that
    takes connections, in an order of the line's own. ``line.trouble`` may change at any time.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], seed: str = "") -> None:
        self.trouble = Trouble(seed)
        self._addresses = random.Random(seed).sample(addresses, len(addresses))
        self._host = addresses[0][0]
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._half_open: set[asyncio.Task[None]] = set()
        """Those of ``_connections`` that carry nothing any more."""

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"nats://{host_port(self._host, self._server.sockets[0].getsockname()[1])}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, self._host, 0)
        return self

    async def __aexit__(self, *_failure: object) -> None:
        assert self._server is not None
        self._server.close()
        await self.cut()

    async def cut(self) -> None:
        """Close all connections now."""
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def vanish(self) -> None:
        """All connections are half open now, for ever: neither side learns whether the other still is."""
        self._half_open |= self._connections

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if self.trouble.is_silent:
                while await reader.read(READ_BYTES_MAX):
                    pass
            elif not self.trouble.is_cut:
                await self._join(task, reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # asyncio would log it; it is what lines are for
        finally:
            self._connections.discard(task)
            self._half_open.discard(task)
            writer.transport.abort()

    async def _join(self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nats_reader, nats_writer = await self._reach()
        try:
            ways = (self._carry(task, reader, nats_writer), self._carry(task, nats_reader, writer))
            pumps = [asyncio.ensure_future(way) for way in ways]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                if task in self._half_open:
                    await asyncio.wait(pumps)  # NATS believes in a connection whose process has given it up.
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            nats_writer.transport.abort()

    async def _reach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        for address in self._addresses[:-1]:
            with suppress(OSError):
                return await asyncio.open_connection(*address)
        return await asyncio.open_connection(*self._addresses[-1])

    async def _carry(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One direction, in order: what is delayed delays what follows it."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(UNSENT_CHUNKS_MAX)
        delivering = asyncio.ensure_future(self._deliver(task, under_way, writer))
        stream, clock = Stream(self.trouble), asyncio.get_running_loop().time
        try:
            while data := await reader.read(READ_BYTES_MAX):
                if task in self._half_open:
                    continue
                if delivering.done():
                    return
                if passed := stream.passed(data):
                    await under_way.put((clock() + self.trouble.delay_s, passed))
        finally:
            delivering.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await delivering

    async def _deliver(
        self, task: asyncio.Task[None], under_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            at, data = await under_way.get()
            if (early_s := at - clock()) > 0:
                await asyncio.sleep(early_s)
            if task in self._half_open:
                continue
            writer.write(data)
            await writer.drain()
            if self.trouble.bytes_per_s:
                await asyncio.sleep(len(data) / self.trouble.bytes_per_s)
