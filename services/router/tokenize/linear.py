"""Whether the time of a tokenizer grows with a text's length alone, whatever the text.

Regular expressions that others have written may backtrack at one text and at no other, so no trial finds all of them.
Those of the usual models are alternatives that are known; where a tokenizer has another one, the event loop does not
wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece

CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
CASED: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
)
LINEAR: Final = frozenset((
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", CONTRACTIONS, r"'(?i:[sdmt]|ll|ve|re)"),
    *(r"\p{L}+", r" ?\p{L}+", r"\s?\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?+\p{L}+"),
    *(r"[^\r\n\p{L}\p{N}]?+\p{L}++", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"),
    *(*CASED, *(f"{one}{CONTRACTIONS}?" for one in CASED)),
    *(r"\p{N}", r"\p{N}+", r" ?\p{N}+", r"\p{N}{1,3}", r"\p{N}{1,3}+", r"\d", "[0-9]", "[0-9][0-9][0-9]"),
    *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
    *(r" ?[^\s\p{L}\p{N}]++[\r\n]*", r" ?[^\s\p{L}\p{N}]++[\r\n]*+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),
    *(r" ?[\p{P}\p{S}]+[\r\n]*", r"\s?\p{P}+", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", r"[\p{Han}]+"),
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    *(r"\s*[\r\n]+", r"\s*[\r\n]", r"[\r\n]", r"\s+(?!\S)", r"\s+", r"\s", r"\s+$", r"\s++$", r"\S+", " "),
))  # fmt: skip
"""Each is tried at most once at each character of a run, and takes at most that run."""
TOKEN_CHARS_MAX: Final = 256
"""A Unigram or WordPiece model looks for a token of each length up to its longest, at each character."""


def is_linear(tokenizer: Tokenizer) -> bool:
    """Asks the tokenizer and not its JSON, which another parser may read in another way."""
    if not _looks_at_few(tokenizer):
        return False
    parts = (part.__getstate__() for part in (tokenizer.normalizer, tokenizer.pre_tokenizer) if part is not None)
    return all(map(_is_known, _patterns([msgspec.json.decode(part) for part in parts])))


def _looks_at_few(tokenizer: Tokenizer) -> bool:
    model = tokenizer.model
    if isinstance(model, WordPiece):
        return model.max_input_chars_per_word <= TOKEN_CHARS_MAX
    if isinstance(model, Unigram):
        return all(len(token) <= TOKEN_CHARS_MAX for token in tokenizer.get_vocab(with_added_tokens=False))
    return isinstance(model, (BPE, WordLevel))


def _patterns(value: Any) -> Iterator[object]:
    if isinstance(value, dict):
        for key, one in value.items():
            if key == "Regex":
                yield one
            else:
                yield from _patterns(one)
    elif isinstance(value, list):
        for one in value:
            yield from _patterns(one)


def _is_known(pattern: object) -> bool:
    return isinstance(pattern, str) and LINEAR.issuperset(alternatives(pattern))


def alternatives(pattern: str) -> list[str]:
    """What is separated by ``|`` outside of parentheses and brackets. Ends of lines are written as escapes."""
    found, depth, brackets, escaped = [""], 0, 0, False
    for char in pattern:
        if char == "|" and not (depth or brackets or escaped):
            found.append("")
            continue
        if not escaped:
            brackets += (char == "[") - (char == "]" and brackets > 0)
            if not brackets:
                depth += (char == "(") - (char == ")")
        escaped = char == "\\" and not escaped
        found[-1] += {"\r": r"\r", "\n": r"\n"}.get(char, char)
    return found
