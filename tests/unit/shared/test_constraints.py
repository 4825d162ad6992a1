"""What a request may demand of its answer's form is bounded by size and count; ordinary demands are not touched."""

from __future__ import annotations

import json

import pytest

from shared.contracts.constraints import (
    ORDINARY_BYTES_MAX,
    SCHEMA_CHARS_MAX,
    TEXT_CHARS_MAX,
    VALUES_MAX,
    body_fault,
    choice_fault,
    enumerated,
    schema_fault,
)


def body(**fields: object) -> bytes:
    return json.dumps({"model": "m", "prompt": "hello", **fields}).encode()


def schema(values: int) -> dict:
    return {"type": "object", "properties": {"a": {"anyOf": [{"enum": [str(n) for n in range(values)]}]}}}


def formats(one: dict) -> list[bytes]:
    return [
        body(structured_outputs={"json": one}),
        body(structured_outputs={"json": json.dumps(one), "disable_any_whitespace": True}),
        body(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": one}}),
        body(text={"format": {"type": "json_schema", "name": "s", "schema": one}}),
    ]


TOO_MUCH = {
    "a choice of 2 MB": (body(structured_outputs={"choice": ["x" * 2_000_000]}), "choices"),
    "20,000 choices": (body(structured_outputs={"choice": ["ab"] * 20_000}), "20000 choices"),
    "an expression": (body(structured_outputs={"regex": "a" * (TEXT_CHARS_MAX + 1)}), "regex"),
    "a grammar": (body(structured_outputs={"grammar": "a" * (TEXT_CHARS_MAX + 1)}), "grammar"),
    "a tag": (body(structured_outputs={"structural_tag": "a" * (SCHEMA_CHARS_MAX + 1)}), "schema"),
    "a name in other words": (
        body(structured_outputs={"choice": ["ab"] * 20_000}).replace(b"structured", b"structur\\u0065d"),
        "choices",
    ),
    **{f"20,000 values {at}": (one, "20000 values") for at, one in enumerate(formats(schema(20_000))) if at != 1},
    **{f"a long schema {at}": (one, "schema has") for at, one in enumerate(formats({"title": "x" * SCHEMA_CHARS_MAX}))},
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_demand_beyond_a_bound_is_refused_with_the_limit_and_advice(name):
    hostile, word = TOO_MUCH[name]

    fault = body_fault(hostile)

    assert word in fault
    assert "at most" in fault
    assert len(fault) < 200


@pytest.mark.parametrize(
    "ordinary",
    [
        *formats(schema(800)),
        *formats({"title": "x" * 100_000}),
        body(structured_outputs={"choice": [f"product {number}" for number in range(2000)]}),
        body(prompt="x" * 4_000_000),
        body(tools=[{"type": "function", "function": {"name": "f", "parameters": schema(20_000)}}]),
        body(text=["x"] * 30_000, response_format={"type": "text"}),
        body(structured_outputs=["x"] * 30_000),
        b"[" * ORDINARY_BYTES_MAX,
        b'{"structured_outputs":{"choice":[' + b" " * ORDINARY_BYTES_MAX,
        b'["structured_outputs"' + b" " * ORDINARY_BYTES_MAX + b"]",
    ],
    ids=lambda one: one[:60].decode(),
)
def test_what_is_ordinary_or_cannot_be_read_passes(ordinary):
    assert body_fault(ordinary) == ""


def test_the_bounds_are_exact():
    assert choice_fault(["a"] * VALUES_MAX) == "" != choice_fault(["a"] * (VALUES_MAX + 1))
    assert choice_fault(["a" * TEXT_CHARS_MAX]) == "" != choice_fault(["a" * TEXT_CHARS_MAX, "b"])
    assert schema_fault(schema(VALUES_MAX), 100_000) == "" != schema_fault(schema(VALUES_MAX + 1), 100_000)
    assert schema_fault({}, SCHEMA_CHARS_MAX) == "" != schema_fault({}, SCHEMA_CHARS_MAX + 1)


def test_values_are_counted_at_any_depth():
    deep: dict = {"enum": [1, 2]}
    for _ in range(5000):
        deep = {"items": [deep], "enum": ["x"]}

    assert enumerated(deep) == 5002
    assert enumerated({"properties": {"enum": {"enum": ["a", {"enum": [1]}]}}}) >= 2
