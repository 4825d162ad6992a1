"""Salts that keep tenants' cached KV apart."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.auth.api_keys import salt_key, salt_of, salted
from services.router.request.fields import read_request
from shared.contracts.api_keys import NO_KEY, Key
from shared.contracts.engine_paths import CHAT, COMPLETIONS

SECRET = salt_key("a secret of the operator's, with enough characters")
TENANT = st.text("abcXYZ019_-", min_size=1, max_size=12)


def facts(path: str = COMPLETIONS, **fields: object):
    return read_request(path, json.dumps({"model": "m", "prompt": "x", **fields}).encode())


@given(TENANT, st.text(max_size=20), TENANT, st.text(max_size=20))
def test_salts_are_equal_only_for_equal_tenant_and_client_salt(one, own, other, others):
    is_same = salt_of(SECRET, one, own) == salt_of(SECRET, other, others)

    assert is_same == ((one, own) == (other, others))


def test_salts_depend_on_the_secret():
    salt = salt_of(SECRET, "a", "")

    assert salt_of(salt_key("another secret"), "a", "") != salt
    assert salted(facts(cache_salt=salt), Key(tenant="b"), SECRET).salt != salt


def test_router_and_engine_hash_with_the_same_salt():
    request = salted(facts(), Key(tenant="a"), SECRET)

    assert request.salt == request.body.cache_salt == salt_of(SECRET, "a", "")


def test_vllm_accepts_the_salt():
    salt = salt_of(SECRET, "a" * 128, "ü" * 128)

    assert 0 < len(salt) <= 128
    assert not set(salt) & set("@/\\\0")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/messages", "/v1/responses", "/v1/embeddings", "/v1/score"])
def test_every_endpoint_that_creates_kv_is_salted(path):
    assert salted(facts(path), Key(tenant="a"), SECRET).salt


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens"])
def test_of_endpoints_without_kv_only_names_of_media_are_salted(path):
    request = salted(facts(path), Key(tenant="a"), SECRET)

    assert (request.salt, request.media_salt) == ("", salt_of(SECRET, "a", ""))


def test_of_public_prompts_only_names_of_media_are_salted():
    one, other = (salted(facts(cache_salt="own"), Key(tenant=t, public_cache=True), SECRET) for t in ("a", "b"))

    assert one.salt == other.salt == ""
    assert one.body.cache_salt == "own"
    assert one.media_salt != other.media_salt


def test_keyless_prompts_are_not_salted():
    request = facts(cache_salt="own")

    assert salted(request, NO_KEY, b"") is request


@pytest.mark.parametrize("wrong", ["", 7, ["a"], "x" * 129, False, {}])
def test_an_invalid_client_salt_is_rejected(wrong):
    request = salted(facts(cache_salt=wrong), Key(tenant="a"), SECRET)

    assert (request.fault.param, request.salt) == ("cache_salt", "")


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"prompt": NaN}', '{"prompt": "x"}'.encode("utf-16")])
def test_an_unreadable_body_is_rejected_instead_of_sent_unsalted(body):
    assert salted(read_request(COMPLETIONS, body), Key(tenant="a"), SECRET).fault is not None
