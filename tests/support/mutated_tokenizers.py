"""Tokenizers and chat templates that are nearly right: a worker may send them, and no honest one does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
from tokenizers import Tokenizer, models, pre_tokenizers

from shared.contracts.control import TokenizerAsset

ATOMS = (r".", r"\p{L}", r"\s", r"\p{N}", "x", r"[^\s]", r"\x{416}", "'s", r"[\r\n]")
GROUPED: tuple[Callable[[str, str], str], ...] = (
    lambda a, b: f"(?:{a}|{b})+",
    lambda a, b: f"(?:{a}{b})*x",
    lambda a, b: f"({a}|{b}){{2,20}}",
    lambda a, b: f"(?:{a})+(?:{b})*(?!x)",
    lambda a, b: f"{a}|{b}",
    lambda a, b: f" ?(?:{a})+(?:{b})?",
)
PIECES = (
    "{% for m in messages %}",
    "{% endfor %}",
    "{{ m.role }}: {{ m.content }}\n",
    "{% if add_generation_prompt %}",
    "{% endif %}",
    "{{ messages[0]['content'] * 9999 }}",
    "{% for i in range(9999) %}",
    "{{ f(a=1,a=2) }}",
    "{{ (((1)))|string|upper }}",
    "{% set x = namespace(n=0) %}",
    "{% set x.n = x.n + 1 %}",
    "{% macro f(a) %}",
    "{% endmacro %}",
    "{{ raise_exception('no') }}",
    "{{ '%s' % ('x' * 99999) }}",
    "{{ m.content|replace('', 'ab') }}",
    "{{ messages.__class__ }}",
    "{%- generation %}",
    "{# ",
    "}}",
)
TEMPLATE = PIECES[:3]
ODDITIES = (None, True, -1, 1 << 40, 0.5, "", "x" * 3000, [], {}, {"type": "Nothing"}, {"Regex": "(?:.|.)+x"})
PROMPTS = ("The rain had stopped.", "\u0416" * 300, "x " * 200, "0" * 300, "\r\n\t " * 60, "it's " * 50 + "!")
"""Some are of runs that no trial has."""


class Mutant:
    """Made of a number; the same number makes the same one."""

    def __init__(self, number: int) -> None:
        self._random = random.Random(f"tokenizer {number}")

    def asset(self) -> TokenizerAsset:
        return TokenizerAsset(
            worker_id="w", epoch=1, tokenizer_json=self._tokenizer(), chat_template=self._template(), special_tokens={}
        )

    def _tokenizer(self) -> bytes:
        vocabulary = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        tree = msgspec.json.decode(Tokenizer(models.BPE(vocabulary, [])).to_str())
        splits = [self._split() for _ in range(self._random.randint(1, 2))]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        tree["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*splits, byte_level]}
        if self._random.random() < 0.4:
            tree["normalizer"] = {"type": "Sequence", "normalizers": [self._replace()] * self._random.choice((1, 12))}
        for _ in range(self._random.choice((0, 0, 0, 0, 1))):
            self._change(tree)
        packed = msgspec.json.encode(tree)
        return self._flipped(packed) if self._random.random() < 0.1 else packed

    def _split(self) -> dict[str, Any]:
        return {"type": "Split", "pattern": {"Regex": self._pattern(3)}, "behavior": "Isolated", "invert": False}

    def _replace(self) -> dict[str, Any]:
        kind, pattern = self._random.choice((("String", "x"), ("String", "\u0416"), ("Regex", self._pattern(2))))
        return {"type": "Replace", "pattern": {kind: pattern}, "content": "x" * self._random.choice((0, 1, 16))}

    def _pattern(self, depth: int) -> str:
        if not depth or self._random.random() < 0.2:
            return self._random.choice(ATOMS)
        return self._random.choice(GROUPED)(self._pattern(depth - 1), self._pattern(depth - 1))

    def _change(self, tree: dict[str, Any]) -> None:
        """One value somewhere in it is another, or missing."""
        at: Any = tree
        while True:
            key = self._random.choice(list(at) if isinstance(at, dict) else range(len(at)))
            if not (isinstance(at[key], (dict, list)) and at[key] and self._random.random() < 0.8):
                break
            at = at[key]
        if self._random.random() < 0.3:
            del at[key]
        else:
            at[key] = self._random.choice(ODDITIES)

    def _flipped(self, packed: bytes) -> bytes:
        at = self._random.randrange(len(packed))
        return packed[:at] + bytes([packed[at] ^ (1 << self._random.randrange(8))]) + packed[at + 1 :]

    def _template(self) -> str:
        pieces = list(TEMPLATE)
        for _ in range(self._random.randint(0, 6)):
            at = self._random.randint(0, len(pieces))
            pieces[at:at] = [self._random.choice(PIECES)] * self._random.choice((1, 1, 1, 2, 150))
        return "".join(pieces)
