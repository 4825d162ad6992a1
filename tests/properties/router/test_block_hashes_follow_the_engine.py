"""Block hashes put together by hand equal those of a general CBOR encoder."""

from __future__ import annotations

import hashlib

import cbor2
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.workers import HashScheme
from tests.support.block_hashes import block_hashes

TOKENS = st.lists(st.integers(min_value=0, max_value=2**32 - 1), max_size=200)
SALTS = st.text(max_size=40)
ADAPTERS = st.none() | st.tuples(st.text(max_size=30), st.text(max_size=300))


def digest(value: object) -> bytes:
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


def chain(tokens: list[int], size: int, salt: str, adapter: tuple[str, str] | None) -> list[int]:
    parent, hashes = digest("vllm-none-hash"), []
    for begin in range(0, len(tokens) - size + 1, size):
        keys = [("lora", *adapter)] if adapter else []
        if salt and begin == 0:
            keys.append(("cache_salt", salt))
        parent = digest((parent, tuple(tokens[begin : begin + size]), tuple(keys) or None))
        hashes.append(int.from_bytes(parent[:8], "big"))
    return hashes


@given(TOKENS, st.integers(min_value=1, max_value=40), SALTS, ADAPTERS)
def test_the_chain_is_what_a_general_encoder_makes_of_it(tokens, size, salt, adapter):
    assert block_hashes(tokens, HashScheme(block_size=size), salt=salt, adapter=adapter) == chain(
        tokens, size, salt, adapter
    )


@given(TOKENS, st.integers(min_value=1, max_value=20))
def test_a_longer_prompt_only_adds_blocks(tokens, size):
    scheme = HashScheme(block_size=size)
    shorter = block_hashes(tokens[: len(tokens) // 2], scheme)
    assert block_hashes(tokens, scheme)[: len(shorter)] == shorter


@given(TOKENS)
def test_different_salts_share_no_block(tokens):
    scheme = HashScheme(block_size=4)
    one, other = (set(block_hashes(tokens, scheme, salt=salt)) for salt in ("a", "b"))
    assert not one & other
