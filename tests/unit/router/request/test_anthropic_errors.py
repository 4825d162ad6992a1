"""The router's errors for clients of Anthropic's API have that API's format; those of all others keep OpenAI's."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.unit.router.auth.test_api_keys import ACME, KEYS, LIMITED, OPERATOR, bearer
from tests.unit.router.http.test_http_server import running
from tests.unit.router.world import CHAT

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
BODY: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
NAME = "q-17"


def error_of(response: httpx.Response, request_id: str | None = NAME) -> tuple[int, str, str | int]:
    """Status, type and code of an error that has Anthropic's format."""
    body = response.json()
    assert (set(body), body["type"], body["request_id"]) == ({"type", "error", "request_id"}, "error", request_id)
    assert response.headers.get("request-id") == request_id
    assert set(body["error"]) == {"type", "message", "code"}
    assert body["error"]["message"]
    return response.status_code, body["error"]["type"], body["error"]["code"]


@pytest.mark.parametrize("path", [MESSAGES, COUNT_TOKENS])
@pytest.mark.parametrize(
    ("request_of", "expected"),
    [
        ({"headers": {}}, (401, "authentication_error", "invalid_api_key")),
        ({"headers": bearer(OPERATOR)}, (403, "permission_error", "forbidden")),
        ({"json": {**BODY, "model": "nobody"}}, (404, "not_found_error", "model_not_found")),
        ({"content": b"x" * 3000}, (413, "request_too_large", "request_too_large")),
        ({"headers": {**bearer(ACME), "x-baton-mode": "x"}}, (400, "invalid_request_error", 400)),
        ({"content": b"x", "headers": {**bearer(ACME), "content-type": "text/plain"}}, (415, "invalid_request_error", 415)),
    ],
    ids=lambda value: str(value)[-50:],
)  # fmt: skip
async def test_an_error_has_the_type_of_its_status(path: str, request_of: dict[str, Any], expected: tuple[Any, ...]):
    async with running(keys=KEYS, body_bytes_max=2000) as up, httpx.AsyncClient(base_url=up.url) as client:
        given = {"headers": bearer(ACME), **request_of}
        if "content" not in given:
            given.setdefault("json", BODY)
        given["headers"] = {**given["headers"], "x-request-id": NAME}

        assert error_of(await client.post(path, **given)) == expected
        assert up.worker.started == []


@pytest.mark.parametrize("path", [MESSAGES, COUNT_TOKENS])
async def test_a_rate_limit_and_a_full_router_say_when_to_try_again(path: str):
    named = {"x-request-id": NAME}
    async with running(keys=KEYS) as up, httpx.AsyncClient(base_url=up.url) as client:
        for _ in range(3):
            limited = await client.post(path, json=BODY, headers={**bearer(LIMITED), **named})
    async with running(requests_at_once_max=0) as up, httpx.AsyncClient(base_url=up.url) as client:
        full = await client.post(path, json=BODY, headers=named)

    assert error_of(limited) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert error_of(full) == (503, "overloaded_error", "worker_busy")
    assert all(int(response.headers["retry-after"]) >= 1 for response in (limited, full))


async def test_requests_that_are_not_served_directly_get_the_same_format():
    async with running(keys=KEYS) as up, httpx.AsyncClient(base_url=up.url) as client:
        no_key = await client.get(MESSAGES)
        wrong_method = await client.get(MESSAGES, headers=bearer(ACME))
        wrong_spelling = await client.post("/v1/mess%61ges", json=BODY, headers=bearer(ACME))

        assert error_of(no_key, None)[:2] == (401, "authentication_error")
        assert error_of(wrong_method, None)[:2] == (405, "invalid_request_error")
        assert "POST" in wrong_method.headers["allow"]
        assert error_of(wrong_spelling, None)[:2] == (400, "invalid_request_error")


async def test_a_body_that_does_not_match_its_headers_gets_the_same_format():
    async with running() as up:
        head = f"POST {MESSAGES} HTTP/1.1\r\nhost: x\r\nx-request-id: {NAME}\r\ntransfer-encoding: chunked\r\n\r\n"
        _head, _, body = (await up.raw(head.encode() + b"no length\r\n")).partition(b"\r\n\r\n")

        told = json.loads(body)
        assert (told["error"]["type"], told["request_id"]) == ("invalid_request_error", NAME)


async def test_a_chats_errors_keep_openais_format():
    async with running(keys=KEYS) as up, httpx.AsyncClient(base_url=up.url) as client:
        response = await client.post(CHAT, json=BODY)

        assert set(response.json()) == {"error"}
        assert "request-id" not in response.headers
