"""What a request may demand of its answer's form (choices, expressions, grammars, schemas), so that compiling it takes
seconds at most. An engine also bounds the time (``services/worker/engines/vllm/grammar_trials.py``).

Compile time grows with the square of the text that the answer must have: 0.4 s of CPU time for 32 KB, 3.5 s for 128 KB,
some 14 minutes for 2 MB, with any vocabulary (vLLM 0.32 with xgrammar 0.2.8). Descriptions in a schema cost nothing.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

TEXT_CHARS_MAX: Final = 128 * 1024
"""Characters of all choices, of an expression, or of a grammar."""
SCHEMA_CHARS_MAX: Final = 512 * 1024
"""Characters of a schema, or of a structural tag, as JSON."""
VALUES_MAX: Final = 10_000
"""Choices, and values of all enumerations of a schema."""
ORDINARY_BYTES_MAX: Final = 2 * VALUES_MAX
"""No shorter body is beyond a bound: a value takes a digit and a comma."""


class _Constrained(msgspec.Struct):
    """Fields of all endpoints."""

    structured_outputs: msgspec.Raw = msgspec.Raw(b"null")
    sampling_params: msgspec.Raw = msgspec.Raw(b"null")
    """The endpoint of token ids has its demands in there."""
    response_format: msgspec.Raw = msgspec.Raw(b"null")
    text: msgspec.Raw = msgspec.Raw(b"null")


_constrained = msgspec.json.Decoder(_Constrained)
_any = msgspec.json.Decoder()


def text_fault(kind: str, text: str) -> str:
    """What is wrong with an expression or a grammar, as a whole sentence; empty when nothing is."""
    return _too_long(f"The {kind}", len(text), TEXT_CHARS_MAX, "Shorten it")


def choice_fault(choices: list[Any]) -> str:
    if len(choices) > VALUES_MAX:
        return f"There are {len(choices)} choices; at most {VALUES_MAX} are compiled. Offer fewer"
    chars = sum(len(choice) for choice in choices if isinstance(choice, str))
    return _too_long("All choices together", chars, TEXT_CHARS_MAX, "Offer fewer or shorter ones")


def schema_fault(schema: Any, chars: int) -> str:
    """``schema``: as an object; ``chars``: its length as JSON."""
    if too_long := _too_long("The schema", chars, SCHEMA_CHARS_MAX, "Divide it, or shorten it"):
        return too_long
    values = enumerated(schema) if chars > ORDINARY_BYTES_MAX else 0
    if values > VALUES_MAX:
        why = f"at most {VALUES_MAX} are compiled. Enumerate fewer, or describe them by a pattern"
        return f"The schema enumerates {values} values; {why}"
    return ""


def enumerated(schema: Any) -> int:
    """Values in all arrays named ``enum``."""
    count = 0
    rest = [schema]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            values = one.get("enum")
            count += len(values) if isinstance(values, list) else 0
            rest.extend(one.values())
        elif isinstance(one, list):
            rest.extend(part for part in one if isinstance(part, (dict, list)))
    return count


def body_fault(body: bytes) -> str:
    """What is wrong with the constraints that a JSON body has as such; empty when nothing is. Those that an engine's
    server makes of ``tools`` are seen only there. The server reports a body that cannot be read.
    """
    if len(body) <= ORDINARY_BYTES_MAX:
        return ""
    try:
        fields = _constrained.decode(body)
        for raw in (fields.response_format, fields.text):
            if fault := _raw_schema_fault(raw):
                return fault
        if len(memoryview(fields.sampling_params)) > ORDINARY_BYTES_MAX:
            fields = _constrained.decode(fields.sampling_params)
        if len(memoryview(fields.structured_outputs)) <= ORDINARY_BYTES_MAX:
            return ""
        demands = _any.decode(fields.structured_outputs)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return _demands_fault(demands, len(memoryview(fields.structured_outputs))) if isinstance(demands, dict) else ""


def _raw_schema_fault(raw: msgspec.Raw) -> str:
    size = len(memoryview(raw))
    return schema_fault(_any.decode(raw), size) if size > ORDINARY_BYTES_MAX else ""


def _demands_fault(demands: dict[str, Any], size: int) -> str:
    for name, value in demands.items():
        if name == "choice" and isinstance(value, list):
            fault = choice_fault(value)
        elif name in {"regex", "grammar"} and isinstance(value, str):
            fault = text_fault(name, value)
        else:
            fault = schema_fault(value, len(value) if isinstance(value, str) else size)
        if fault:
            return fault
    return ""


def _too_long(what: str, chars: int, chars_max: int, advice: str) -> str:
    if chars <= chars_max:
        return ""
    has = "have" if what.startswith("All") else "has"
    return f"{what} {has} {chars} characters; at most {chars_max} are compiled. {advice}"
