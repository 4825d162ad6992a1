"""Error responses of the router itself, in OpenAI's format."""

from __future__ import annotations

import msgspec

from services.router.placement.request_fields import MESSAGES, Fault
from shared.contracts.failures import HTTP_STATUS, Reason
from shared.http.errors import HttpError, error_body

EVENT_STREAM = "text/event-stream"
RETRY_AFTER_S_MAX = 86_400.0
OVERLOADED = 503
CODES = {Reason.MODEL_UNKNOWN: "model_not_found", Reason.TOO_LARGE: "request_too_large"}


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
    message = f"No engine{of_model} serves {path}: vLLM's endpoints depend on what a model can do."
    return HttpError(404, error_body(404, message, code="path_not_served"), None, "path_not_served")


def refused_field(fault: Fault) -> HttpError:
    """A field of Baton's own that is invalid or asks for more than is allowed."""
    if fault.reason is None:
        return bad_request(fault.message, fault.param or None)
    status = HTTP_STATUS[fault.reason]
    body = error_body(status, fault.message, code=str(fault.reason), param=fault.param)
    return HttpError(status, body, None, str(fault.reason))


def error_event(path: str, reason: Reason, message: str) -> bytes:
    """The last event of a stream that failed after it had begun. Clients of messages ignore events without a name."""
    status = HTTP_STATUS[reason]
    if path != MESSAGES:
        return b"data: " + error_body(status, message, code=str(reason)) + b"\n\n"
    kind = "overloaded_error" if status == OVERLOADED else "api_error"
    error = {"type": "error", "error": {"type": kind, "message": message, "code": str(reason)}}
    return b"event: error\ndata: " + msgspec.json.encode(error) + b"\n\n"
