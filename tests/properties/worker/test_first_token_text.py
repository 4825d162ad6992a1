"""The text of a stream does not depend on how much of its prompt is decoded before it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from services.worker.engines.vllm.decode_stream import TAIL_TOKENS, TailDecodeStream
from tests.properties.router.tokenizer_kinds import KINDS, SPECIAL

PIECES = st.one_of(
    st.sampled_from([*SPECIAL, " ", "\n\n", " the", "ing", "é", "日本", "🙂", " don't .", "##"]), st.text(max_size=6)
)
TEXTS = st.lists(PIECES, min_size=1, max_size=60).map("".join)
LONG = st.sampled_from(["word " * TAIL_TOKENS, "</s>" * TAIL_TOKENS, "日本" * TAIL_TOKENS, ""])
"""So that the end which is decoded may begin anywhere, and may have no text."""


def texts(stream, tokenizer, tokens):
    """Of each token, or the error that vLLM recovers from."""
    told = []
    for token in tokens:
        try:
            told.append(stream.step(tokenizer, token))
        except Exception as error:
            return [*told, str(error).partition(":")[0]]
    return told


@pytest.mark.parametrize("kind", KINDS)
@given(before=TEXTS, long=LONG, behind=TEXTS, answer=TEXTS, cut=st.integers(0, 3), skip=st.booleans())
def test_the_end_of_the_prompt_is_enough(kind, before, long, behind, answer, cut, skip):
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(before + long + behind).ids
    ids = ids[: len(ids) - cut]
    tokens = tokenizer.encode(answer, add_special_tokens=False).ids[:12]

    whole = texts(DecodeStream(ids=ids, skip_special_tokens=skip), tokenizer, tokens)

    assert texts(TailDecodeStream(ids, skip), tokenizer, tokens) == whole
