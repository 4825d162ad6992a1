"""The meter sees in the bytes of a body, whatever its pieces, what a parser makes of it."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.contracts.request_body import BodyMeter
from tests.support.examples import examples

texts = st.text(st.sampled_from('[]{}":,\\/\n\u2200x'))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=40,
)


def counts(value: Any) -> tuple[int, int]:
    """Fields, values."""
    if not isinstance(value, list | dict):
        return 0, 0
    inside = [counts(each) for each in (value.values() if isinstance(value, dict) else value)]
    fields = 1 + (len(value) if isinstance(value, dict) else 0)
    return fields + sum(each for each, _ in inside), max(0, len(value) - 1) + sum(each for _, each in inside)


@settings(deadline=None, max_examples=examples(200))
@given(values, st.booleans(), st.integers(1, 40))
@example(["\\", '"[', "\\\\"], False, 1)
def test_the_meter_counts_what_a_parser_makes(value, ascii_only, size):
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    meter = BodyMeter()

    for begin in range(0, len(body), size):
        meter.add(body[begin : begin + size])

    assert (meter.fields, meter.values) == counts(value)
