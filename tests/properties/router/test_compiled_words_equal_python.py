"""Words of texts, and their tokens, are the same in C and in Python."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.router.tokenize.words import IS_COMPILED
from shared.text_cuts import ASCII_SEEN, LETTERS_SEEN, PythonWords
from tests.support.examples import examples

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="not built here")

ADDED = ("<|a|>", "<é>", "<", "a-", "漢b", "é")
"""One begins like others, and one with a letter."""
TEXTS = st.lists(
    st.one_of(st.text(alphabet="ab  Zé1-.\n\tλя\u00d7\u00a0漢🙂<|>", max_size=12), st.sampled_from(ADDED)), max_size=6
).map("".join)
"""With spaces of all neighbours, in strings of one, two and four bytes a character."""
ENDS = st.sets(st.sampled_from("-.>a"))
WORD_ENDS = st.sets(st.sampled_from("-.>\n|")).map(sorted).map("".join)
MARKS = st.sets(st.sampled_from("-.<1|")).map(sorted).map("".join)
TOKENS = st.lists(st.sampled_from(ADDED), unique=True).map(tuple)


@settings(deadline=None, max_examples=examples(300))
@given(TEXTS, ENDS, MARKS, st.booleans(), TOKENS, WORD_ENDS, st.data())
@example("", set(), "", False, (), "", None)
@example(" a", set(), "", True, (), "", None)
@example("  a  b ", set(), "", True, (), "", None)
@example("<|a|><|a|> a <|a|>", set(), "<", False, ("<|a|>",), "", None)
@example("é. Zé.-1.b\n\na.", set(), "", False, (), ".\n", None)
def test_words_and_their_tokens_equal_those_of_python(text, ends, marks, drops_space, tokens, word_ends, data):
    from services.router.native._tokenize import NativeWords  # may not be built

    before = "".join(char for char in ASCII_SEEN if char not in ends) + LETTERS_SEEN
    tokens, word_ends = ((), "") if drops_space else (tokens, word_ends)
    python = PythonWords(LETTERS_SEEN + marks, before, drops_space, tokens, word_ends)
    native = NativeWords(LETTERS_SEEN + marks, before, drops_space, tokens, word_ends)

    words = python.cut(text)
    assert native.cut(text) == words
    assert drops_space or "".join(words) == text
    for words_kept in (data.draw(st.lists(st.sampled_from(words))) if data and words else words, words):
        learned = {word: word.encode() * 9 + b"!" for word in words_kept}
        assert python.learn(learned) == native.learn(learned) == len(learned)
        runs, unknown = found = python.recall(text)
        assert native.recall(text) == found
        assert len(runs) == len(unknown) + 1
        assert unknown == [word for word in words if word not in learned]
        assert b"".join(runs) == b"".join(learned.get(word, b"") for word in words)
        if words_kept is not words:
            python.keep()
            native.keep()
    python.forget()
    native.forget()
    assert native.recall(text) == python.recall(text)
    assert native.learn({}) == python.learn({})


def test_many_words_are_kept_and_forgotten_apart():
    from services.router.native._tokenize import NativeWords

    words = NativeWords("a", "a", False, (), "")
    kept, others = ({f"{kind}{number}": b"%d" % number for number in range(5000)} for kind in "кo")
    assert words.learn(kept) == 5000
    words.keep()

    for _ in range(2):
        assert words.learn(others) == 10_000
        assert all(words.recall(word) == ([tokens], []) for word, tokens in (kept | others).items())
        words.forget()
        assert words.learn({}) == 5000
        assert all(words.recall(word) == ([tokens], []) for word, tokens in kept.items())
        assert all(words.recall(word) == ([b"", b""], [word]) for word in others)


def test_what_is_known_already_stays():
    from services.router.native._tokenize import NativeWords

    for words in (NativeWords("a", "a", False, (), ""), PythonWords("a", "a", False, (), "")):
        words.learn({"a": b"1"})
        assert words.learn({"a": b"2", "b": b"3"}) == 2
        assert words.recall("a") == ([b"1"], [])


@pytest.mark.parametrize("text", [None, b"a", 1], ids=repr)
def test_what_is_no_text_is_refused(text):
    from services.router.native._tokenize import NativeWords

    words = NativeWords("a", "a", False, (), "")
    for method in (words.cut, words.recall):
        with pytest.raises(TypeError):
            method(text)


def test_a_text_that_cannot_be_utf8_is_refused():
    from services.router.native._tokenize import NativeWords

    with pytest.raises(UnicodeEncodeError):
        NativeWords("a", "a", False, (), "").recall("a \ud800")


@pytest.mark.parametrize("words", [[], {"a": ("x",)}, {b"a": b"x"}], ids=repr)
def test_what_are_no_words_and_tokens_is_refused(words):
    from services.router.native._tokenize import NativeWords

    with pytest.raises(TypeError):
        NativeWords("a", "a", False, (), "").learn(words)


def test_letters_beyond_the_table_are_refused():
    from services.router.native._tokenize import NativeWords

    with pytest.raises(ValueError, match="28450 is beyond 2047"):
        NativeWords("漢", "a", False, (), "")


@pytest.mark.parametrize("token", ["", b"<a>", None], ids=repr)
def test_what_is_no_added_token_is_refused(token):
    from services.router.native._tokenize import NativeWords

    with pytest.raises(TypeError, match="an added token must be a string"):
        NativeWords("a", "a", False, ("<b>", token), "")
