"""Half of a surrogate pair is found in any body, wherever it stands and however it is written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.request_body import field_at, lone_surrogate

TEXTS = st.text(st.sampled_from('\ud800\udbff\udc00\udfff\\\\"u🙂ad8éd\n'))


@given(st.dictionaries(TEXTS, st.one_of(TEXTS, st.lists(TEXTS))), st.booleans())
def test_a_body_has_a_lone_surrogate_where_its_texts_have_one(values, escaped):
    written = json.dumps(values, ensure_ascii=escaped).encode(errors="surrogatepass")

    read = json.dumps(json.loads(written), ensure_ascii=False)
    assert (lone_surrogate(written) >= 0) == any("\ud800" <= char <= "\udfff" for char in read)


@given(st.binary())
def test_any_bytes_are_examined(body):
    assert lone_surrogate(body) < len(body)
    assert isinstance(field_at(body, 0), str)


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_the_field_is_named(name):
    body = json.dumps({"a": "x", "b": ["x"], "c": {"d": "x"}} | {name: ["\ud800"]}).encode()

    assert field_at(body, lone_surrogate(body)) == name
