"""What the router knows of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Prompt(msgspec.Struct, frozen=True):
    """A tokenized or estimated prompt."""

    tokens: int
    hashes: Sequence[int]
    """Hashes of its blocks, at least as far as any worker held them."""
    exact: bool
    """Whether the cached tokens computed from ``hashes`` are those that the engine will find."""
    why: str = ""
    """Why it is not exact, where that is known; for people."""
    unsplittable: str = ""
    """Why one engine must serve the request; empty when two may, as far as the prompt shows."""
