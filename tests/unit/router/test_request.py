"""One lenient pass over a body: enough to place it, never a reason to refuse it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.core.request import CHAT, COMPLETIONS, read_request

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(["model", "prompt", "messages", "n", "stream", "echo", "max_tokens", "prompt_logprobs", "x"])


@given(st.binary(max_size=200))
def test_any_bytes_can_be_read(body):
    assert read_request(COMPLETIONS, body).path == COMPLETIONS


@given(st.dictionaries(FIELDS, JSON_VALUES))
def test_any_object_can_be_read(fields):
    facts = read_request(CHAT, json.dumps(fields).encode())
    assert isinstance(facts.model, str)
    assert facts.tokens_out >= 0


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3], " "])
def test_one_prompt_can_be_split(prompt):
    assert read_request(COMPLETIONS, json.dumps({"prompt": prompt}).encode()).whole == ""


@pytest.mark.parametrize("prompt", [["a"], [[1], [2]], [], None, {"a": 1}, 3])
def test_several_prompts_or_none_cannot(prompt):
    assert read_request(COMPLETIONS, json.dumps({"prompt": prompt}).encode()).whole


def test_the_newer_limit_counts_before_the_older():
    body = b'{"messages":[],"max_completion_tokens":5,"max_tokens":9}'
    assert read_request(CHAT, body).tokens_out == 5


@pytest.mark.parametrize("body", [b"", b"[]", b"nul", b'{"model":', b'"text"', b"\xff\xfe{}", b"[" * 100_000])
def test_what_cannot_be_read_goes_whole(body):
    facts = read_request(CHAT, body)
    assert facts.body is None
    assert facts.whole
