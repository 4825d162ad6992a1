"""The simulated model's response, computed without an engine, a cache or a service."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.worker.engines.simulated.core.settings import SimulationSettings
from services.worker.engines.simulated.core.tokens import ROOT_CONTENT, TokenSampler, block_content
from services.worker.engines.simulated.model import SimulatedTokenizer
from services.worker.tiny_model import ensure_tiny_tokenizer

BLOCK_TOKENS = SimulationSettings().block_size


class Oracle:
    """Answers of baton-tiny to requests that ignore the end token."""

    def __init__(self, cache_dir: Path) -> None:
        tokenizer = SimulatedTokenizer(ensure_tiny_tokenizer(cache_dir))
        self.model = tokenizer.model
        self._texts = tokenizer.texts
        self._sampler = TokenSampler(self.model.sayable, self.model.eos)

    def answer(self, prompt: Sequence[int], count: int) -> list[int]:
        """The ``count`` tokens that follow."""
        tokens, contents = list(prompt), list[int]()
        for _ in range(count):
            del contents[(len(tokens) - 1) // BLOCK_TOKENS :]  # The last block has one more token now.
            for start in range(len(contents) * BLOCK_TOKENS, len(tokens), BLOCK_TOKENS):
                before = contents[-1] if contents else ROOT_CONTENT
                contents.append(block_content(before, tokens[start : start + BLOCK_TOKENS]))
            tokens.append(self._sampler.next_token(contents, may_end=False))
        return tokens[len(prompt) :]

    def text(self, tokens: Sequence[int]) -> str:
        """As a client reads it."""
        return "".join(self._texts[token] for token in tokens)
