"""The engine's body for a leg: the client's, without orders to the KV connector."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.legs.body import HANDOFF_PATHS, PRIVATE, own_body, prepare, salted
from shared.contracts.engine_paths import SERVER_TOOLS
from shared.contracts.inference import LegKind

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TRANSFER = b'{"do_remote_prefill":true,"remote_port":1}'

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
fields = st.dictionaries(
    st.sampled_from(["model", "prompt", "messages", "tools", "stop", "seed", "x"]) | st.text(), values
)
private = st.dictionaries(st.sampled_from(sorted(PRIVATE)), values)
kinds = st.sampled_from(list(LegKind))
paths = st.sampled_from([*sorted(HANDOFF_PATHS), "/v1/responses", "/tokenize"])
encodings = st.sampled_from(["utf-8", "utf-16", "utf-32"])


def escaped(text: str) -> str:
    """The same JSON with its private names written as escapes."""
    return text.replace("kv_transfer_params", "kv\\u005ftransfer\\u005fparams").replace(
        "ec_transfer", "\\u0065c_transfer"
    )


@given(fields, private, kinds, paths, encodings, st.booleans())
def test_private_fields_of_a_client_never_reach_the_engine(given_fields, orders, kind, path, encoding, escape):
    text = json.dumps(given_fields | orders)
    body = (escaped(text) if escape else text).encode(encoding)

    made = prepare(kind, path, body, TRANSFER)

    if made is None:
        return
    seen = json.loads(made)
    assert "ec_transfer_params" not in seen
    ours = {"do_remote_decode": True} if kind is LegKind.PREFILL else json.loads(TRANSFER)
    assert seen.get("kv_transfer_params", ours) == ours
    if kind is LegKind.AGGREGATED:
        assert "kv_transfer_params" not in seen


@given(fields, private, kinds, paths)
def test_other_fields_arrive_unchanged(given_fields, orders, kind, path):
    made = prepare(kind, path, json.dumps(given_fields | orders).encode(), TRANSFER)

    if made is not None:
        seen = json.loads(made)
        assert {name: value for name, value in seen.items() if name not in PRIVATE} == {
            name: value for name, value in given_fields.items() if name not in PRIVATE
        }


@given(st.binary())
def test_a_body_that_is_no_json_object_is_passed_unchanged(body):
    try:
        is_object = isinstance(json.loads(body), dict)
    except ValueError:
        is_object = False

    if not is_object:
        assert prepare(LegKind.AGGREGATED, CHAT, body) == body
        assert prepare(LegKind.PREFILL, CHAT, body) == body


def test_an_aggregated_body_stays_the_same_bytes():
    body = b'{ "model" : "m",  "temperature": 1.0e0 }'

    assert prepare(LegKind.AGGREGATED, CHAT, body) is body


def test_a_prefill_body_keeps_numbers_and_spaces_unchanged():
    body = b'{"temperature": 1.0e0, "seed": 123456789012345678901234567890, "messages": [ {"a" : 1} ]}'

    made = prepare(LegKind.PREFILL, CHAT, body)

    assert b'"temperature":1.0e0' in made
    assert b'"seed":123456789012345678901234567890' in made
    assert b'"messages":[ {"a" : 1} ]' in made


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"best_of": 3},
        {"use_beam_search": True},
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"prompt_embeds": "AAAA"},
        {"prompt_logprobs": 0},
        {"echo": True, "logprobs": 1},
    ],
    ids=str,
)
def test_requests_of_several_sequences_are_left_to_the_decode_leg(more):
    body = json.dumps({"model": "m", "prompt": "x", **more}).encode()

    assert prepare(LegKind.PREFILL, COMPLETIONS, body) is None
    assert prepare(LegKind.DECODE, COMPLETIONS, body, TRANSFER) == body


@pytest.mark.parametrize(
    "more",
    [
        {"n": 1},
        {"n": None},
        {"prompt": ["a"]},
        {"prompt": [1, 2, 3]},
        {"prompt": [[1, 2]]},
        {"echo": True},
        {"logprobs": 5},
        {"stop": ["a"], "stream": True, "max_tokens": 9},
    ],
    ids=str,
)
def test_one_prompt_and_one_completion_are_handed_off(more):
    body = json.dumps({"model": "m", "prompt": "x", **more}).encode()

    assert "kv_transfer_params" in json.loads(prepare(LegKind.PREFILL, COMPLETIONS, body))
    assert json.loads(prepare(LegKind.DECODE, COMPLETIONS, body, TRANSFER))["kv_transfer_params"] == json.loads(
        TRANSFER
    )


@pytest.mark.parametrize(
    ("kinds", "is_plain"),
    [
        (["function", "namespace", "custom", "web_search"], True),
        *((["function", kind], False) for kind in SERVER_TOOLS),
    ],
)
def test_a_response_is_handed_off_unless_the_engines_server_runs_its_tools(kinds, is_plain):
    fields = {"model": "m", "input": "x", "tools": [{"type": kind, "name": "t"} for kind in kinds]}

    assert own_body("/v1/responses", json.dumps(fields).encode(), LegKind.DECODE, moves_kv=True).is_plain is is_plain


def test_vllms_server_runs_no_other_tools():
    """The types that it looks for among a response's tools."""
    package = find_spec("vllm")
    if package is None or package.origin is None:
        pytest.skip("vLLM is not installed")
    source = (Path(package.origin).parent / "entrypoints/openai/responses/serving.py").read_text()

    assert {*re.findall(r'"(\w+)" in requested_tool_types', source), "mcp"} == {*SERVER_TOOLS}


def test_a_decode_leg_without_kv_computes_the_prompt_itself():
    body = b'{"model": "m", "prompt": "x"}'

    assert prepare(LegKind.DECODE, COMPLETIONS, body) == body


def test_other_paths_have_nothing_to_prefill():
    assert prepare(LegKind.PREFILL, "/v1/embeddings", b'{"input": "x"}') is None


def test_numbers_that_only_some_parsers_accept_are_kept():
    made = prepare(LegKind.PREFILL, COMPLETIONS, b'{"prompt": "x", "temperature": NaN}')

    assert b"NaN" in made
    assert b"do_remote_decode" in made


@pytest.mark.parametrize("prompt", [b'"\xff"', b"[1," + b"9" * 5000 + b"]"], ids=["bytes", "digits"])
def test_an_unreadable_prompt_is_left_to_the_decode_engine(prompt):
    body = b'{"model":"m","prompt":' + prompt + b"}"

    assert prepare(LegKind.PREFILL, COMPLETIONS, body) is None
    assert prepare(LegKind.DECODE, COMPLETIONS, body, TRANSFER) == body
    assert prepare(LegKind.AGGREGATED, COMPLETIONS, body) == body


@pytest.mark.parametrize("kind", list(LegKind))
def test_a_deeply_nested_prompt_is_no_crash(kind):
    for deep in range(800, 1100):  # Somewhere between, one of the readers gives up and another does not.
        body = b'{"model":"m","prompt":[1,' + b"[" * deep + b"]" * deep + b"]}"
        prepare(kind, COMPLETIONS, body, TRANSFER)


@given(fields, encodings, st.booleans(), st.text())
def test_a_salted_body_has_exactly_one_salt(given_fields, encoding, escape, own):
    text = json.dumps({**given_fields, "cache_salt": own})
    name = '"cache\\u005fsalt"' if escape else '"cache_salt"'
    written = text.replace('"cache_salt"', name)[:-1] + f', {name}: "again"}}'

    made = salted(written.encode(encoding), "tenants")

    assert json.loads(made) == {**json.loads(text), "cache_salt": "tenants"}
    assert made.count(b'"cache_salt":"tenants"') == 1


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'{"prompt":', b"\xff"])
def test_a_body_that_cannot_be_salted_reaches_no_engine(body):
    assert salted(body, "tenants") == b"null"
    assert salted(body, "") is body
