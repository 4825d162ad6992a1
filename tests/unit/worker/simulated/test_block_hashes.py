"""Block hashes equal those of a general CBOR encoder."""

import hashlib
from functools import cache

import cbor2
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from services.worker.engines.simulated.core.tokens import BlockHasher

VOCABULARY = 70_000
"""More than 16 bits of token id."""


def plainly(tokens, size, salt="", adapter=None):
    """The rule, as slowly and clearly as it can be written."""
    chain, parent = [], hashlib.sha256(cbor2.dumps("vllm-none-hash", canonical=True)).digest()
    for start in range(0, len(tokens) - size + 1, size):
        extra = [("lora", *adapter)] if adapter else []
        extra += [("cache_salt", salt)] if salt and not start else []
        block = (parent, tuple(tokens[start : start + size]), tuple(extra) or None)
        parent = hashlib.sha256(cbor2.dumps(block, canonical=True)).digest()
        chain.append(parent)
    return chain


@cache
def hasher(size):
    return BlockHasher(size, VOCABULARY)


def chain(tokens, size, salt="", adapter=None):
    hashes = []
    hasher(size).extend(hashes, tokens, salt, adapter)
    return hashes


@hypothesis_settings(deadline=None)
@given(
    tokens=st.lists(st.integers(0, VOCABULARY - 1), max_size=200),
    size=st.sampled_from([1, 16, 23, 24, 32]),
    salt=st.sampled_from(["", "tenant"]),
    adapter=st.sampled_from([None, ("sql", "sha256:1")]),
)
def test_cached_pieces_hash_like_a_general_encoder(tokens, size, salt, adapter):
    assert chain(tokens, size, salt, adapter) == plainly(tokens, size, salt, adapter)


@pytest.mark.parametrize("size", [128, 256, 300])
def test_large_blocks_hash_the_same(size):
    tokens = list(range(2 * size))

    assert chain(tokens, size) == plainly(tokens, size)


@hypothesis_settings(deadline=None)
@given(tokens=st.lists(st.integers(0, 99), min_size=40, max_size=80), cut=st.integers(0, 40))
def test_a_chain_grows_as_tokens_come(tokens, cut):
    hashes = []
    hasher(8).extend(hashes, tokens[:cut])
    hasher(8).extend(hashes, tokens)

    assert hashes == chain(tokens, 8)
