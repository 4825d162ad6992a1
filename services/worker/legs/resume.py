"""Legs that go on where another one broke off: for which requests that can be done, byte for byte.

The tokens that the client has had become part of what the engine reads. What else the answer depends on has to be known
from the body and from these tokens alone. Logit bias, top-k, a repetition penalty (which counts the prompt's tokens
like the answer's) and what parsers make of tool calls or reasoning are; a grammar's state, or what a penalty has
counted, was inside the engine that is gone. A seed makes other tokens than it would have: its noise cannot be wound on
to where it was.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from services.worker.legs.body import HANDOVER_PATHS, read_fields
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
    "thinking_token_budget",
    "repetition_detection",
)
"""What counts or parses the engine's own output as it goes. The engine has the last word: see ``cannot_resume``."""
FREE_FORMS = (None, "text")
"""Kinds of ``response_format`` that need no grammar."""
FREE_TOOL_CHOICES = (None, "auto", "none")
CREATED = re.compile(rb'"created":\d+')
"""When an answer began, as each of its events says."""


class CannotResume(Exception):
    """The leg cannot go on; ``failure`` says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def resumed_tokens(start: StartLeg, *, is_plain: bool) -> list[int] | None:
    """What the client has had, or None for a leg that begins at the beginning; ``is_plain``: one prompt, one answer.

    Raises CannotResume.
    """
    if start.resume is None:
        return None
    tokens = _unpacked(start.resume)
    if why := _obstacle(start, is_plain=is_plain):
        raise CannotResume(cannot_resume(why))
    return tokens


def joined_tokens(start: StartLeg) -> frozenset[int]:
    """Which of them, by index, were heard of together with the one before. Raises CannotResume."""
    return frozenset(_unpacked(start.resume_joined))


def dated(events: bytes, created: int) -> bytes:
    """The events, as of an answer that began at ``created``. In text they would have their quotes escaped."""
    return CREATED.sub(b'"created":%d' % created, events)


def cannot_resume(why: str) -> Failure:
    """In the words that a client may see."""
    return Failure(reason=Reason.CANNOT_RESUME, message=f"the answer broke off and cannot be taken up again: {why}")


def _obstacle(start: StartLeg, *, is_plain: bool) -> str:
    if start.path not in HANDOVER_PATHS:
        return f"{start.path} has no stream of tokens"
    if not is_plain:
        return "only one completion of one prompt, without the prompt's logprobs, can be"
    fields = {name: _value(raw) for name, raw in (read_fields(start.body) or {}).items()}
    if start.kind is not LegKind.PREFILL and not fields.get("stream"):
        return "only a stream can be"
    for name in STATEFUL:
        if fields.get(name):
            return f"{name} depends on what the lost engine had counted"
    if _kind(fields.get("response_format")) not in FREE_FORMS:
        return "the state of the grammar of response_format is lost"
    if _kind(fields.get("tool_choice")) not in FREE_TOOL_CHOICES:
        return "the state of the grammar of tool_choice is lost"
    return ""


def _unpacked(packed: bytes) -> list[int]:
    try:
        return unpack_tokens(packed)
    except ValueError as error:
        failure = Failure(reason=Reason.BAD_MESSAGE, message=f"the resumed tokens cannot be read: {error}")
        raise CannotResume(failure) from error


def _kind(value: Any) -> Any:
    return value.get("type", value) if isinstance(value, dict) else value


def _value(raw: msgspec.Raw) -> Any:
    try:
        return json.loads(bytes(raw))
    except (ValueError, RecursionError):
        return None  # The engine will say what is wrong with it.
