"""The response to a prefetch: what the worker had of the prompt, has read, and lacks."""

from __future__ import annotations

import msgspec

from services.router.admission.prefetches import NOTHING_TO_FETCH
from services.router.placement.placement import Placement
from services.router.request.context import RequestContext
from services.router.request.errors import is_anthropic
from services.router.request.http_request import header_lines


class PrefetchAnswer(msgspec.Struct, kw_only=True):
    """The body of the response. Counts are of tokens, and may be a little less than what is cached: of whole blocks."""

    object: str = "baton.prefetch"
    model: str
    worker: str
    """The worker to which the next turn would go now."""
    prompt_tokens: int
    held_tokens: int
    """Tokens that it had before."""
    fetched_tokens: int
    missing_tokens: int
    """Tokens that it would have to compute."""
    seconds: float
    reason: str
    """Why nothing, or not all, was fetched; empty when all was."""


def prefetch_answer(context: RequestContext, placement: Placement) -> bytes:
    """The response's body."""
    done, prompt = context.prefetch, context.prompt
    assert done is not None
    assert prompt is not None
    is_unread = done.failure == NOTHING_TO_FETCH and not prompt.exact
    answer = PrefetchAnswer(
        model=context.facts.model or placement.decode.record.model,
        worker=done.worker_id,
        prompt_tokens=prompt.tokens,
        held_tokens=done.held_tokens,
        fetched_tokens=done.fetched_tokens,
        missing_tokens=max(0, prompt.tokens - done.held_tokens - done.fetched_tokens),
        seconds=round(done.seconds, 6),
        reason=(prompt.why if is_unread else "") or done.failure,
    )
    return msgspec.json.encode(answer)


def prefetch_headers(context: RequestContext) -> bytes:
    """The response's headers."""
    request_id = context.http_request.head.request_id.encode()
    headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id), *context.decision_headers()]
    if is_anthropic(context.http_request.head.path):
        headers.append((b"request-id", request_id))
    return header_lines(headers)
