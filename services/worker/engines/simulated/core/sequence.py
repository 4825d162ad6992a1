"""A sequence of the simulated engine: a prompt and its completion."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from shared.contracts.kv_exchange import KvTransferReport, LegOrder

LENGTH, STOP, ABORT = "length", "stop", "abort"
CACHE_THRESHOLD = "cache_threshold"
"""Finish reason of a refused sequence: too little of its prompt was cached or could be fetched."""
NO_ORDER = LegOrder()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParams:
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Collection[int] = ()
    expected_tokens: int = -1
    """Prompt tokens that the router expects to be computed; -1: unknown."""
    cache_salt: str = ""
    """Only prompts with the same salt share blocks."""
    lora: tuple[str, str] | None = None
    """Its LoRA adapter: the name, and what is hashed for its files."""
    order: LegOrder = NO_ORDER
    """The worker's order about KV."""

    def ending(self, token: int, generated: int, eos: int | None) -> str:
        """The finish reason if ``token``, the ``generated``-th of the completion, ends it; otherwise ""."""
        if generated >= self.min_tokens and ((token == eos and not self.ignore_eos) or token in self.stop_token_ids):
            return STOP
        return LENGTH if generated >= self.max_tokens else ""


@dataclass(slots=True)
class SequenceStats:
    """Where the prompt's KV came from, and when things happened (seconds, on the caller's clock)."""

    arrived_at: float
    admitted_at: float | None = None
    """When blocks were free for its prompt. Reads from other engines begin then."""
    scheduled_at: float | None = None
    """When it was first part of a step, after its reads had ended."""
    first_token_at: float | None = None
    cached_tokens: int = 0
    received_tokens: int = 0
    received_bytes: int = 0
    received_s: float = 0.0
    transfer_report: KvTransferReport | None = None
    """Set at the first token, and again when the sequence has finished."""


@dataclass(slots=True, eq=False)
class Sequence:
    """``tokens``: prompt, then generated. KV exists for the first ``computed`` of them.

    It implements the ``EngineRequest`` of ``connector.reader``.
    """

    request_id: str
    owner: Any
    """Set and read by the caller only; returned with every token."""
    prompt_tokens: int
    tokens: list[int]
    params: RequestParams
    stats: SequenceStats
    hashes: list[bytes] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    receiving: int = 0
    """Number of blocks, after the computed ones, that are being read from other engines."""
    num_preemptions: int = 0
    finish_reason: str = ""

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        """Full hashes of all full blocks."""
        return self.hashes

    @property
    def generated(self) -> int:
        """Tokens of the completion so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def prompt_tokens_left(self) -> int:
        """Prompt tokens to compute: the expected number before it is first scheduled, the exact one after."""
        left = max(0, self.prompt_tokens - self.computed)
        waits = not self.computed and self.params.expected_tokens >= 0
        return min(left, self.params.expected_tokens) if waits else left
