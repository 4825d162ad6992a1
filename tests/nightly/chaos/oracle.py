"""The simulated model's response, computed without an engine, a cache or a service."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

from services.worker.engines.adapters import copy_adapter
from services.worker.engines.simulated.core.settings import SimulationSettings
from services.worker.engines.simulated.core.tokens import TokenSampler, block_content, root_content
from services.worker.engines.simulated.model import SimulatedTokenizer
from services.worker.tiny_model import ensure_tiny_tokenizer

BLOCK_TOKENS = SimulationSettings().block_size
LONG_WORDS = 64
"""Long texts are made of so many words, the longest of the vocabulary."""


MODEL = "baton-tiny"
OTHER_MODEL = "baton-other"
"""Another model, with the same tokenizer and the same answers."""
ADAPTER = "chaos-lora"
"""A LoRA adapter of baton-tiny, with answers of its own."""


def write_adapter(folder: Path) -> Path:
    """The adapter's files, in a new folder of its name."""
    adapter = folder / ADAPTER
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"any")
    return adapter


class Oracle:
    """Answers of baton-tiny to requests that ignore the end token."""

    def __init__(self, cache_dir: Path) -> None:
        self._tokenizer = tokenizer = SimulatedTokenizer(ensure_tiny_tokenizer(cache_dir))
        self.model = tokenizer.model
        self._texts = tokenizer.texts
        self._sampler = TokenSampler(self.model.sayable, self.model.eos)
        with tempfile.TemporaryDirectory() as folder:
            files = copy_adapter(write_adapter(Path(folder)), Path(folder))
        self._adapter = (ADAPTER, f"sha256:{files.digest}")
        self._long_words = sorted(self._texts.values(), key=lambda text: (-len(text), text))[:LONG_WORDS]

    def answer(self, prompt: Sequence[int], count: int, model: str = MODEL) -> list[int]:
        """The ``count`` tokens that follow."""
        root = root_content(self._adapter if model == ADAPTER else None)
        tokens, contents = list(prompt), list[int]()
        for _ in range(count):
            del contents[(len(tokens) - 1) // BLOCK_TOKENS :]  # The last block has one more token now.
            for start in range(len(contents) * BLOCK_TOKENS, len(tokens), BLOCK_TOKENS):
                before = contents[-1] if contents else root
                contents.append(block_content(before, tokens[start : start + BLOCK_TOKENS]))
            tokens.append(self._sampler.next_token(contents, may_end=False))
        return tokens[len(prompt) :]

    def text(self, tokens: Sequence[int]) -> str:
        """As a client reads it."""
        return "".join(self._texts[token] for token in tokens)

    def sayable(self, tokens: Sequence[int]) -> list[int]:
        """Each token that is no text by itself replaced by one that is."""
        sayable = self.model.sayable
        return [token if token in self._texts else sayable[token % len(sayable)] for token in tokens]

    def tokens(self, prompt: Sequence[int] | str | tuple[tuple[str, str], ...]) -> list[int]:
        """Of a prompt as an engine reads it: a text, tokens, or the roles and texts of a chat."""
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt, special=True)
        if prompt and isinstance(prompt[0], tuple):
            messages = [{"role": role, "content": text} for role, text in prompt]  # type: ignore[misc]
            variables = {"tools": None, "add_generation_prompt": True}
            return self._tokenizer.encode(self._tokenizer.render_chat(messages, variables), special=False)
        return list(prompt)  # type: ignore[arg-type]

    def long_text(self, chance: random.Random, size: int) -> str:
        """Words, of about so many bytes."""
        words: list[str] = []
        while size > 0:
            words.append(chance.choice(self._long_words))
            size -= len(words[-1])
        return "".join(words)
