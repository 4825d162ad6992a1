"""The hashes of a whole prompt at once."""

from __future__ import annotations

from collections.abc import Sequence

from services.router.tokenize.block_hash import extend_chain
from shared.contracts.workers import HashScheme


def block_hashes(
    tokens: Sequence[int], scheme: HashScheme, *, salt: str = "", adapter: tuple[str, str] | None = None
) -> list[int]:
    """The 64-bit hash of every full block of ``tokens``, first block first."""
    return extend_chain(None, tokens, scheme, salt=salt, adapter=adapter)[0]
