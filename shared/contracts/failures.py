"""Failures that are part of the contract: a reason the receiver can act on, and words for a person."""

from __future__ import annotations

from enum import StrEnum

from shared.contracts.message import Message


class Reason(StrEnum):
    """Why a leg or an ask did not end well. Each one has one HTTP answer (see ``HTTP_STATUS``)."""

    MODEL_UNKNOWN = "model_unknown"
    """No worker has ever offered this model: 404."""
    NO_WORKER = "no_worker"
    """The model is known but nobody fit is ready: 503 with Retry-After."""
    WORKER_DRAINING = "worker_draining"
    """The worker takes no new legs: place again."""
    WORKER_BUSY = "worker_busy"
    """The worker holds as many legs as it may: place again or 503."""
    OVERLOADED = "overloaded"
    """The wait is predicted to be longer than anybody would want: 503 with Retry-After."""
    OVER_SHARE = "over_share"
    """This tenant waits with more than its share: 429 with Retry-After."""
    FORBIDDEN = "forbidden"
    """The client may not ask for this: 403."""
    CACHE_MISSED = "cache_missed"
    """Too little of the prompt was where it was believed to be: place again."""
    WORKER_LOST = "worker_lost"
    """The worker fell silent or its epoch ended: place again if no byte has left."""
    ENGINE_DEAD = "engine_dead"
    """The engine died while the leg ran."""
    FRAMES_LOST = "frames_lost"
    """A frame of the leg is missing or its message could not be read."""
    CANNOT_RESUME = "cannot_resume"
    """The stream broke off, and another worker cannot go on with it: what it needs to know was lost with the first."""
    DEADLINE = "deadline"
    """The hop's or the request's deadline passed."""
    TOO_LARGE = "too_large"
    """The body is beyond the limit: 413."""
    BUS_DOWN = "bus_down"
    """NATS cannot be reached: 503."""
    CLIENT_SLOW = "client_slow"
    """The client reads too slowly; its buffer is full."""
    CANCELLED = "cancelled"
    """The other side asked to stop."""
    BAD_MESSAGE = "bad_message"
    """The receiver could not read the message."""
    INTERNAL = "internal"
    """A bug: logged where it happened, 500."""


HTTP_STATUS: dict[Reason, int] = {
    Reason.MODEL_UNKNOWN: 404,
    Reason.NO_WORKER: 503,
    Reason.WORKER_DRAINING: 503,
    Reason.WORKER_BUSY: 503,
    Reason.CACHE_MISSED: 503,
    Reason.OVERLOADED: 503,
    Reason.OVER_SHARE: 429,
    Reason.FORBIDDEN: 403,
    Reason.WORKER_LOST: 502,
    Reason.ENGINE_DEAD: 502,
    Reason.FRAMES_LOST: 502,
    Reason.CANNOT_RESUME: 502,
    Reason.DEADLINE: 504,
    Reason.TOO_LARGE: 413,
    Reason.BUS_DOWN: 503,
    Reason.CLIENT_SLOW: 499,
    Reason.CANCELLED: 499,
    Reason.BAD_MESSAGE: 500,
    Reason.INTERNAL: 500,
}


class Failure(Message, frozen=True, kw_only=True):
    """Why something did not end well, in a form that a program and a person can read."""

    reason: Reason
    message: str
    retry_after_s: float | None = None
