"""How many sequences an engine computes for a request: completions of each prompt, or inputs of a batch endpoint.

The count may be too high (an engine that refuses the body computes none) but not too low: whatever an engine's parser
accepts as a number or as a list is counted.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from services.router.request.facts import Inputs
from shared.contracts.engine_paths import CHAT_BATCH, FORMS, INVOCATIONS, PLACED

QUOTE: Final = ord('"')
LIST: Final = re.compile(rb"[ \t\r\n]*\[")
ONE_INPUT: Final = re.compile(rb'[ \t\r\n]*("|\[[ \t\r\n]*[-0-9])')
"""A text, or a list of tokens."""
GENERATING: Final = (*PLACED, CHAT_BATCH, INVOCATIONS, *sorted(FORMS))
"""Endpoints that generate tokens. Of all others only the inputs cost something."""


_inputs = msgspec.json.Decoder(Inputs)
_elements = msgspec.json.Decoder(list[msgspec.Raw])


def batch_size(body: bytes) -> int:
    """Sequences of a body for an endpoint that generates nothing. A body that cannot be read counts as one."""
    try:
        inputs = _inputs.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 1
    return max(elements(getattr(inputs, name)) for name in inputs.__struct_fields__)


def completions(prompt: msgspec.Raw, prompt_embeds: msgspec.Raw, n: Any, best_of: Any) -> int:
    """Sequences of a request for completions: each prompt's, times the prompts."""
    each = 1 if n is None and best_of is None else max(lax_count(n), lax_count(best_of))
    return each * max(elements(prompt), elements(prompt_embeds))


def is_one_input(raw: msgspec.Raw) -> bool:
    """Whether a field is one text or one list of tokens."""
    view = memoryview(raw)
    return len(view) > 0 and (view[0] == QUOTE or ONE_INPUT.match(view) is not None)


def elements(raw: msgspec.Raw) -> int:
    """Inputs in a field: the elements of a list, or 1. A list of numbers is one input, in tokens."""
    view = memoryview(raw)
    if not view or view[0] == QUOTE:  # Most prompts: one text.
        return 1
    if not LIST.match(view) or ONE_INPUT.match(view):
        return 1
    try:
        return max(1, len(_elements.decode(raw)))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 1


def lax_count(value: Any) -> int:
    """A number of completions as an engine's lax parser reads it, which takes "5" and 5.0 for 5."""
    if value is None:
        return 1
    if type(value) is int:
        return max(1, value)
    try:
        return max(1, int(float(value)))
    except (TypeError, ValueError, OverflowError):
        return 1
