"""The router's errors become the exceptions of Anthropic's SDK that a program waits for."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.unit.router.auth.test_api_keys import ACME, KEYS, LIMITED, OPERATOR
from tests.unit.router.http.test_http_server import running

pytestmark = pytest.mark.vllm

LARGE = 3000
BAD_MODE = {"extra_headers": {"x-baton-mode": "x"}}
CASES = {
    anthropic.AuthenticationError: ("nobody's", {}, "authentication_error"),
    anthropic.PermissionDeniedError: (OPERATOR, {}, "permission_error"),
    anthropic.NotFoundError: (ACME, {"model": "nobody"}, "not_found_error"),
    anthropic.BadRequestError: (ACME, BAD_MODE, "invalid_request_error"),
    anthropic.RequestTooLargeError: (ACME, {"system": "x" * LARGE}, "request_too_large"),
    anthropic.RateLimitError: (LIMITED, BAD_MODE, "rate_limit_error"),
}


@pytest.mark.parametrize(("kind", "case"), CASES.items(), ids=[kind.__name__ for kind in CASES])
async def test_the_sdk_raises_the_exception_of_its_own_api(kind: type[Any], case: tuple[str, dict[str, Any], str]):
    key, fields, told = case
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}], "stream": True, **fields}
    async with (
        running(keys=KEYS, body_bytes_max=LARGE) as up,
        anthropic.AsyncAnthropic(api_key=key, base_url=up.url, max_retries=0) as client,
    ):
        for _ in range(2 if key == LIMITED else 0):
            with pytest.raises(anthropic.BadRequestError):
                await client.messages.create(**body)

        with pytest.raises(kind) as raised:
            await client.messages.create(**body)

    error = raised.value
    assert (error.type, error.request_id) == (told, error.response.headers["x-request-id"])
    assert error.body["request_id"] == error.request_id
    assert ("retry-after" in error.response.headers) == (kind is anthropic.RateLimitError)
