"""What a simulated engine works on: one leg's sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from replay.block_pool import Holding

PRIVATE = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(slots=True, eq=False)
class Job:
    """``tokens`` are the prompt's and then the generated ones; KV exists for the first ``computed`` of them.

    While it decodes, both are as of ``since_step``; see ``Engine.tokens_of``.
    """

    number: int
    """Unique among all jobs."""
    chain: tuple[int, ...]
    """Names of the prompt's full blocks."""
    prompt_tokens: int
    output_tokens: int
    owner: Any = None
    """The caller's, never read here."""
    fetches: bool = False
    """It wants KV from elsewhere before it is computed."""
    granted: int | None = None
    """Tokens of the prompt, from its start, that can be had from elsewhere or here; None: not asked yet."""
    asked: bool = False
    tokens: int = 0
    computed: int = 0
    filled: int = 0
    """Full blocks that have been considered for a name."""
    holding: Holding = field(default_factory=Holding)
    order: int = 0
    """Of its admission to the batch; 0: not in it."""
    since_step: int = -1
    """When it began to decode; -1: it does not."""
    cached_tokens: int = 0
    """Of the prompt, found here when it was first scheduled."""
    received_tokens: int = 0
    received_s: float = 0.0
    """From room being made for them to their arrival."""
    scheduled_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    preemptions: int = 0

    def __post_init__(self) -> None:
        self.tokens = self.tokens or self.prompt_tokens

    @property
    def generated(self) -> int:
        """Tokens of the completion, as of ``since_step``."""
        return self.tokens - self.prompt_tokens

    @property
    def last_tokens(self) -> int:
        """Its length when it has finished."""
        return self.prompt_tokens + self.output_tokens

    def name_of(self, index: int) -> int:
        """The name of a block; those with generated tokens are like no other."""
        if index < len(self.chain):
            return self.chain[index]
        return ((self.number << 12 | index) * PRIVATE) & _MASK

    def cacheable(self, block_tokens: int) -> int:
        """Blocks that need not be computed. The last token always is: the next one follows from it."""
        return (self.tokens - 1) // block_tokens
