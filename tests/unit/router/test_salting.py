"""Salts that keep tenants' cached KV apart."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.auth.api_keys import NO_KEY, Key, salt_key, salt_of, salted
from services.router.placement.request_fields import CHAT, COMPLETIONS, read_request

SECRET = salt_key("a secret of the operator's, with enough characters")
TENANT = st.text("abcXYZ019_-", min_size=1, max_size=12)


def facts(path: str = COMPLETIONS, **fields: object):
    return read_request(path, json.dumps({"model": "m", "prompt": "x", **fields}).encode())


@given(TENANT, st.text(max_size=20), TENANT, st.text(max_size=20))
def test_only_the_same_tenant_with_the_same_salt_of_its_own_has_the_same_salt(one, own, other, others):
    is_same = salt_of(SECRET, one, own) == salt_of(SECRET, other, others)

    assert is_same == ((one, own) == (other, others))


def test_without_the_secret_no_salt_can_be_named():
    salt = salt_of(SECRET, "a", "")

    assert salt_of(salt_key("another secret"), "a", "") != salt
    assert salted(facts(cache_salt=salt), Key(tenant="b"), SECRET).salt != salt


def test_engines_hash_and_router_hash_are_of_the_same_salt():
    request = salted(facts(), Key(tenant="a"), SECRET)

    assert request.salt == request.body.cache_salt == salt_of(SECRET, "a", "")


def test_a_salt_is_one_that_vllm_takes():
    salt = salt_of(SECRET, "a" * 128, "ü" * 128)

    assert 0 < len(salt) <= 128
    assert not set(salt) & set("@/\\\0")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/messages", "/v1/responses", "/v1/embeddings", "/v1/score"])
def test_whatever_makes_kv_is_salted(path):
    assert salted(facts(path), Key(tenant="a"), SECRET).salt


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_what_makes_no_kv_stays_as_it_is(path):
    request = facts(path)

    assert salted(request, Key(tenant="a"), SECRET) is request


def test_public_prompts_and_those_without_keys_stay_as_they_are():
    request = facts(cache_salt="own")

    assert salted(request, Key(tenant="a", public_cache=True), SECRET) is request
    assert salted(request, NO_KEY, b"") is request


@pytest.mark.parametrize("wrong", ["", 7, ["a"], "x" * 129, False, {}])
def test_a_salt_that_no_engine_takes_is_refused_before_it_is_replaced(wrong):
    request = salted(facts(cache_salt=wrong), Key(tenant="a"), SECRET)

    assert (request.fault.param, request.salt) == ("cache_salt", "")


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"prompt": NaN}', '{"prompt": "x"}'.encode("utf-16")])
def test_a_body_that_cannot_be_read_is_refused_for_an_engine_might_read_it(body):
    assert salted(read_request(COMPLETIONS, body), Key(tenant="a"), SECRET).fault is not None
