"""Refuses legs that this worker cannot serve now, and bodies that would cost the engine's server more than they may.

That server reads any JSON into objects, and lets ``chat_template_kwargs`` replace special tokens, with which a template
makes far more text than it was sent, or arguments of the tokenizer, such as a length to pad to.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from services.worker.engines.port import EngineFacts
from services.worker.legs.body import SAMPLING, read_fields
from shared.contracts import constraints
from shared.contracts.engine_paths import GENERATE
from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import Epoch
from shared.contracts.inference import StartLeg
from shared.contracts.request_body import (
    WITHHELD,
    body_fault,
    no_threshold_message,
    reserved_in,
    reserved_message,
    withheld_message,
)
from shared.contracts.workers import WorkerPhase

HINTS = (b"chat_template_kwargs", b"\\u")
"""Bytes without which a body sets no variable of the template, not even with escapes in its name."""
WITHHELD_HINTS = (*(name.encode() for name in WITHHELD), b"\\u")
"""Bytes without which a body has no field of ``WITHHELD``, not even with escapes in its name."""
AT_ONCE_BYTES = 256 * 1024
"""Size of a body that is examined on the event loop, in a millisecond at most."""


async def refusal(body: bytes, path: str) -> bytes:
    """The body of the 400 response; empty when the engine's server may have the request."""
    if len(body) <= AT_ONCE_BYTES:
        return refusal_of(body, path)
    return await asyncio.to_thread(refusal_of, body, path)


def refusal_of(body: bytes, path: str) -> bytes:
    if too_costly := body_fault(body):
        return _error(f"The body {too_costly}.", None)
    if path == GENERATE and (name := withheld_in(body)):
        return _error(withheld_message(name), name)
    if any(hint in body for hint in HINTS) and (name := reserved_in(body)):
        return _error(reserved_message(name), "chat_template_kwargs")
    if too_much := constraints.body_fault(body):
        return _error(f"{too_much}.", None)
    return b""


def withheld_in(body: bytes) -> str:
    """The first field of ``WITHHELD`` in the body, or in its sampling parameters' ``extra_args``; empty if none."""
    if not any(hint in body for hint in WITHHELD_HINTS):
        return ""
    fields = read_fields(body) or {}
    extra = read_fields(bytes((read_fields(bytes(fields.get(SAMPLING, b""))) or {}).get("extra_args", b""))) or {}
    given = [name for each in (fields, extra) for name, value in each.items() if bytes(value) != b"null"]
    return next((name for name in given if name in WITHHELD), "")


def serves(facts: EngineFacts, path: str) -> bool:
    """Whether the engine's server has this path, as far as that is known."""
    return not facts.paths or path in facts.paths


def not_served(facts: EngineFacts, path: str) -> bytes:
    """The body of the 404 response."""
    message = f"The engine of {facts.models[0]} does not serve {path}; it serves {', '.join(sorted(facts.paths))}."
    error = {"message": message, "type": "NotFoundError", "param": None, "code": 404}
    return msgspec.json.encode({"error": error})


def no_threshold(facts: EngineFacts) -> bytes:
    """The body of the 400 response of an engine without the KV exchange to a request with a threshold."""
    return _error(no_threshold_message(f"This worker of {facts.models[0]}"), "cache_hit_threshold")


def _error(message: str, param: str | None) -> bytes:
    error = {"message": message, "type": "BadRequestError", "param": param, "code": 400}
    return msgspec.json.encode({"error": error})


BUSY_RETRY_S = 1.0
LEG_S_MAX = 7 * 86_400.0
"""Longest deadline of a leg. A NaN or an infinite one would break the timers of this process."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Limits of this process of the worker."""

    epoch: Epoch
    legs_max: int

    def refusal(self, start: StartLeg, phase: WorkerPhase, sequences: int) -> Failure | None:
        """Why ``start`` is refused, or None. ``sequences`` are being served now. The last leg that is taken may exceed
        the maximum with its sequences, so that one with more than the maximum can be served at all.
        """
        if not 0.0 <= start.deadline_s <= LEG_S_MAX:
            message = f"a leg cannot have a deadline of {start.deadline_s:g} s"
            return Failure(reason=Reason.BAD_MESSAGE, message=message)
        if start.epoch is not None and start.epoch != self.epoch:
            message = f"the leg was placed on epoch {start.epoch} of {start.worker_id}; this is epoch {self.epoch}"
            return Failure(reason=Reason.WORKER_LOST, message=message)
        if phase is not WorkerPhase.READY:
            message = f"{start.worker_id} is {phase.value} and takes no new legs"
            return Failure(reason=Reason.WORKER_DRAINING, message=message)
        if sequences >= self.legs_max:
            message = f"{start.worker_id} serves {sequences} sequences already; its maximum is {self.legs_max}"
            return Failure(reason=Reason.WORKER_BUSY, message=message, retry_after_s=BUSY_RETRY_S)
        return None
