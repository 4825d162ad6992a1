"""A cluster of three nats-servers: URLs with several of them, replicated buckets, and the loss of one server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.launcher.doctor.bus import read_info
from shared.bus.jetstream import REPLICAS_MAX, BucketStream
from shared.bus.nats_bus import NatsBus, connect_nats
from shared.bus.port import BusError
from shared.contracts.channels import WORKER_RECORDS, bucket_of
from tests.integration.bus.worlds import until
from tests.support.fleet_builders import record
from tests.support.nats_server import NatsServer, free_port

pytestmark = [pytest.mark.nats, pytest.mark.slow]

FORMED_S_MAX = 60.0
AGAIN_S = 0.2


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[NatsServer]]:
    ports = [free_port() for _ in range(3)]
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
    servers = []
    for number, port in enumerate(ports):
        folder = tmp_path / f"n{number}"
        folder.mkdir()
        of_cluster = f'server_name: n{number}\ncluster {{ name: c, listen: "127.0.0.1:{port}", routes: [{routes}] }}'
        servers.append(NatsServer(folder, extra_config=of_cluster))
    try:
        for server in servers:
            server.start()
        yield servers
    finally:
        for server in servers:
            server.kill()


async def replicas(bus: NatsBus) -> int:
    return (await BucketStream(bus, bucket_of(WORKER_RECORDS))._info({})).config["num_replicas"]


async def retried(work):
    """What ``work`` returns once the servers have elected leaders."""
    async with asyncio.timeout(FORMED_S_MAX):
        while True:
            try:
                if (done := await work()) is not None:
                    return done
            except BusError:
                pass
            await asyncio.sleep(AGAIN_S)


async def test_a_server_of_a_cluster_may_be_lost_with_a_part_of_every_bucket(cluster):
    url = ",".join(server.url for server in cluster)
    bus = await connect_nats(url, name="test")

    async def made() -> int | None:
        await bus.make_bucket(WORKER_RECORDS, ttl_s=60.0)
        return True if await replicas(bus) == REPLICAS_MAX else None

    await retried(made)
    records = await bus.key_value_store(WORKER_RECORDS)
    await records.put(record("w1"))

    lost = next(server for server in cluster if server.port == bus._nc.connected_url.port)
    lost.kill()
    await until(lambda: bus.connected and bus.counts.reconnects, FORMED_S_MAX)

    found = await retried(lambda: records.get("w1"))
    assert found.value == record("w1")
    assert await retried(lambda: records.put(record("w1"))) > found.revision
    assert await read_info(f"{lost.url},{url}", FORMED_S_MAX)
    await bus.close()


async def test_a_bucket_of_a_single_server_has_one_replica_and_keeps_its_values(nats_server):
    bus = await connect_nats(nats_server.url, name="test")
    await bus.make_bucket(WORKER_RECORDS, ttl_s=60.0)
    records = await bus.key_value_store(WORKER_RECORDS)
    await records.put(record("w1"))
    await bus.make_bucket(WORKER_RECORDS, ttl_s=60.0)

    assert await replicas(bus) == 1
    assert await records.get("w1") is not None
    await bus.close()
