"""One leg's sequence in a simulated engine."""

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
    """Set and read by the caller only."""
    fetches: bool = False
    """It fetches KV from other workers before it is computed."""
    granted: int | None = None
    """Prompt tokens, from the start, that are cached here or granted by others; None: not requested yet."""
    asked: bool = False
    tokens: int = 0
    computed: int = 0
    filled: int = 0
    """Full blocks that were offered to the prefix cache."""
    holding: Holding = field(default_factory=Holding)
    order: int = 0
    """Order of admission to the batch; 0: not in it."""
    since_step: int = -1
    """Step in which it began to decode; -1: not decoding."""
    cached_tokens: int = 0
    """Prompt tokens cached here when it was first scheduled."""
    received_tokens: int = 0
    received_s: float = 0.0
    """From the reservation of blocks to their arrival."""
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
        """Total length at the end."""
        return self.prompt_tokens + self.output_tokens

    def name_of(self, index: int) -> int:
        """Content name of a block; blocks with generated tokens are unique."""
        if index < len(self.chain):
            return self.chain[index]
        return ((self.number << 12 | index) * PRIVATE) & _MASK

    def cacheable(self, block_tokens: int) -> int:
        """Blocks that may come from a cache. The last token is always computed, since the next one follows from it."""
        return (self.tokens - 1) // block_tokens
