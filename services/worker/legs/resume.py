"""Legs that resume where another one broke off: which requests can, byte for byte.

The tokens that the client has received become part of the engine's prompt. Everything else that the answer depends on
must follow from the body and these tokens. Logit bias, top-k, a repetition penalty (which counts prompt and completion
alike), a thought's budget and the parsers of tool calls and reasoning do; the state of a grammar or the counts of other
penalties were inside the lost engine. A seeded request continues with other random numbers than the lost engine would
have used.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from services.worker.legs.body import HANDOFF_PATHS, parameters, read_fields
from shared.contracts.engine_paths import RESPONSES
from shared.contracts.failures import Failure, Reason
from shared.contracts.inference import LegKind, StartLeg, unpack_tokens

STATEFUL = (
    "presence_penalty",
    "frequency_penalty",
    "structured_outputs",
    "structural_tag",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "logits_processors",
    "bad_words",
    "repetition_detection",
)
"""Fields whose state depends on the engine's own output. The engine checks again: see ``LegResult.cannot_resume``."""
FREE_FORMS = (None, "text")
"""Values of ``response_format`` that need no grammar."""
FREE_TOOL_CHOICES = (None, "auto", "none")
LOGPROBS = "message.output_text.logprobs"
"""Item of ``include`` in a request for a response."""
CREATED = re.compile(rb'("created"|"id":"[^"]*","created_at"):\d+')
"""Start time of an answer in each of its events; of a response, in those that hold all of it."""


class CannotResume(Exception):
    """The leg cannot resume; ``failure`` says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def resumed_tokens(start: StartLeg, *, is_plain: bool) -> list[int] | None:
    """The tokens that the client has received; None for a leg that resumes nothing. ``is_plain``: one prompt and one
    completion. Raises CannotResume.
    """
    if start.resume is None:
        return None
    tokens = _unpacked(start.resume)
    if why := _obstacle(start, is_plain=is_plain):
        raise CannotResume(cannot_resume(why))
    return tokens


def joined_tokens(start: StartLeg) -> frozenset[int]:
    """Indices of the resumed tokens that the server got together with the token before. Raises CannotResume."""
    return frozenset(_unpacked(start.resume_joined))


def dated(events: bytes, created: int) -> bytes:
    """The events with ``created`` as their start time. Generated text is safe, because its quotes are escaped."""
    return CREATED.sub(rb"\g<1>:%d" % created, events)


def cannot_resume(why: str) -> Failure:
    """The client may see its message."""
    return Failure(reason=Reason.CANNOT_RESUME, message=f"the answer broke off and cannot be resumed: {why}")


def _obstacle(start: StartLeg, *, is_plain: bool) -> str:
    if start.path not in HANDOFF_PATHS:
        return f"{start.path} has no stream of tokens"
    if not is_plain:
        return "only one completion of one prompt, without the prompt's logprobs, can be resumed"
    fields = {name: _value(raw) for name, raw in parameters(start.path, read_fields(start.body) or {}).items()}
    if start.kind is not LegKind.PREFILL and not fields.get("stream"):
        return "only a stream can be resumed"
    for name in STATEFUL:
        if fields.get(name):
            return f"{name} depends on what the lost engine had counted"
    if _kind(fields.get("response_format")) not in FREE_FORMS:
        return "the state of the grammar of response_format is lost"
    if _kind(fields.get("tool_choice")) not in FREE_TOOL_CHOICES:
        return "the state of the grammar of tool_choice is lost"
    if start.path == RESPONSES and LOGPROBS in _list(fields.get("include")):
        return "the log probabilities of its first tokens are lost, and its last event repeats them"
    return ""


def _unpacked(packed: bytes) -> list[int]:
    try:
        return unpack_tokens(packed)
    except ValueError as error:
        failure = Failure(reason=Reason.BAD_MESSAGE, message=f"the resumed tokens cannot be read: {error}")
        raise CannotResume(failure) from error


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _kind(value: Any) -> Any:
    return value.get("type", value) if isinstance(value, dict) else value


def _value(raw: msgspec.Raw) -> Any:
    try:
        return json.loads(bytes(raw))
    except (ValueError, RecursionError):
        return None  # The engine reports what is wrong with it.
