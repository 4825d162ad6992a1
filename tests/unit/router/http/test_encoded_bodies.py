"""Clients that compress their bodies, or begin them with a byte order mark."""

from __future__ import annotations

import gzip

import httpx
import pytest
import zstandard

from tests.unit.router.http.test_http_server import BODY, running
from tests.unit.router.world import CHAT, COMPLETIONS

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(("name", "encode"), [("gzip", gzip.compress), ("zstd", zstandard.compress)])
async def test_the_worker_gets_the_body_as_it_was_before(name, encode):
    async with running() as up, httpx.AsyncClient(base_url=up.url) as client:
        for _ in range(2):
            response = await client.post(COMPLETIONS, content=encode(BODY), headers={**JSON, "content-encoding": name})
            assert response.status_code == 200

        assert [start.body for start in up.worker.started] == [BODY, BODY]
        assert up.router.edge.upload_totals.bytes_held == 0


async def test_an_encoding_that_is_not_read_gets_415_that_names_it():
    async with running() as up, httpx.AsyncClient(base_url=up.url) as client:
        response = await client.post(CHAT, content=BODY, headers={**JSON, "content-encoding": "br"})

        assert response.status_code == 415
        assert "br" in response.json()["error"]["message"]
        assert "zstd" in response.headers["accept-encoding"]
        assert up.worker.started == []


async def test_a_small_body_cannot_become_a_large_one():
    async with running(body_bytes_max=100_000) as up, httpx.AsyncClient(base_url=up.url) as client:
        bomb = gzip.compress(b" " * 10_000_000)
        assert len(bomb) < 100_000

        response = await client.post(CHAT, content=bomb, headers={**JSON, "content-encoding": "gzip"})

        assert response.status_code == 413
        assert "decoded" in response.json()["error"]["message"]
        assert up.router.edge.upload_totals.bytes_held == 0


async def test_a_body_that_is_not_encoded_as_said_gets_400():
    async with running() as up, httpx.AsyncClient(base_url=up.url) as client:
        response = await client.post(CHAT, content=BODY, headers={**JSON, "content-encoding": "gzip"})

        assert response.status_code == 400
        assert "gzip" in response.json()["error"]["message"]


async def test_a_byte_order_mark_is_skipped():
    async with running() as up, httpx.AsyncClient(base_url=up.url) as client:
        response = await client.post(COMPLETIONS, content=b"\xef\xbb\xbf" + BODY, headers=JSON)

        assert response.status_code == 200
        assert [start.body for start in up.worker.started] == [BODY]
        assert up.router.edge.upload_totals.bytes_held == 0
