"""Where a text may be cut so that the tokens of its pieces, in order, are the tokens of the whole text.

*Before an added token* such as ``<|im_start|>``, a cut changes nothing: a tokenizer splits the text at added tokens
first and never merges across them. This holds for an added token that is matched before normalization, independently of
its neighbours, and that no other added token can overlap from the left. Words are cut after it, too, unless it absorbs
the space there, or the tokenizer does not give the same tokens then.

*Between two words*, before a single space that a letter follows, most tokenizers begin a new word. ``find_cuts`` tests
whether this tokenizer does, with neighbours of every kind, and whether any entry of its vocabulary or its added tokens
could join two words. For tokenizers that prepend a mark to each text (as Llama 2's), the space at a cut is left out.
Words are cut before a space and a digit or a punctuation mark, too, and between a letter and a mark or the end of a
line, where the same tests find that the tokenizer allows it; pieces are not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product, zip_longest
from typing import Final, Protocol

from tokenizers import AddedToken, Tokenizer

LETTERS: Final = "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u017f\u0391-\u03a1\u03a3-\u03c9\u0400-\u045f"
"""Latin, Greek, Cyrillic: letters that no normalization joins with a space before them."""
LETTERS_SEEN: Final = "".join(filter(re.compile(f"[{LETTERS}]").fullmatch, map(chr, range(0x500))))
ASCII_SEEN: Final = "".join(map(chr, range(ord("!"), ord("~") + 1)))
CUT_TOKENS_MAX: Final = 32
"""Added tokens that are searched for; those that occur in ``hint`` are preferred."""
NEIGHBOURS_BEFORE: Final = [*ASCII_SEEN, *"éßλяџ"]
NEIGHBOURS_BEHIND: Final = ["a", "I", "s ", "ll,", "été", "ža", "λό", "яб", "b1", "c-d", "E\n", "d\t"]
BEFORE_THOSE: Final = ["x", " ", "\n1"]
MARKS_SEEN: Final = "".join(char for char in ASCII_SEEN if not char.isalpha())
BEHIND_MARKS: Final = ["a", "1", "é", "\n", "'s", "- "]
BEFORE_MARKS: Final = ["x", "é", "1", ".", "*"]
WORD_ENDS: Final = "\n" + "".join(char for char in MARKS_SEEN if not char.isdigit() and char != "'")
"""What a tokenizer may tell apart from the letter before it. It keeps the two letters of "it's" together."""
ENDED_WORDS: Final = ["x", "é", "я", "I'm", ".aB"]
BEHIND_ENDS: Final = ["", "a", "é", "1", "\n\n", "\n ", "'s", "-", ". "]
BESIDE_TOKENS: Final = ["", "x", " ", " it", ".", "\n", "\n\n ", "é", "1"]
WORD_SPACE: Final = "\u2581"

PIECE_CHARS: Final = 1024
"""A piece ends at the first cut between two words after this many characters."""
TURN_CHARS: Final = 256
"""After this many characters a piece ends before an added token, such as one that begins a chat turn."""
PIECE_CHARS_MAX: Final = 256 * 1024
"""A longer piece is not tokenized: for text that a tokenizer cannot split, that would take minutes and gigabytes."""


class Words(Protocol):
    def cut(self, text: str) -> list[str]: ...

    def recall(self, text: str) -> tuple[list[bytes], list[str]]: ...

    def learn(self, words: dict[str, bytes]) -> int: ...

    def keep(self) -> None: ...

    def forget(self) -> None: ...


MakeWords = Callable[[str, str, bool, tuple[str, ...], str], Words]
"""From what may follow the space at a cut, what may precede it, whether the space is dropped, added tokens, and what
ends a word behind a letter (see ``PythonWords``).
"""


class PythonWords:
    """Cuts texts into words, and knows the tokens of those that it learned.

    Cuts are before each space that one of ``after`` follows and one of ``before`` precedes, around each of the
    added ``tokens``, and before each of ``ends`` behind a letter. ``drops_space``: a word after a cut is given without
    its space; ``tokens`` and ``ends`` must be empty then.
    """

    def __init__(self, after: str, before: str, drops_space: bool, tokens: tuple[str, ...], ends: str) -> None:
        cut = f"(?<=[{re.escape(before)}])(?= [{re.escape(after)}])"
        self._cut = re.compile(f"{cut}|(?<=[{LETTERS}])(?=[{re.escape(ends)}])" if ends else cut)
        self._drops_space = drops_space
        self._tokens = re.compile(f"({'|'.join(map(re.escape, tokens))})") if tokens else None
        self._known: dict[str, bytes] = {}
        self._kept: dict[str, bytes] = {}

    def cut(self, text: str) -> list[str]:
        """The words, each in the form in which it is tokenized."""
        parts = [text] if self._tokens is None else self._tokens.split(text)
        words: list[str] = []
        for between, token in zip_longest(parts[::2], parts[1::2], fillvalue=""):
            words += [*self._cut.split(between), token]
        words = [word for word in words if word]
        return words[:1] + [word[1:] for word in words[1:]] if self._drops_space else words

    def recall(self, text: str) -> tuple[list[bytes], list[str]]:
        """The tokens of known words, and the unknown words between them: one less."""
        runs: list[list[bytes]] = [[]]
        unknown: list[str] = []
        for word in self.cut(text):
            tokens = self._known.get(word)
            if tokens is None:
                unknown.append(word)
                runs.append([])
            else:
                runs[-1].append(tokens)
        return list(map(b"".join, runs)), unknown

    def learn(self, words: dict[str, bytes]) -> int:
        """Words and the tokens of each, as CBOR one after the other. Returns how many words are known then."""
        for word, tokens in words.items():
            self._known.setdefault(word, tokens)
        return len(self._known)

    def keep(self) -> None:
        """Words that were learned so far are not forgotten."""
        self._kept = dict(self._known)

    def forget(self) -> None:
        """Forget all others."""
        self._known = dict(self._kept)


@dataclass(frozen=True, slots=True)
class Cuts:
    """The cuts that a tokenizer allows. The patterns match where a piece may begin; None: no cut of this kind."""

    tokens: re.Pattern[str] | None
    words: re.Pattern[str] | None
    between_words: Words | None
    """Cuts at all of ``words``, and tokens at none."""
    drops_space: bool = False
    """A word after a cut is tokenized without the space before it."""
    chars_behind: int = 2
    """Behind a cut, as many characters as the longest match of the patterns: those alone decide that it is one, with
    the text before it.
    """

    def end(self, text: str, at: int, chars: int) -> int:
        """End of the piece that begins at ``at``: before an added token if there is one between ``TURN_CHARS`` and
        ``chars`` characters, else at the next cut below ``PIECE_CHARS_MAX`` characters, else the end of the text.
        """
        length, chars_min, chars_max = len(text), min(TURN_CHARS, chars), PIECE_CHARS_MAX
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


def find_cuts(tokenizer: Tokenizer, hint: str = "", make_words: MakeWords = PythonWords) -> Cuts:
    """The cuts of a tokenizer. ``hint``: text with the added tokens that matter most, such as the chat template. Raises
    ValueError for a tokenizer that gives one text different tokens.
    """
    if getattr(tokenizer.model, "dropout", None):
        raise ValueError("the tokenizer uses dropout, so its tokens are random")
    added = list(tokenizer.get_added_tokens_decoder().values())
    plain = sorted(plain_tokens(added), key=lambda content: content not in hint)[:CUT_TOKENS_MAX]
    absorbing = {token.content for token in added if token.rstrip}
    around = tuple(content for content in plain if content not in absorbing)
    tokens = re.compile("|".join(map(re.escape, sorted(plain, key=len, reverse=True)))) if plain else None
    chars_behind = max(2, *map(len, plain)) if plain else 2
    # A mark that begins an added token around which words are not cut may belong to that token.
    begins = "".join(token.content[:1] for token in added if token.content not in around)
    marks = "".join(char for char in MARKS_SEEN if char not in begins)
    # A mark in such a token would be cut off.
    within = "".join(token.content for token in added if token.content not in around)
    ends = "".join(char for char in WORD_ENDS if char not in within)
    for drops_space, cut_around, cut_before, cut_ends in (
        (False, around, marks, ends),
        (False, around, marks, ""),
        (False, around, "", ""),
        (False, (), "", ""),
        (True, (), "", ""),
    ):
        cuts = _word_cuts(tokens, added, make_words, drops_space, cut_around, cut_before, cut_ends)
        if may_cut_words(tokenizer, cuts, cut_around, cut_before, cut_ends):
            return replace(cuts, chars_behind=chars_behind)
    return Cuts(tokens, None, None, chars_behind=chars_behind)


def _word_cuts(
    tokens: re.Pattern[str] | None,
    added: Sequence[AddedToken],
    make_words: MakeWords,
    drops_space: bool,
    around: tuple[str, ...],
    marks: str,
    word_ends: str,
) -> Cuts:
    # No cut after an added token that absorbs the following space, nor, if spaces are dropped, after any added token:
    # the text after it is tokenized separately, and its leading space must stay.
    ends = {token.content[-1:] for token in added if token.rstrip or drops_space}
    before = "".join(char for char in ASCII_SEEN if char not in ends) + LETTERS_SEEN
    # Begins with a literal, which ``re`` searches for fast.
    words = re.compile(f" (?<=[{re.escape(before)}] )(?=[{LETTERS}])")
    return Cuts(tokens, words, make_words(LETTERS_SEEN + marks, before, drops_space, around, word_ends), drops_space)


def plain_tokens(added: Sequence[AddedToken]) -> list[str]:
    """Added tokens before which any text may be cut."""
    contents = [token.content for token in added]
    return [token.content for token in added if _is_plain(token) and not _may_be_hidden(token.content, contents)]


def _is_plain(token: AddedToken) -> bool:
    first = token.content[:1]
    bent = token.normalized or token.lstrip or token.single_word
    # The added token before it may require that no word character follows, or absorb the following space.
    return bool(first) and not bent and not (first.isalnum() or first.isspace() or first == "_")


def _may_be_hidden(content: str, contents: Sequence[str]) -> bool:
    """Whether an added token could begin before an occurrence of ``content`` and end within or after it."""
    for other in contents:
        if other != content and content in other:
            return True
        if any(content.startswith(other[cut:]) for cut in range(1, len(other))):
            return True
    return False


def may_cut_words(tokenizer: Tokenizer, cuts: Cuts, around: tuple[str, ...], marks: str, ends: str) -> bool:
    """Tests the tokenizer: its pre-tokenizer or, failing that and without ``ends``, its vocabulary, and the tokens of
    two texts: of words with all neighbours, ``marks`` after the space and ``ends`` behind a letter among them, and of
    the added tokens in ``around``, where words are cut on both sides.
    """
    if any(_reaches_over_space(token, marks) for token in tokenizer.get_added_tokens_decoder().values()):
        return False
    neighbours = chain(
        product(BEFORE_THOSE, NEIGHBOURS_BEFORE, NEIGHBOURS_BEHIND),
        product(["x"], NEIGHBOURS_BEFORE, marks),
        product(["x"], BEFORE_MARKS, map("".join, product(marks, BEHIND_MARKS))),
    )
    text = " ".join(f"{a}{b} {c}" for a, b, c in neighbours)
    text += "".join(f" {a}{b}{c}" for a, b, c in product(ENDED_WORDS, ends, BEHIND_ENDS))
    assert cuts.between_words is not None
    pieces = cuts.between_words.cut(text)
    if not (_same_words(tokenizer, text, pieces) or (not ends and _joins_no_words(tokenizer))):
        return False
    with_tokens = "".join(f"{a}{token}{b}" for a, token, b in product(BESIDE_TOKENS, around, BESIDE_TOKENS))
    return all(_same_tokens(tokenizer, one, cuts.between_words.cut(one)) for one in (text, with_tokens))


def _same_tokens(tokenizer: Tokenizer, text: str, pieces: list[str]) -> bool:
    whole: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    encoded = tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
    return whole == list(chain.from_iterable(one.ids for one in encoded))


def _reaches_over_space(token: AddedToken, marks: str) -> bool:
    content = token.content
    if re.search(rf"\S (?:[{LETTERS}{re.escape(marks)}]|$)", content) is not None:
        return True
    takes_space = token.rstrip and re.search(f"[{LETTERS}]$", content) is not None
    return takes_space or (token.single_word and content[:1].isspace())


def _same_words(tokenizer: Tokenizer, text: str, pieces: list[str]) -> bool:
    """Whether the pre-tokenizer splits the pieces into the same words as the text."""
    normalizer, splitter = tokenizer.normalizer, tokenizer.pre_tokenizer
    if splitter is None:
        return False

    def split(part: str) -> list[str]:
        normal = part if normalizer is None else normalizer.normalize_str(part)
        return [word for word, _where in splitter.pre_tokenize_str(normal)]

    return split(text) == list(chain.from_iterable(map(split, pieces)))


def _joins_no_words(tokenizer: Tokenizer) -> bool:
    """Whether no token of the vocabulary spans the end of a word and the mark that begins the next."""
    if type(tokenizer.model).__name__ not in ("BPE", "Unigram"):
        return False
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    joins = re.compile(f"[^{WORD_SPACE} ][{WORD_SPACE} ]")
    return WORD_SPACE in vocabulary and not any(map(joins.search, vocabulary))


def special_tokens(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer adds before and after a text. Raises ValueError."""
    plain: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
    with_special: list[int] = tokenizer.encode("a", add_special_tokens=True).ids
    for begin in range(len(with_special) - len(plain) + 1):
        if plain and with_special[begin : begin + len(plain)] == plain:
            return with_special[:begin], with_special[begin + len(plain) :]
    raise ValueError("the special tokens that it adds cannot be separated from the text")
