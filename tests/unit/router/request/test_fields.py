"""The router parses a body leniently: enough to place it, never a reason to reject it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.request.fields import read_request
from shared.contracts.engine_paths import CHAT, COMPLETIONS, GENERATE, PLACED, RESPONSES, SERVER_TOOLS

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(["model", "prompt", "messages", "n", "stream", "echo", "max_tokens", "prompt_logprobs", "x"])


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_without_an_error(body):
    assert read_request(COMPLETIONS, body).path == COMPLETIONS


@given(st.dictionaries(FIELDS, JSON_VALUES))
def test_any_object_is_parsed_without_an_error(fields):
    facts = read_request(CHAT, json.dumps(fields).encode())
    assert isinstance(facts.model, str)
    assert facts.tokens_out >= 0


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3], " "])
def test_a_single_prompt_can_be_split(prompt):
    assert read_request(COMPLETIONS, json.dumps({"prompt": prompt}).encode()).unsplittable == ""


@pytest.mark.parametrize("prompt", [["a"], [[1], [2]], [], None, {"a": 1}, 3])
def test_several_prompts_or_none_cannot_be_split(prompt):
    assert read_request(COMPLETIONS, json.dumps({"prompt": prompt}).encode()).unsplittable


def response(*kinds: object) -> bytes:
    return json.dumps({"input": "x", "tools": [{"type": kind, "name": "t"} for kind in kinds]}).encode()


def test_tools_that_a_client_runs_do_not_prevent_a_split():
    """As Codex sends them."""
    assert read_request(RESPONSES, response("function", "namespace", "custom", "web_search")).unsplittable == ""


@pytest.mark.parametrize("kind", SERVER_TOOLS)
def test_tools_that_an_engines_server_runs_prevent_a_split(kind):
    assert read_request(RESPONSES, response("function", kind)).unsplittable == "the server runs its tools"


@pytest.mark.parametrize("kind", [None, 1, [], {}])
def test_any_type_of_a_tool_is_parsed_without_an_error(kind):
    assert read_request(RESPONSES, response(kind)).path == RESPONSES


def test_max_completion_tokens_overrides_max_tokens():
    body = b'{"messages":[],"max_completion_tokens":5,"max_tokens":9}'
    assert read_request(CHAT, body).tokens_out == 5


@pytest.mark.parametrize("body", [b"", b"[]", b"nul", b'{"model":', b'"text"', b"\xff\xfe{}", b"[" * 100_000])
def test_unreadable_bodies_are_not_split(body):
    facts = read_request(CHAT, body)
    assert facts.body is None
    assert facts.unsplittable


@pytest.mark.parametrize(
    "fields",
    [
        *({"cache_hit_threshold": value} for value in (-0.1, 1.01, True, "0.5", [], 10**400)),
        *({"kv_fetch_min_tokens": value} for value in (-1, 1.5, False, "7", {}, 1 << 40, 10**400)),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", PLACED)
def test_invalid_baton_fields_are_named(path, fields):
    facts = read_request(path, json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode())

    assert facts.fault is not None
    assert [facts.fault.param] == list(fields)
    assert (facts.cache_hit_threshold, facts.kv_fetch_min_tokens) == (None, None)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({}, (None, None)),
        ({"cache_hit_threshold": None, "kv_fetch_min_tokens": None}, (None, None)),
        ({"cache_hit_threshold": 0, "kv_fetch_min_tokens": 0}, (0.0, 0)),
        ({"cache_hit_threshold": 1, "kv_fetch_min_tokens": 500}, (1.0, 500)),
        ({"cache_hit_threshold": 0.33}, (0.33, None)),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", PLACED)
def test_baton_fields_are_read_unchanged(path, given, taken):
    facts = read_request(path, json.dumps({"prompt": "x", **given}).encode())

    assert facts.fault is None
    assert (facts.cache_hit_threshold, facts.kv_fetch_min_tokens) == taken
    assert isinstance(facts.cache_hit_threshold, float | None)


def generate(sampling: object = None, **fields: object) -> bytes:
    return json.dumps({"model": "m", "token_ids": [1, 2, 3], "sampling_params": sampling or {}, **fields}).encode()


def test_token_ids_are_placed_by_their_sampling_parameters():
    facts = read_request(GENERATE, generate({"max_tokens": 9}, max_tokens=5, prompt="x", echo=True, n=7))

    assert (facts.unsplittable, facts.tokens_out, facts.sequences) == ("", 9, 1)
    assert facts.body is not None
    assert bytes(facts.body.prompt) == b"[1, 2, 3]"


@pytest.mark.parametrize(
    "sampling",
    [
        {"n": 2},
        {"prompt_logprobs": 0},
        {"prompt_logprob_token_ids": [[1]]},
        {"skip_reading_prefix_cache": True},
        {"trace_decode_token_ids": [1]},
        [],
    ],
    ids=str,
)
def test_token_ids_whose_sampling_takes_one_engine_are_not_split(sampling):
    body = json.dumps({"model": "m", "token_ids": [1, 2, 3], "sampling_params": sampling}).encode()

    assert read_request(GENERATE, body).unsplittable


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params", "features", "content_parts"])
def test_orders_to_an_engine_are_a_fault_that_names_them(name):
    assert read_request(GENERATE, generate(**{name: {}})).fault.param == name
    assert read_request(GENERATE, generate({"extra_args": {name: {}}})).fault.param == name
    assert read_request(GENERATE, generate(**{name: None})).fault is None


def test_other_endpoints_have_no_baton_fields():
    facts = read_request("/v1/embeddings", b'{"input":"x","cache_hit_threshold":"mine"}')

    assert (facts.fault, facts.cache_hit_threshold) == (None, None)
