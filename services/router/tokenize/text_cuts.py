"""Where a text may be cut so that its pieces, tokenized one by one, give the tokens of the whole.

*Before an added token* such as ``<|im_start|>`` a cut changes nothing: a tokenizer takes these out of the text first
and never looks across them. Only tokens that are matched in plain sight count: as they stand (not after normalization),
whatever is beside them, and so that no other added token could begin earlier and reach into them.

*Between two words*, before a single space with a letter behind it, most tokenizers begin a new word. This one is asked
whether it does, on every kind of neighbours, and whether anything in its vocabulary or its added tokens could join two
words. Tokenizers that put a mark before each text that they are given (as Llama 2's) are cut with the space left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product

from tokenizers import AddedToken, Tokenizer

LETTERS = "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u017f\u0391-\u03a1\u03a3-\u03c9\u0400-\u045f"
"""Latin, Greek, Cyrillic: letters that no normalization joins with a space before them."""
ASCII_SEEN = "".join(map(chr, range(ord("!"), ord("~") + 1)))
CUT_TOKENS_MAX = 32
"""Added tokens that are looked for: those that templates use come first."""
NEIGHBOURS_BEFORE = [*ASCII_SEEN, *"éßλяџ"]
NEIGHBOURS_BEHIND = ["a", "I", "s ", "ll,", "été", "ža", "λό", "яб", "b1", "c-d", "E\n", "d\t"]
BEFORE_THOSE = ["x", " ", "\n1"]
WORD_SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class Cuts:
    """The cuts that a tokenizer allows. The patterns match where a piece may begin; None: nowhere of this kind."""

    tokens: re.Pattern[str] | None
    words: re.Pattern[str] | None
    word: re.Pattern[str] | None
    """One word and what cannot be cut from it."""
    drops_space: bool = False
    """The space before a word is no part of it."""

    def end(self, text: str, at: int, chars_min: int, chars: int, chars_max: int) -> int:
        """Where the piece ends that begins at ``at``: before an added token, if one comes after ``chars_min``
        characters and before ``chars``; else at the next cut, if one comes before ``chars_max``.
        """
        length = len(text)
        if length - at <= chars_min:
            return length
        if self.tokens is not None:
            until = at + (chars if self.words is not None else chars_max)
            found = self.tokens.search(text, at + chars_min, until)
            if found is not None:
                return found.start()
        if self.words is not None and length - at > chars:
            found = self.words.search(text, at + chars, at + chars_max)
            if found is not None:
                return found.start()
        return length


def find_cuts(tokenizer: Tokenizer, hint: str = "") -> Cuts:
    """``hint``: some text in which the tokens that matter most occur."""
    added = list(tokenizer.get_added_tokens_decoder().values())
    plain = sorted(plain_tokens(added), key=lambda content: content not in hint)[:CUT_TOKENS_MAX]
    tokens = re.compile("|".join(map(re.escape, sorted(plain, key=len, reverse=True)))) if plain else None
    for drops_space in (False, True):
        cuts = _word_cuts(tokens, added, drops_space=drops_space)
        if may_cut_words(tokenizer, cuts):
            return cuts
    return Cuts(tokens, None, None)


def _word_cuts(tokens: re.Pattern[str] | None, added: Sequence[AddedToken], *, drops_space: bool) -> Cuts:
    # An added token may take the space behind it along, and what stands behind it is a text of its own: one that begins
    # with a space, which must not be dropped.
    ends = {token.content[-1:] for token in added if token.rstrip or drops_space}
    before = "".join(re.escape(char) for char in ASCII_SEEN if char not in ends) + LETTERS
    words = re.compile(f" (?<=[{before}] )(?=[{LETTERS}])")  # it begins with what is quickly found
    word = re.compile(f" ?[^ ]*(?: (?![{LETTERS}])[^ ]*|(?<![{before}]) [^ ]*)*")
    return Cuts(tokens, words, word, drops_space)


def plain_tokens(added: Sequence[AddedToken]) -> list[str]:
    """Added tokens before which any text may be cut."""
    contents = [token.content for token in added]
    return [token.content for token in added if _is_plain(token) and not _may_be_hidden(token.content, contents)]


def _is_plain(token: AddedToken) -> bool:
    first = token.content[:1]
    bent = token.normalized or token.lstrip or token.single_word
    # A token before it may want no word character behind it, or take the space behind it along.
    return bool(first) and not bent and not (first.isalnum() or first.isspace() or first == "_")


def _may_be_hidden(content: str, contents: Sequence[str]) -> bool:
    """Whether another token, or this one, could begin before an occurrence of it and end within or behind it."""
    for other in contents:
        if other != content and content in other:
            return True
        if any(content.startswith(other[cut:]) for cut in range(1, len(other))):
            return True
    return False


def may_cut_words(tokenizer: Tokenizer, cuts: Cuts) -> bool:
    """Asked of the tokenizer itself: its rules for words, or where it has none its vocabulary; and its tokens."""
    if any(_reaches_over_space(token) for token in tokenizer.get_added_tokens_decoder().values()):
        return False
    text = " ".join(f"{a}{b} {c}" for a, b, c in product(BEFORE_THOSE, NEIGHBOURS_BEFORE, NEIGHBOURS_BEHIND))
    pieces = cut_words(cuts, text)
    if not (_same_words(tokenizer, text, pieces) or _joins_no_words(tokenizer)):
        return False
    whole: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    encoded = tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
    return whole == list(chain.from_iterable(one.ids for one in encoded))


def cut_words(cuts: Cuts, text: str) -> list[str]:
    """``text`` at all its cuts between words, in the form in which its pieces are tokenized."""
    assert cuts.word is not None
    words: list[str] = cuts.word.findall(text)
    if not words[-1]:
        words.pop()
    return words[:1] + [word[1:] for word in words[1:]] if cuts.drops_space else words


def _reaches_over_space(token: AddedToken) -> bool:
    content = token.content
    if re.search(rf"\S (?:[{LETTERS}]|$)", content) is not None:
        return True
    takes_space = token.rstrip and re.search(f"[{LETTERS}]$", content) is not None
    return takes_space or (token.single_word and content[:1].isspace())


def _same_words(tokenizer: Tokenizer, text: str, pieces: list[str]) -> bool:
    """Whether the words that the model is given, one by one, are the same."""
    normalizer, splitter = tokenizer.normalizer, tokenizer.pre_tokenizer
    if splitter is None:
        return False

    def split(part: str) -> list[str]:
        normal = part if normalizer is None else normalizer.normalize_str(part)
        return [word for word, _where in splitter.pre_tokenize_str(normal)]

    return split(text) == list(chain.from_iterable(map(split, pieces)))


def _joins_no_words(tokenizer: Tokenizer) -> bool:
    """Whether no token of the vocabulary has a word's end and the mark of the next word's beginning in it."""
    if type(tokenizer.model).__name__ not in ("BPE", "Unigram"):
        return False
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    joins = re.compile(f"[^{WORD_SPACE} ][{WORD_SPACE} ]")
    return WORD_SPACE in vocabulary and not any(map(joins.search, vocabulary))
