"""For every kind of tokenizer and any text: tokenized piece by piece it has the tokens of the whole."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.router.tokenize.block_hash import NO_KEYS
from services.router.tokenize.segments import Segments
from shared.contracts.workers import HashScheme
from shared.text_cuts import find_cuts
from tests.properties.router.tokenizer_kinds import KINDS, kind
from tests.support.block_hashes import block_hashes
from tests.support.examples import examples

SCHEME = HashScheme(block_size=4)
FORBID_WORD_CUTS = {"joining"}

LETTERS = st.text(alphabet="abcdeXYZéßяλ", min_size=1, max_size=8)
ANYTHING = st.text(alphabet="ab d\n\t\r'.,;-_(){}<>|1290\u00a0\u200b\u0301é漢🙂я¨ ﬁＡ", max_size=12)
TOKENS = st.sampled_from(
    ["<|im_start|>", "<|im_end|>", "</s>", "<s>", "[INST]", "<unk>", "<left>", "<right>", "<word>", "<normal>", "x</s"]
)
WORDS = st.sampled_from(["the", "and", "then", "it's", "orchard,", "I'll", "we're.", "1234567", "right", "x"])
TEXTS = st.lists(st.one_of(LETTERS, ANYTHING, TOKENS, WORDS, st.just(" "), st.just(" ")), max_size=40).map("".join)


@cache
def segments(name: str) -> Segments:
    """Kept between examples, as a router keeps them: its caches must be right for every text."""
    return Segments(Tokenizer.from_str(kind(name)), SCHEME, cache_bytes_max=1 << 18, segment_chars=6)


@cache
def reference(name: str) -> Tokenizer:
    return Tokenizer.from_str(kind(name))


@pytest.mark.parametrize("name", KINDS)
@settings(deadline=None, max_examples=examples(60))
@given(TEXTS, st.booleans())
@example("<|im_start|>user\n Hello there, it's <|im_end|> a b <right> c d", True)
@example("a <left>b <right> c<word> d<normal> e <|im_start|><|im_start|><|im f x</s> g", False)
def test_pieces_give_the_tokens_of_the_whole(name, text, special):
    check(name, text, special=special)


def check(name: str, text: str, *, special: bool) -> None:
    tokens = reference(name).encode(text, add_special_tokens=special).ids
    cut = segments(name)
    walk = cut.begin(text, special=special, keys=NO_KEYS)

    while cut.advance(walk, lambda _block: True, 1 << 30):
        pass

    found = cut.prompt(walk)
    assert found.tokens == len(tokens)
    assert list(found.hashes) == block_hashes(tokens, SCHEME)


@pytest.mark.parametrize("name", KINDS)
@settings(deadline=None, max_examples=examples(60))
@given(TEXTS, TEXTS, st.floats(0.0, 1.0))
@example("the and then </s> it's orchard, right I'll we're. x", "n x", 0.5)
def test_texts_with_a_common_beginning_are_cut_by_their_own_contents(name, text, other, share):
    """Where one was cut, the other may not be, although the cache goes on with what came last."""
    for edited in (text, text[: int(len(text) * share)] + other, text):
        check(name, edited, special=False)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_tokenizer_allows_cuts(name):
    cuts = find_cuts(reference(name))

    assert (cuts.words is None) == (name in FORBID_WORD_CUTS)
    assert cuts.tokens is not None
    assert cuts.tokens.search("a<s>") is not None


def test_texts_are_not_cut_before_tokens_that_change_neighbouring_text():
    cuts = find_cuts(reference("odd_tokens"))
    assert cuts.tokens is not None

    found = [
        match.group() for match in cuts.tokens.finditer("<left><word><normal><|im_start|></s><s><right>right<|im_end|>")
    ]

    assert found == ["<s>", "<right>"]  # the others overlap with "x</s" or "<|im_start|><|im"
