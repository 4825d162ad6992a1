"""A line to NATS passes whole messages on, in order, and loses only what it is told to lose."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.nightly.chaos.nats_proxy import Line, Stream, Trouble

FROM_NATS = [
    b'INFO {"max_payload":1}\r\n',
    b"MSG leg.w1.start 7 5\r\nhello\r\n",
    b"PING\r\n",
    b"HMSG frames.r1 8 INBOX.1 12 17\r\nNATS/1.0\r\n\r\nhello\r\n",
    b"MSG $KV.workers.w1 9 $JS.ACK.1 2\r\n\r\n\r\n",
    b"MSG kv.w1.events 3 0\r\n\r\n",
]
TO_NATS = [b"SUB leg.w1.start 7\r\n", b"PUB frames.r1 2\r\nhi\r\n", b"HPUB worker.w1.load 4 6\r\n\r\n\r\nhi\r\n"]


@given(operations=st.lists(st.sampled_from(FROM_NATS + TO_NATS)), cuts=st.lists(st.integers(0, 400)))
def test_all_bytes_pass_in_order_however_they_are_cut(operations, cuts):
    data = b"".join(operations)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    stream = Stream(Trouble())

    passed = [stream.passed(data[start:end]) for start, end in itertools.pairwise(edges)]

    assert b"".join(passed) == data


@pytest.mark.parametrize("operations", [FROM_NATS, TO_NATS])
def test_what_is_lost_is_lost_whole_and_jetstream_is_spared(operations):
    trouble = Trouble()
    trouble.lost_share = 1.0
    spared = (b"INFO", b"PING", b"SUB", b"MSG $")

    passed = Stream(trouble).passed(b"".join(operations))

    assert passed == b"".join(one for one in operations if one.startswith(spared))
    assert trouble.lost == sum(not one.startswith(spared) for one in operations)


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
PING, PONG = b"PING\r\n", b"PONG\r\n"
SOON_S_MAX = 20.0


@asynccontextmanager
async def lined() -> AsyncIterator[tuple[Line, asyncio.Queue[Ends]]]:
    """A line to a server that does nothing: its ends of the connections are in the queue."""
    accepted: asyncio.Queue[Ends] = asyncio.Queue()
    writers: list[asyncio.StreamWriter] = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        accepted.put_nowait((reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server, asyncio.timeout(SOON_S_MAX), Line([server.sockets[0].getsockname()]) as line:
        yield line, accepted
        for writer in writers:  # The server waits for its connections, and half open ones do not end (Python 3.12).
            writer.transport.abort()


async def connected(line: Line) -> Ends:
    where = urlsplit(line.url)
    return await asyncio.open_connection(where.hostname, where.port)


async def test_a_half_open_connection_carries_nothing_and_tells_neither_side():
    async with lined() as (line, accepted):
        _reader, writer = await connected(line)
        nats_reader, _nats_writer = await accepted.get()
        reader, _writer = await connected(line)
        _nats_reader, nats_writer = await accepted.get()
        writer.write(PING)
        assert await nats_reader.readexactly(len(PING)) == PING

        line.vanish()
        writer.write(PING)
        nats_writer.write(PONG)
        fresh_reader, fresh_writer = await connected(line)
        fresh_writer.write(PING)
        assert await (await accepted.get())[0].readexactly(len(PING)) == PING  # Later than what was lost.
        writer.close()
        nats_writer.close()

        still_open = [asyncio.ensure_future(one.read(1)) for one in (nats_reader, reader, fresh_reader)]
        assert not (await asyncio.wait(still_open, timeout=0.1))[0]
        for one in still_open:
            one.cancel()


async def test_a_silent_line_takes_connections_and_does_not_reach_the_server():
    async with lined() as (line, accepted):
        line.trouble.is_silent = True
        reader, _writer = await connected(line)

        assert not (await asyncio.wait([asyncio.ensure_future(reader.read(1))], timeout=0.1))[0]
        assert accepted.empty()


async def test_a_shaped_line_lets_so_many_bytes_pass_in_a_second():
    async with lined() as (line, accepted):
        line.trouble.bytes_per_s = 1000 * len(PING)
        _reader, writer = await connected(line)
        clock, count = asyncio.get_running_loop().time, 300
        began = clock()
        for _ in range(count):
            writer.write(PING)
            await writer.drain()
            await asyncio.sleep(0)
        nats_reader, nats_writer = await accepted.get()
        await nats_reader.readexactly(count * len(PING))
        writer.write(PING)
        await nats_reader.readexactly(len(PING))
        nats_writer.close()

        assert clock() - began >= 0.9 * count / 1000
