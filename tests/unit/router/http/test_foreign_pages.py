"""Pages of other sites cannot use a router that asks for no key; other clients need no new header."""

from __future__ import annotations

import httpx
import pytest

from tests.unit.router.http.test_edge_limits import BEARER, KEYS
from tests.unit.router.http.test_http_server import BODY, Running, running
from tests.unit.router.world import CHAT, COMPLETIONS

JSON = "content-type: application/json"
REBOUND = ("host: rebound.example:8000",)
"""The page's own name resolves to this machine: for the browser, the request stays on the page's site."""
CROSS_SITE = ("host: 127.0.0.1:8000", "origin: https://elsewhere.example", "sec-fetch-site: cross-site")
OTHER_PORT = ("host: localhost:8000", "origin: http://localhost:3000", "sec-fetch-site: same-site")
SANDBOXED = ("host: 127.0.0.1:8000", "origin: null")
WITHOUT_ORIGIN = (
    "host: 127.0.0.1:8000",
    "sec-fetch-site: cross-site",
    "sec-fetch-mode: no-cors",
    "sec-fetch-dest: script",
)
FOREIGN = [REBOUND, CROSS_SITE, OTHER_PORT, SANDBOXED, WITHOUT_ORIGIN]
OWN = [
    (),
    ("host: 127.0.0.1:8000",),
    ("host: [::1]:8000",),
    ("host: 192.0.2.7:8000",),
    ("host: LOCALHOST:8000",),
    ("host: router:8000",),
    ("host: host.docker.internal:8000",),
    ("host: localhost:8000", "origin: http://localhost:8000", "sec-fetch-site: same-origin"),
    ("host: localhost:8000", "sec-fetch-site: none"),
]


async def answer(up: Running, method: str, path: str, *headers: str, body: bytes = b"") -> httpx.Response:
    lines = dict(line.split(": ", 1) for line in headers)
    async with httpx.AsyncClient(base_url=up.url) as client:
        return await client.request(method, path, headers=lines, content=body)


async def status(up: Running, method: str, path: str, *headers: str, body: bytes = b"") -> int:
    lines = [f"{method} {path} HTTP/1.1", f"content-length: {len(body)}", "connection: close", *headers, "", ""]
    return int((await up.raw("\r\n".join(lines).encode() + body)).split()[1])


@pytest.mark.parametrize("headers", FOREIGN)
async def test_a_page_of_another_site_cannot_use_a_router_without_keys(headers: tuple[str, ...]):
    async with running() as up:
        for path in (COMPLETIONS, CHAT, "/v1/embeddings"):
            assert await status(up, "POST", path, *headers, JSON, body=BODY) == 403
        for path in ("/v1/models", "/v1/decisions", "/baton/decisions/latest", "/metrics", "/openapi.json"):
            assert await status(up, "GET", path, *headers) == 403
        assert await status(up, "GET", "/health", *headers) == 200
        assert up.worker.started == []


@pytest.mark.parametrize("headers", OWN)
async def test_other_clients_and_the_own_page_are_served(headers: tuple[str, ...]):
    async with running() as up:
        assert await status(up, "POST", COMPLETIONS, *headers, JSON, body=BODY) == 200
        assert await status(up, "GET", "/v1/models", *headers) == 200


async def test_a_link_of_another_site_may_lead_here():
    async with running() as up:
        link = (
            "host: localhost:8000",
            "sec-fetch-site: cross-site",
            "sec-fetch-mode: navigate",
            "sec-fetch-dest: document",
        )

        assert await status(up, "GET", "/v1/models", *link) == 200
        assert await status(up, "POST", COMPLETIONS, *link, JSON, body=BODY) == 403


async def test_the_operator_can_name_a_proxy_and_other_sites():
    async with running(allowed_hosts="ai.example, app.example:3000") as up:
        proxied = ("host: ai.example", "origin: https://ai.example", "sec-fetch-site: same-origin")
        app = ("host: 127.0.0.1:8000", "origin: https://app.example:3000", "sec-fetch-site: cross-site")
        other = ("host: 127.0.0.1:8000", "origin: https://app.example:4000", "sec-fetch-site: cross-site")

        assert await status(up, "POST", COMPLETIONS, *proxied, JSON, body=BODY) == 200
        assert await status(up, "POST", COMPLETIONS, *app, JSON, body=BODY) == 200
        assert await status(up, "POST", COMPLETIONS, *other, JSON, body=BODY) == 403


WRONG = b'{"model": "m", "prompt": "x", "cache_hit_threshold": 7}'
PAGE = "https://app.example:3000"
PREFLIGHT = (
    "host: 127.0.0.1:8000",
    f"origin: {PAGE}",
    "access-control-request-method: POST",
    "access-control-request-headers: authorization,content-type,x-baton-mode",
)


@pytest.mark.parametrize("keys", ["", KEYS])
async def test_a_named_page_may_send_requests_and_read_the_responses(keys: str):
    async with running(allowed_hosts="app.example:3000", keys=keys) as up:
        for path in (CHAT, COMPLETIONS, "/v1/models"):
            asked = await answer(up, "OPTIONS", path, *PREFLIGHT)
            assert asked.status_code == 204
            assert asked.headers["access-control-allow-origin"] == PAGE
            assert asked.headers["access-control-allow-headers"] == "authorization,content-type,x-baton-mode"
            assert "POST" in asked.headers["access-control-allow-methods"]

        key = (BEARER,) if keys else ()
        for method, path, body, status_code in (
            ("POST", COMPLETIONS, BODY, 200),
            ("POST", COMPLETIONS, WRONG, 400),
            ("GET", "/v1/models", b"", 200),
            ("GET", "/nothing", b"", 404),
        ):
            read = await answer(up, method, path, f"origin: {PAGE}", JSON, *key, body=body)
            assert read.status_code == status_code
            assert read.headers["access-control-allow-origin"] == PAGE
            assert read.headers["vary"] == "origin"
        if keys:
            unknown = await answer(up, "POST", COMPLETIONS, f"origin: {PAGE}", JSON, body=BODY)
            assert (unknown.status_code, unknown.headers["access-control-allow-origin"]) == (401, PAGE)


@pytest.mark.parametrize("keys", ["", KEYS])
async def test_a_page_that_is_not_named_may_read_nothing(keys: str):
    async with running(allowed_hosts="app.example:3000", keys=keys) as up:
        other = tuple(line.replace("app.example:3000", "app.example:3001") for line in PREFLIGHT)

        refused = await answer(up, "OPTIONS", CHAT, *other)
        read = await answer(up, "POST", COMPLETIONS, "origin: https://app.example:3001", JSON, BEARER, body=BODY)

        assert refused.status_code == (401 if keys else 403)
        assert not [name for one in (refused, read) for name in one.headers if name.startswith("access-control")]


async def test_a_preflight_cannot_inject_headers():
    async with running(allowed_hosts="app.example:3000") as up:
        asked = [line for line in PREFLIGHT if "request-headers" not in line]

        got = await answer(up, "OPTIONS", CHAT, *asked, "access-control-request-headers: a\tb: c")

        assert got.status_code == 204
        assert "access-control-allow-headers" not in got.headers


async def test_where_a_key_is_needed_the_key_decides():
    async with running(keys=KEYS) as up:
        for headers in FOREIGN:
            assert await status(up, "POST", COMPLETIONS, *headers, JSON, BEARER, body=BODY) == 200
            assert await status(up, "POST", COMPLETIONS, *headers, JSON, body=BODY) == 401


async def test_a_reachable_router_without_keys_answers_to_any_name():
    async with running(published_host="0.0.0.0", insecure=True) as up:
        assert await status(up, "POST", COMPLETIONS, *REBOUND, JSON, body=BODY) == 200
        assert await status(up, "POST", COMPLETIONS, *CROSS_SITE, JSON, body=BODY) == 403


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/json",
        "json",
        "+json",
        "application/+json",
        "application/x, text/plain+json",
        "application/text/plain +json",
        "application/json, text/plain",
        "application/json\xa0",
        "\x85application/json",
    ],
)
async def test_a_body_of_a_form_gets_415_that_says_what_to_send(kind: str):
    async with running() as up:
        response = await up.raw(
            f"POST {CHAT} HTTP/1.1\r\ncontent-type: {kind}\r\nconnection: close\r\n"
            f"content-length: {len(BODY)}\r\n\r\n".encode("latin-1", "replace")
            + BODY
        )

        assert response.startswith(b"HTTP/1.1 415 ")
        assert b"Content-Type: application/json" in response
        assert up.worker.started == []


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "Application/JSON; charset=utf-8",
        "application/merge-patch+json",
        "application/problem+json;x=y",
    ],
)
async def test_json_is_served_and_reaches_the_engine_as_json(kind: str):
    async with running() as up:
        assert await status(up, "POST", COMPLETIONS, f"content-type: {kind}", body=BODY) == 200
        assert [start.content_type for start in up.worker.started] == ["application/json"]
