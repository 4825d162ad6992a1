"""Words of texts, and their tokens, are the same in C and in Python."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.router.tokenize.words import IS_COMPILED
from shared.text_cuts import ASCII_SEEN, LETTERS_SEEN, PythonWords
from tests.support.examples import examples

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="not built here")

TEXTS = st.text(alphabet="ab  Zé1-.\n\tλя\u00d7\u00a0漢🙂", max_size=30)
"""With spaces of all neighbours, in strings of one, two and four bytes a character."""
ENDS = st.sets(st.sampled_from("-.>a"))


@settings(deadline=None, max_examples=examples(300))
@given(TEXTS, ENDS, st.booleans(), st.data())
@example("", set(), False, None)
@example(" a", set(), True, None)
@example("  a  b ", set(), True, None)
def test_words_and_their_tokens_equal_those_of_python(text, ends, drops_space, data):
    from services.router.native._words import NativeWords  # may not be built

    before = "".join(char for char in ASCII_SEEN if char not in ends) + LETTERS_SEEN
    python = PythonWords(LETTERS_SEEN, before, drops_space)
    native = NativeWords(LETTERS_SEEN, before, drops_space)

    words = python.cut(text)
    assert native.cut(text) == words
    kinds = st.lists(st.sampled_from(["known", "more", "none"]), min_size=len(words), max_size=len(words))
    drawn = data.draw(kinds) if data is not None else ["known"] * len(words)
    known = {word: (word.encode(), b"!") for word, kind in zip(words, drawn, strict=True) if kind == "known"}
    more = {word: () for word, kind in zip(words, drawn, strict=True) if kind == "more"}
    assert native.recall(text, known, more) == python.recall(text, known, more)


@pytest.mark.parametrize("arguments", [(), ("a",), (b"a", {}, {}), ("a", {}, []), ("a", {"a": [b"x"]}, {})], ids=repr)
def test_what_is_no_text_or_no_dictionary_of_tokens_is_refused(arguments):
    from services.router.native._words import NativeWords

    with pytest.raises(TypeError):
        NativeWords("a", "a", False).recall(*arguments)


def test_letters_beyond_the_table_are_refused():
    from services.router.native._words import NativeWords

    with pytest.raises(ValueError, match="28450 is beyond 2047"):
        NativeWords("漢", "a", False)
