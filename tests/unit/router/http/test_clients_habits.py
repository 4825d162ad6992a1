"""What standard clients and probes ask of an HTTP server besides inference."""

from __future__ import annotations

from email.utils import parsedate_to_datetime

import httpx
import pytest

from tests.unit.router.http.test_http_server import running
from tests.unit.router.world import CHAT, COMPLETIONS, prompt

MESSAGES = "/v1/messages"
MESSAGE = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/ping", "/healthcheck", "/v1/models", "/metrics"])
async def test_head_gets_what_get_gets_without_a_body(path: str):
    async with running() as up, httpx.AsyncClient(base_url=up.url) as client:
        got, head = await client.get(path), await client.head(path)

        assert (got.status_code, head.status_code) == (200, 200)
        assert (bool(got.content), head.content) == (True, b"")
        assert head.headers["content-type"] == got.headers["content-type"]


async def test_empty_parts_of_a_path_do_not_count():
    async with running() as up, httpx.AsyncClient(base_url=up.url) as client:
        for path in ("/v1/models", "/v1/models/", "//v1/models", "/v1//models"):
            assert (await client.get(up.url + path)).json()["object"] == "list"
        for path in ("//v1/completions", "/v1//completions", "/v1/completions/"):
            assert (await client.post(up.url + path, json=prompt())).status_code == 200


async def test_one_model_is_found_by_its_name():
    async with running() as up, httpx.AsyncClient(base_url=up.url) as client:
        listed = (await client.get("/v1/models")).json()["data"]

        assert (await client.get(f"/v1/models/{listed[0]['id']}")).json() == listed[0]
        missing = await client.get("/v1/models/organisation/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        assert "organisation/other" in missing.json()["error"]["message"]


async def test_version_names_the_router_and_its_engines():
    async with running() as up, httpx.AsyncClient(base_url=up.url) as client:
        versions = (await client.get("/version")).json()

        assert set(versions) == {"version", "engines"}
        assert versions["engines"]


async def test_a_probe_may_post_to_ping():
    async with running() as up, httpx.AsyncClient(base_url=up.url) as client:
        assert (await client.post("/ping")).status_code == 200


async def test_every_response_has_a_date():
    async with running() as up, httpx.AsyncClient(base_url=up.url) as client:
        for response in (
            await client.post(COMPLETIONS, json=prompt()),
            await client.post(COMPLETIONS, json=prompt(stream=True)),
            await client.post(COMPLETIONS, json=prompt(cache_hit_threshold=7)),
            await client.get("/v1/models"),
            await client.get("/nothing"),
        ):
            assert parsedate_to_datetime(response.headers["date"]).tzname() == "UTC"


async def test_streams_tell_proxies_to_pass_each_event_on_at_once():
    async with running() as up, httpx.AsyncClient(base_url=up.url) as client:
        stream = await client.post(COMPLETIONS, json=prompt(stream=True))
        whole = await client.post(COMPLETIONS, json=prompt())

        assert (stream.headers["cache-control"], stream.headers["x-accel-buffering"]) == ("no-cache", "no")
        assert "cache-control" not in whole.headers


async def test_anthropics_clients_get_the_id_of_their_request():
    async with running() as up, httpx.AsyncClient(base_url=up.url) as client:
        message = await client.post(MESSAGES, json=MESSAGE)
        chat = await client.post(CHAT, json=MESSAGE)

        assert message.headers["request-id"] == message.headers["x-request-id"]
        assert "request-id" not in chat.headers


@pytest.mark.parametrize(
    ("method", "path"), [("GET", MESSAGES), ("POST", "/v1/messages/batches"), ("GET", "/v1/messages/x")]
)
async def test_errors_below_messages_have_anthropics_form(method: str, path: str):
    async with running() as up, httpx.AsyncClient(base_url=up.url) as client:
        body = (await client.request(method, path)).json()

        assert (body["type"], body["error"]["type"] != "") == ("error", True)


async def test_no_page_loads_scripts_from_another_host():
    async with running() as up, httpx.AsyncClient(base_url=up.url) as client:
        assert [(await client.get(path)).status_code for path in ("/docs", "/redoc")] == [404, 404]
