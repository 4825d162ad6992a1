"""A text's tokens are the same whatever texts were tokenized before it."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.worker.engines.vllm.known_texts import PieceTokens
from tests.properties.router.test_pieces_are_the_whole import TEXTS, reference
from tests.properties.router.tokenizer_kinds import KINDS, kind
from tests.support.examples import examples

BYTES_MAX = 20_000
"""Of some dozens of pieces, so that they are also forgotten."""


@cache
def known(name: str) -> PieceTokens:
    """Kept between examples, as an engine keeps it."""
    return PieceTokens(Tokenizer.from_str(kind(name)), bytes_max=BYTES_MAX, piece_chars=6)


@pytest.mark.parametrize("name", KINDS)
@settings(deadline=None, max_examples=examples(60))
@given(TEXTS, TEXTS, st.floats(0.0, 1.0), st.booleans())
def test_known_pieces_give_the_tokens_of_the_whole(name, text, other, share, special):
    for edited in (text, text[: int(len(text) * share)] + other, text + other):
        whole = reference(name).encode(edited, add_special_tokens=special).ids
        assert known(name).tokens(edited, special=special) == whole
