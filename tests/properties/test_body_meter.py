"""The meter sees in the bytes of a body, whatever its pieces, what a parser makes of it."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.contracts.request_body import DEPTH_MAX, BodyMeter
from tests.support.examples import examples

texts = st.text(st.sampled_from('[]{}":,\\/\n\u2200x'))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=40,
)


def counts(value: Any) -> tuple[int, int, int]:
    """Depth, fields, values."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inside = [counts(each) for each in (value.values() if isinstance(value, dict) else value)]
    fields = 1 + (len(value) if isinstance(value, dict) else 0)
    return (
        1 + max((depth for depth, _, _ in inside), default=0),
        fields + sum(each for _, each, _ in inside),
        max(0, len(value) - 1) + sum(each for _, _, each in inside),
    )


@settings(deadline=None, max_examples=examples(200))
@given(values, st.integers(0, 2 * DEPTH_MAX), st.booleans(), st.integers(1, 40))
@example(["\\", '"[', "\\\\"], DEPTH_MAX + 1, False, 1)
def test_the_meter_counts_what_a_parser_makes(value, deeper, ascii_only, size):
    for _ in range(deeper):
        value = [value]
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    meter = BodyMeter()

    for begin in range(0, len(body), size):
        meter.add(body[begin : begin + size])

    depth, fields, more = counts(value)
    assert (meter.fields, meter.values) == (fields, more)
    assert meter.depth == depth if depth > DEPTH_MAX else meter.depth <= depth
    assert bool(meter.fault) == (depth > DEPTH_MAX)
