"""Prompts that share beginnings, as conversations do."""

from __future__ import annotations

import random

VOCABULARY = range(10, 3000)
"""Ordinary tokens of baton-tiny."""


def prompts_with_shared_prefixes(seed: int, *, shortest: int, longest: int = 3000, count: int = 20) -> list[list[int]]:
    """Lengths spread evenly; every other prompt begins as an earlier one does."""
    draw = random.Random(seed)
    prompts: list[list[int]] = []
    for number in range(count):
        length = shortest + (longest - shortest) * number // (count - 1)
        shared = draw.choice(prompts)[: draw.randint(1, length)] if number % 2 else []
        prompts.append(shared + draw.choices(VOCABULARY, k=length - len(shared)))
    return prompts


def random_prompt(name: str, tokens: int) -> list[int]:
    """Tests that share engines name theirs, so that none finds another's prompt cached."""
    return random.Random(name).choices(VOCABULARY, k=tokens)
