"""Request migration: a stream that broke off continues at another worker, after the tokens that its client has."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from services.router.placement.placement import PlacementRequest
from services.router.request.facts import Mode


def resumes_allowed(operator_max: int, client_max: int | None) -> int:
    """How often one stream may be resumed. A client may ask for less than the operator allows, never for more: a
    request that crashes engines must not reach all of them.
    """
    return operator_max if client_max is None else min(operator_max, client_max)


def continued(
    request: PlacementRequest, prompt_tokens: int, hashes: Sequence[int], relayed_tokens: int
) -> PlacementRequest:
    """The request for the rest of a stream. ``prompt_tokens`` and ``hashes`` include the ``relayed_tokens`` after the
    prompt. Its cache-hit threshold no longer counts: the stream has begun.
    """
    left = max(1, request.tokens_out - relayed_tokens) if request.tokens_out else 0
    mode = Mode.AUTO if request.mode is Mode.DECODE_FIRST else request.mode
    return msgspec.structs.replace(
        request, prompt_tokens=prompt_tokens, hashes=hashes, tokens_out=left, mode=mode, cache_hit_threshold=None
    )
