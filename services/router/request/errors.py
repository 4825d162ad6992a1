"""Error responses of the router itself: in OpenAI's format, and for messages in Anthropic's."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
from fastapi import Response

from services.router.request.facts import Fault
from shared.contracts.engine_paths import MESSAGES, RESPONSES
from shared.contracts.failures import HTTP_STATUS, Reason
from shared.http.errors import ErrorBody, ErrorResponse, HttpError, error_body

EVENT_STREAM: Final = "text/event-stream"
EVENT_END: Final = b"\n\n"
RETRY_AFTER_S_MAX: Final = 86_400.0
ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's error types by status. Anthropic itself sends 529 when overloaded; its clients retry on 503, too."""
SEQUENCE_NUMBER: Final = re.compile(rb'"sequence_number":\s?(\d{1,15})[,}]')
PING: Final = b": waiting\n\n"
MESSAGES_PING: Final = b'event: ping\ndata: {"type": "ping"}\n\n'
QUOTED_BYTES_MAX: Final = 500
"""Maximum length of the quotation from an error body that has another form."""
BUG: Final = "Internal error in the router; its log has details."
CODES: Final = {Reason.MODEL_UNKNOWN: "model_not_found", Reason.TOO_LARGE: "request_too_large"}


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


def path_not_served(path: str, model: str) -> HttpError:
    """404, for an endpoint that no engine of the model has."""
    of_model = f" of the model `{model}`" if model else ""
    message = f"No engine{of_model} serves {path}: endpoints depend on what the model and its engine can do."
    return HttpError(404, error_body(404, message, code="path_not_served"), None, "path_not_served")


def refused_field(fault: Fault) -> HttpError:
    """A field of Baton's own that is invalid or asks for more than is allowed."""
    if fault.reason is None:
        return bad_request(fault.message, fault.param or None)
    status = HTTP_STATUS[fault.reason]
    body = error_body(status, fault.message, code=str(fault.reason), param=fault.param)
    return HttpError(status, body, None, str(fault.reason))


def error_for(path: str, error: HttpError, request_id: str | None = None) -> HttpError:
    """The error in the format that clients of ``path`` read."""
    if not is_anthropic(path):
        return error
    detail = msgspec.json.decode(error.body, type=ErrorResponse).error
    body = {**_anthropic_error(error.status, detail.message, detail.code), "request_id": request_id}
    more = error.more if request_id is None else (*error.more, (b"request-id", request_id.encode()))
    return msgspec.structs.replace(error, body=msgspec.json.encode(body), more=more)


def is_anthropic(path: str) -> bool:
    """Whether clients of this path expect Anthropic's form."""
    return path == MESSAGES or path.startswith(MESSAGES + "/")


def error_response(error: HttpError) -> Response:
    """The error, as FastAPI sends it."""
    headers = {name.decode(): value.decode("latin-1") for name, value in error.headers()}
    return Response(error.body, error.status, headers)


def error_event(path: str, reason: Reason, message: str, response_id: str = "", newest: bytes = b"") -> bytes:
    """The last event of a stream that failed after it had begun. Clients of messages ignore events without a name, and
    those of responses need a response that failed, with the id of the first event; its number follows that of
    ``newest``, the last data that was sent.
    """
    return _last_event(path, HTTP_STATUS[reason], ErrorBody(message, code=str(reason)), response_id, newest)


def late_response(path: str, status: int, body: bytes) -> bytes:
    """A whole response as the last event of a stream whose head was sent before the response was known."""
    if status < 400:
        return b"data: " + body.replace(b"\n", b"\ndata: ") + b"\n\n"
    try:
        told = msgspec.json.decode(body, type=ErrorResponse).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        told = ErrorBody(body[:QUOTED_BYTES_MAX].decode(errors="replace"), code=status)
    return _last_event(path, status, told, "", b"")


def _last_event(path: str, status: int, told: ErrorBody, response_id: str, newest: bytes) -> bytes:
    if path == RESPONSES:
        numbers = SEQUENCE_NUMBER.findall(newest)
        error = {"code": str(told.code), "message": told.message}
        response = {"id": response_id, "object": "response", "status": "failed", "error": error, "output": []}
        event = {
            "type": "response.failed",
            "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
            "response": response,
        }
        return b"event: response.failed\ndata: " + msgspec.json.encode(event) + b"\n\n"
    if path != MESSAGES:
        body = error_body(status, told.message, code=told.code, param=told.param, kind=told.type)
        return b"data: " + body + b"\n\n"
    error = _anthropic_error(status, told.message, told.code)
    return b"event: error\ndata: " + msgspec.json.encode(error) + b"\n\n"


def _anthropic_error(status: int, message: str, code: str | int | None) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": code}}
