"""Faults of a connection that need a real server."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from services.worker.lifecycle.registration import Registration
from shared.bus.jetstream import BucketStream
from shared.bus.nats_bus import SEND_S_MAX, UNSENT_BYTES_MAX, NatsBus, connect_nats
from shared.bus.port import AskTimedOut, BusDown
from shared.contracts.channels import KV_EVENTS, LEADERSHIP, TOKENS, WORKER_RECORDS, bucket_of
from shared.contracts.control import AskTokens, ProbePrompt
from tests.integration.bus.worlds import until
from tests.support.builders import kv_batch
from tests.support.fleet_builders import record
from tests.support.nats_server import NatsServer, free_port

pytestmark = pytest.mark.nats

NOTICED_S_MAX = 60.0
OUTAGE_S = 3.5
"""Long enough for entries to expire and for every retry to come twice."""


async def test_a_server_that_went_silent_is_noticed_within_seconds_and_found_again(nats_server):
    bus = await connect_nats(nats_server.url, name="test")
    got = []
    await bus.subscribe(KV_EVENTS, lambda batch, _: got.append(batch.seq))

    nats_server.pause()
    await until(lambda: not bus.connected, NOTICED_S_MAX)
    with pytest.raises(BusDown):
        await bus.publish(KV_EVENTS, kv_batch(1))
    nats_server.resume()
    await until(lambda: bus.connected and bus.counts.reconnects, NOTICED_S_MAX)

    await bus.publish(KV_EVENTS, kv_batch(2))
    await until(lambda: got)
    assert got == [2]
    await bus.close()


async def test_no_server_is_an_error_within_the_deadline_that_hides_the_password():
    began = time.monotonic()

    with pytest.raises(BusDown, match=r"no NATS at nats://127.0.0.1:\d+ within 0.5 s"):
        await connect_nats(f"nats://user:secret@127.0.0.1:{free_port()}", name="test", connect_s_max=0.5)
    assert time.monotonic() - began < NOTICED_S_MAX


async def test_a_server_that_starts_later_is_waited_for(tmp_path):
    server = NatsServer(tmp_path)
    connecting = asyncio.ensure_future(connect_nats(server.url, name="test"))
    await asyncio.sleep(0)
    try:
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(NOTICED_S_MAX):
            bus = await connecting
        assert bus.connected
        await bus.close()
    finally:
        server.kill()


@pytest.mark.slow
async def test_an_outage_is_one_line_of_a_processs_log(tmp_path, caplog):
    workers = [f"w{number}" for number in range(5)]
    with NatsServer(tmp_path) as server:
        bus = await connect_nats(server.url, name="test")
        await bus.make_bucket(WORKER_RECORDS, ttl_s=1.0)
        records = await bus.key_value_store(WORKER_RECORDS)
        following = [asyncio.create_task(Registration(bus, record(each)).follow()) for each in workers]
        present = {}

        async def watch() -> None:
            async for change in records.watch():
                if change is not None:
                    present[change.key] = change.value

        following.append(asyncio.create_task(watch()))
        await until(lambda: len(present) == len(workers), NOTICED_S_MAX)
        with caplog.at_level(logging.INFO, "baton"):
            server.kill()
            await asyncio.sleep(OUTAGE_S)
            said = list(caplog.messages)
        await asyncio.to_thread(server.start)
        await until(lambda: bus.connected and len(present) == len(workers), NOTICED_S_MAX)
        for task in following:
            task.cancel()
        await bus.close()

    assert said == ["the connection to NATS was lost"]


async def test_an_attempt_to_reconnect_to_what_never_answers_is_given_up(tmp_path):
    attempts: list[asyncio.StreamWriter] = []

    async def say_nothing(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        attempts.append(writer)

    with NatsServer(tmp_path) as server:
        bus = await connect_nats(server.url, name="test")
        server.kill()
        silent = await asyncio.start_server(say_nothing, "127.0.0.1", server.port)
        await until(lambda: len(attempts) > 1, NOTICED_S_MAX)
        silent.close()
        for writer in attempts:
            writer.transport.abort()
        await asyncio.to_thread(server.start)

        await until(lambda: bus.connected, NOTICED_S_MAX)
        await bus.close()


async def test_a_restart_with_a_smaller_limit_changes_how_messages_are_cut(tmp_path):
    with NatsServer(tmp_path) as server:
        bus = await connect_nats(server.url, name="test")
        got = []
        await bus.subscribe(KV_EVENTS, lambda batch, _: got.append(len(batch.events[0].hashes)))
        server.kill()
        server.set_max_payload(65536)
        server.start()
        await until(lambda: bus.counts.reconnects, NOTICED_S_MAX)

        await bus.publish(KV_EVENTS, kv_batch(1, *range(50_000)))

        await until(lambda: got)
        assert (bus.max_payload, got) == (65536, [400_000])
        await bus.close()


async def test_a_server_that_does_not_read_delays_neither_asks_nor_close(nats_server):
    bus = await connect_nats(nats_server.url, name="test")
    prompt = ProbePrompt(path="/v1/completions", body=bytes(2 * UNSENT_BYTES_MAX))
    nats_server.pause()
    try:
        began = time.monotonic()
        with pytest.raises(AskTimedOut):
            await bus.ask(TOKENS, AskTokens(worker_id="w1", prompts=[prompt]), timeout_s=0.2)
        asked = time.monotonic()
        await bus.close()
        closed = time.monotonic()
    finally:
        nats_server.resume()

    assert asked - began < SEND_S_MAX
    assert closed - asked < SEND_S_MAX


class Overtaken:
    """A connection. Before it makes a stream, somebody else makes it with other settings."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus

    async def request(self, subject, payload, headers, timeout_s):
        if "STREAM.CREATE" in subject:
            await self._bus.make_bucket(LEADERSHIP, ttl_s=60.0)
        return await self._bus.request(subject, payload, headers, timeout_s)


async def test_of_two_that_make_a_bucket_at_once_the_later_one_decides_on_its_settings(tmp_path):
    with NatsServer(tmp_path) as server:
        bus = await connect_nats(server.url, name="test")
        stream = BucketStream(Overtaken(bus), bucket_of(LEADERSHIP))

        await stream.make(5.0)

        assert (await stream.present()).ttl_s == 5.0
        await bus.close()
