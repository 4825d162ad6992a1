"""Failures that are part of the contract: a reason for programs and a message for people."""

from __future__ import annotations

from enum import StrEnum

from shared.contracts.message import Message


class Reason(StrEnum):
    """Why a leg or an ask failed. Each reason has one HTTP status (see ``HTTP_STATUS``)."""

    MODEL_UNKNOWN = "model_unknown"
    """No worker has ever offered this model: 404."""
    NO_WORKER = "no_worker"
    """The model is known but no suitable worker is ready: 503 with Retry-After."""
    MODEL_ASLEEP = "model_asleep"
    """The model's workers sleep, and it is not woken, or not soon enough: 503 with Retry-After."""
    WORKER_DRAINING = "worker_draining"
    """The worker takes no new legs: place again."""
    WORKER_BUSY = "worker_busy"
    """The worker holds as many legs as it may: place again or 503."""
    OVERLOADED = "overloaded"
    """The predicted wait exceeds the limit: 503 with Retry-After."""
    OVER_SHARE = "over_share"
    """This tenant has more than its share of the queue: 429 with Retry-After."""
    FORBIDDEN = "forbidden"
    """The client may not ask for this: 403."""
    CACHE_MISSED = "cache_missed"
    """Less of the prompt was cached than expected: place again."""
    BELOW_THRESHOLD = "below_threshold"
    """Less of the prompt is cached than the client's ``cache_hit_threshold`` wants, on a path whose answers cannot say
    so: 412.
    """
    WORKER_LOST = "worker_lost"
    """The worker is silent or its epoch ended: place again if no byte was sent to the client."""
    ENGINE_DEAD = "engine_dead"
    """The engine died while the leg ran."""
    SERVER_LOST = "server_lost"
    """The server outside of Baton that the worker is attached to does not answer, or broke off."""
    QUARANTINED = "quarantined"
    """An engine died while it computed the same request a moment ago: 422, so that clients do not retry."""
    FRAMES_LOST = "frames_lost"
    """A frame of the leg is missing or its message could not be read."""
    CANNOT_RESUME = "cannot_resume"
    """The stream broke off and cannot be migrated: state that the next worker needs was lost with the first."""
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
    ROUTER_STOPPING = "router_stopping"
    """The router stops, and the time for answers to end by themselves is over: 503."""
    INTERNAL = "internal"
    """A bug: logged where it happened, 500."""


HTTP_STATUS: dict[Reason, int] = {
    Reason.MODEL_UNKNOWN: 404,
    Reason.NO_WORKER: 503,
    Reason.MODEL_ASLEEP: 503,
    Reason.WORKER_DRAINING: 503,
    Reason.WORKER_BUSY: 503,
    Reason.CACHE_MISSED: 503,
    Reason.BELOW_THRESHOLD: 412,
    Reason.OVERLOADED: 503,
    Reason.OVER_SHARE: 429,
    Reason.FORBIDDEN: 403,
    Reason.WORKER_LOST: 502,
    Reason.ENGINE_DEAD: 502,
    Reason.SERVER_LOST: 502,
    Reason.QUARANTINED: 422,
    Reason.FRAMES_LOST: 502,
    Reason.CANNOT_RESUME: 502,
    Reason.DEADLINE: 504,
    Reason.TOO_LARGE: 413,
    Reason.BUS_DOWN: 503,
    Reason.CLIENT_SLOW: 499,
    Reason.CANCELLED: 499,
    Reason.BAD_MESSAGE: 500,
    Reason.ROUTER_STOPPING: 503,
    Reason.INTERNAL: 500,
}


class Failure(Message, frozen=True, kw_only=True):
    """A failure for programs (``reason``) and people (``message``)."""

    reason: Reason
    message: str
    retry_after_s: float | None = None
    suspect: bool = False
    """ENGINE_DEAD: the engine had the leg and had generated nothing for it, so it may have died of it. WORKER_LOST: the
    worker had the leg, and the state of its engine is unknown.
    """
