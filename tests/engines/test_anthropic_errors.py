"""The router's errors become the exceptions of Anthropic's SDK that a program waits for."""

from __future__ import annotations

import pytest

from tests.unit.router.auth.test_api_keys import ACME, KEYS, LIMITED, OPERATOR
from tests.unit.router.http.test_http_server import running

pytestmark = pytest.mark.vllm

LARGE = 3000
BAD_MODE = {"extra_headers": {"x-baton-mode": "x"}}
CASES = {
    "AuthenticationError": ("nobody's", {}, "authentication_error"),
    "PermissionDeniedError": (OPERATOR, {}, "permission_error"),
    "NotFoundError": (ACME, {"model": "nobody"}, "not_found_error"),
    "BadRequestError": (ACME, BAD_MODE, "invalid_request_error"),
    "RequestTooLargeError": (ACME, {"system": "x" * LARGE}, "request_too_large"),
    "RateLimitError": (LIMITED, BAD_MODE, "rate_limit_error"),
}


@pytest.mark.parametrize("kind", CASES)
async def test_the_sdk_raises_the_exception_of_its_own_api(kind: str):
    import anthropic  # Two seconds in each of xdist's processes.

    key, fields, told = CASES[kind]
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}], "stream": True, **fields}
    async with (
        running(keys=KEYS, body_bytes_max=LARGE) as up,
        anthropic.AsyncAnthropic(api_key=key, base_url=up.url, max_retries=0) as client,
    ):
        for _ in range(2 if key == LIMITED else 0):
            with pytest.raises(anthropic.BadRequestError):
                await client.messages.create(**body)

        with pytest.raises(getattr(anthropic, kind)) as raised:
            await client.messages.create(**body)

    error = raised.value
    assert (error.type, error.request_id) == (told, error.response.headers["x-request-id"])
    assert error.body["request_id"] == error.request_id
    assert ("retry-after" in error.response.headers) == (kind == "RateLimitError")
