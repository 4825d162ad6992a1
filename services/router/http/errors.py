"""Error responses of the router itself, in OpenAI's format."""

from __future__ import annotations

import math

import msgspec

from services.router.placement.request_fields import Fault
from shared.contracts.failures import HTTP_STATUS, Reason

JSON = b"application/json"
EVENT_STREAM = "text/event-stream"
RETRY_AFTER_S_MAX = 86_400.0
NO_SNIFFING = (b"x-content-type-options", b"nosniff")
"""Keeps browsers from rendering a response as a page, whatever the model has generated."""

ERROR_TYPES = {400: "invalid_request_error", 404: "NotFoundError", 413: "invalid_request_error"}
CODES = {Reason.MODEL_UNKNOWN: "model_not_found", Reason.TOO_LARGE: "request_too_large"}


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | int | None


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
    more: tuple[tuple[bytes, bytes], ...] = ()
    """Further headers."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        """All headers but Content-Length."""
        headers = [(b"content-type", JSON), NO_SNIFFING]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_s))))
        return [*headers, *self.more]


def error_body(
    status: int, message: str, *, code: str | int | None = None, param: str | None = None, kind: str = ""
) -> bytes:
    """The JSON body of an error."""
    kind = kind or ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode(ErrorResponse(ErrorBody(message, kind, param, code if code is not None else status)))


def failed(reason: Reason, message: str, retry_after_s: float | None = None, *, closes: bool = False) -> HttpError:
    """The response for a failure that is part of the contract."""
    status = HTTP_STATUS[reason]
    param = "model" if reason is Reason.MODEL_UNKNOWN else None
    body = error_body(status, message, code=CODES.get(reason, str(reason)), param=param)
    if retry_after_s is not None and not 0.0 <= retry_after_s <= RETRY_AFTER_S_MAX:
        retry_after_s = None  # It comes from a worker, and is no time that a client would wait.
    if status == 503 and retry_after_s is None:
        retry_after_s = 1.0
    return HttpError(status, body, retry_after_s, str(reason), closes)


def bad_request(message: str, param: str | None = None) -> HttpError:
    """400, for errors that the router finds before a worker could."""
    return HttpError(400, error_body(400, message, param=param), None, "bad_request")


def refused_field(fault: Fault) -> HttpError:
    """A field of Baton's own that is invalid or asks for more than is allowed."""
    if fault.reason is None:
        return bad_request(fault.message, fault.param or None)
    status = HTTP_STATUS[fault.reason]
    body = error_body(status, fault.message, code=str(fault.reason), param=fault.param)
    return HttpError(status, body, None, str(fault.reason))


def error_event(reason: Reason, message: str) -> bytes:
    """The last event of a stream that failed after it had begun."""
    return b"data: " + error_body(HTTP_STATUS[reason], message, code=str(reason)) + b"\n\n"
