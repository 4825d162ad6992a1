"""Reads the body of a request to an endpoint that takes small bodies only, such as an operator's order."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

BODY_BYTES_MAX = 16 * 1024
BODY_S_MAX = 10.0


class BodyRefused(Exception):
    """The body is too large or too slow; the message is for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def small_body(request: Request) -> bytes:
    """The whole body, up to ``BODY_BYTES_MAX`` and within ``BODY_S_MAX``. Raises BodyRefused."""
    body = b""
    try:
        async with asyncio.timeout(BODY_S_MAX):
            async for piece in request.stream():
                body += piece
                if len(body) > BODY_BYTES_MAX:
                    raise BodyRefused(413, f"An order has at most {BODY_BYTES_MAX} bytes.")
    except (TimeoutError, ClientDisconnect):  # Who has left does not read the refusal.
        raise BodyRefused(408, "The order did not arrive in time.") from None
    return body
