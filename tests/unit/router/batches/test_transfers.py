"""Uploads and downloads of files: one tenant's, however slow or many, leave others theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from services.router.http.transfers import AT_ONCE_MAX, BYTES_PER_S_MIN, GRACE_S, RESERVED, TENANT_AT_ONCE_MAX
from shared.contracts.api_keys import digest_of
from tests.support.virtual_time import LoopClock
from tests.unit.router.batches.batch_world import KEY, KEYS, Client, Engine, jsonl, line, with_engine
from tests.unit.router.world import World

HEAD = (
    b'--B\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--B\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
)
END = b"\r\n--B--\r\n"
FORM = {"content-type": "multipart/form-data; boundary=B"}
TENANTS = [f"t{n}" for n in range(AT_ONCE_MAX // TENANT_AT_ONCE_MAX)]
CROWD = f'salt = "{"s" * 32}"\n' + "".join(KEY.format(one, digest_of(one)) for one in [*TENANTS, "other"])


async def slow(interval_s: float, piece: bytes = b"x", count: int = 100_000) -> AsyncIterator[bytes]:
    yield HEAD
    for _ in range(count):
        await asyncio.sleep(interval_s)
        yield piece
    yield END


def begin(client: Client, content: AsyncIterator[bytes]) -> asyncio.Task[httpx.Response]:
    return asyncio.ensure_future(client.call("POST", "/files", content=content, headers=FORM))


async def refusal_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@with_engine(keys=KEYS)
async def test_slow_uploads_of_one_tenant_leave_others_theirs(world: World, engine: Engine, client: Client):
    waiting = [begin(client, slow(5.0)) for _ in range(TENANT_AT_ONCE_MAX)]
    await asyncio.sleep(1)
    more = await client.send(b"x")
    assert await refusal_of(more) == (429, "too_many_uploads")
    assert "retry-after" in more.headers
    await Client(world.router, "o").upload(jsonl(line(0)))
    await client.get("/files")
    ended = await asyncio.gather(*waiting)
    assert {await refusal_of(one) for one in ended} == {(408, "upload_slow")}
    await client.upload(b"x")
    assert len(world.hub.buckets["file_parts"].values) == 2


@pytest.mark.parametrize("interval_s", [1.0, 20.0])
@with_engine(keys=KEYS)
async def test_an_upload_that_never_ends_is_ended(world: World, engine: Engine, client: Client, interval_s: float):
    begun = LoopClock().now()
    response = await begin(client, slow(interval_s))
    assert await refusal_of(response) == (408, "upload_slow")
    assert LoopClock().now() - begun <= GRACE_S + 20.0
    assert not world.hub.buckets["file_parts"].values


@with_engine(keys=KEYS)
async def test_an_upload_at_the_least_rate_is_kept(world: World, engine: Engine, client: Client):
    piece = b"x" * BYTES_PER_S_MIN
    response = await begin(client, slow(1.0, piece, 60))
    assert (response.status_code, response.json()["bytes"]) == (200, 60 * BYTES_PER_S_MIN)


@with_engine(keys=CROWD)
async def test_a_tenant_without_an_upload_may_begin_one_when_many_tenants_have_all_others(
    world: World, engine: Engine, client: Client
):
    clients = [Client(world.router, tenant) for tenant in TENANTS]
    waiting = [begin(one, slow(5.0)) for one in clients for _ in range(TENANT_AT_ONCE_MAX)]
    await asyncio.sleep(1)
    refused = [one.result() for one in waiting if one.done()]
    assert len(refused) == RESERVED - 2  # The last two tenants have one each.
    assert {await refusal_of(one) for one in refused} == {(503, "too_many_uploads")}
    await Client(world.router, "other").upload(b"x")
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@with_engine(keys=KEYS, files_bytes_max=100_000)
async def test_uploads_at_once_hold_no_more_bytes_than_the_tenant_may_have(
    world: World, engine: Engine, client: Client
):
    waiting = [begin(client, slow(1.0, b"x" * 20_000, 5)) for _ in range(10)]
    most = 0
    while not all(one.done() for one in waiting):
        await asyncio.sleep(0.5)
        parts = world.hub.buckets["file_parts"].values.values()
        most = max(most, sum(len(part.payload) for part in parts))
    assert most <= 150_000  # The last part of each, and what encoding adds.
    statuses = [one.result().status_code for one in waiting]
    assert set(statuses) <= {200, 413}
    assert sum(file["bytes"] for file in (await client.get("/files"))["data"]) <= 100_000


async def download(world: World, key: str, file_id: str, interval_s: float) -> tuple[int, int]:
    """Read a file piece by piece: the status, and how many bytes came."""
    status, received = 0, 0

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, received
        status = message.get("status", status)
        received += len(message.get("body", b""))
        if message["type"] == "http.response.body":
            await asyncio.sleep(interval_s)

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "GET",
        "scheme": "http", "path": f"/v1/files/{file_id}/content", "raw_path": b"", "root_path": "",
        "query_string": b"", "headers": [(b"host", b"127.0.0.1"), (b"x-api-key", key.encode())],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
    }  # fmt: skip
    await world.router.edge(scope, receive, send)
    return status, received


@with_engine(keys=KEYS)
async def test_slow_downloads_end_and_leave_others_theirs(world: World, engine: Engine, client: Client):
    size = 900_000
    file_id = (await client.upload(b"x" * size))["id"]
    other = Client(world.router, "o")
    others = (await other.upload(b"x" * size))["id"]
    begun = LoopClock().now()
    reading = [asyncio.ensure_future(download(world, "a", file_id, 20.0)) for _ in range(TENANT_AT_ONCE_MAX)]
    await asyncio.sleep(1)
    assert (await download(world, "a", file_id, 0.0))[0] == 429
    assert await download(world, "o", others, 0.1) == (200, size)
    ended = await asyncio.gather(*reading)
    assert all(status == 200 and received < size for status, received in ended)
    assert LoopClock().now() - begun < 3 * GRACE_S
    assert await download(world, "a", file_id, 0.1) == (200, size)
