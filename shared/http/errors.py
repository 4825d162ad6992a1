"""Error responses of Baton's own HTTP servers, in OpenAI's format."""

from __future__ import annotations

import math

import msgspec

Header = tuple[bytes, bytes]

JSON = b"application/json"
NO_SNIFFING = (b"x-content-type-options", b"nosniff")
"""Keeps browsers from rendering a response as a page, whatever the model has generated."""
ERROR_TYPES = {400: "invalid_request_error", 404: "NotFoundError", 413: "invalid_request_error"}


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error object; what Anthropic's has of it can be read as one."""

    message: str
    type: str = ""
    param: str | None = None
    code: str | int | None = None


class ErrorResponse(msgspec.Struct, frozen=True):
    """The body of an error response."""

    error: ErrorBody


class HttpError(msgspec.Struct, frozen=True):
    """An error response: status, body and when to try again."""

    status: int
    body: bytes
    retry_after_s: float | None = None
    reason: str = ""
    closes: bool = False
    """Close the connection too, because the rest of the body is not read."""
    more: tuple[Header, ...] = ()

    def headers(self) -> list[Header]:
        """All headers but Content-Length."""
        headers = [(b"content-type", JSON), NO_SNIFFING]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_s))))
        return [*headers, *self.more]


def error_body(
    status: int, message: str, *, code: str | int | None = None, param: str | None = None, kind: str = ""
) -> bytes:
    kind = kind or ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode(ErrorResponse(ErrorBody(message, kind, param, code if code is not None else status)))
