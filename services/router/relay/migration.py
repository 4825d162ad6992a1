"""What a request needs the second time: without the workers that failed it, and behind the tokens of its stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from services.router.placement.placement import Placement, PlacementRequest
from services.router.placement.request_fields import CHAT, COMPLETIONS, Mode, RequestFacts
from services.router.relay.failure_policy import RecoveryAction
from services.router.state.cluster_view import WorkerView
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.workers import Fingerprint, Role

RESUMES_MAX_MAX = 64
"""Of one request, whoever asks."""
HOP_SHARE_MAX = 0.5
"""Of what is left of a request's time, for one hop that might fail: the other half is for whoever takes over."""


def why_not_resumed(facts: RequestFacts) -> str:
    """Why the stream could go on nowhere else, as far as the router can tell; empty when it could. What an engine has
    to say about it, its worker says.
    """
    if facts.path not in (COMPLETIONS, CHAT):
        return "only completions and chats can go on elsewhere"
    return facts.whole


def resumes_allowed(operators: int, clients: int | None) -> int:
    """How often one stream may go on elsewhere: the client may ask for less than the operator allows, never for more,
    for a request that kills engines must not get to all of them.
    """
    return operators if clients is None else min(operators, clients)


def hop_s(left_s: float, hop_s_max: float, *, may_fail: bool) -> float:
    """How long one hop may take of a request that has ``left_s`` seconds; ``may_fail``: another attempt is allowed."""
    return min(hop_s_max, HOP_SHARE_MAX * left_s if may_fail else left_s)


def resumed(need: PlacementRequest, prompt_tokens: int, hashes: Sequence[int], relayed_tokens: int) -> PlacementRequest:
    """The need of a stream that goes on: ``prompt_tokens`` and ``hashes`` are those of the prompt and of the
    ``relayed_tokens`` behind it. It is too late to refuse it for what is cached.
    """
    left = max(1, need.tokens_out - relayed_tokens) if need.tokens_out else 0
    mode = Mode.AUTO if need.mode is Mode.DECODE_FIRST else need.mode
    return msgspec.structs.replace(
        need, prompt_tokens=prompt_tokens, hashes=hashes, tokens_out=left, mode=mode, cache_hit_threshold=None
    )


def excluded(
    failed: Mapping[WorkerId, Epoch], views: Mapping[WorkerId, WorkerView], like: Fingerprint | None
) -> frozenset[WorkerId]:
    """Who may not serve it: the lives that failed it (a worker that was started again may), and, of a stream that some
    worker began, all that would go on otherwise than it would have.
    """
    out = {name for name, epoch in failed.items() if name in views and views[name].record.epoch <= epoch}
    if like is not None:
        out |= {name for name, view in views.items() if not _alike(view.record.fingerprint, like)}
    return frozenset(out)


def needs(need: PlacementRequest, answer: RecoveryAction, without: frozenset[WorkerId]) -> tuple[PlacementRequest, ...]:
    """What to ask placement for, one after the other, to give this answer."""
    replace = msgspec.structs.replace
    if answer is RecoveryAction.BOUNCE_TO_PREFILL:
        if not need.may_decode_first:  # It was sent back once; the second time would end as the first.
            return ()
        mode = Mode.AUTO if need.mode is Mode.DECODE_FIRST else need.mode
        return (replace(need, mode=mode, may_decode_first=False, excluded=without),)
    again = replace(need, excluded=without)
    if answer is RecoveryAction.PREFILL_ON_DECODE:
        if need.mode is Mode.DISAGGREGATED:  # That is what its client does not want.
            return ()
        return (replace(again, mode=Mode.AGGREGATED),)
    if answer is RecoveryAction.RESUME:
        # Whom its client has asked for may be gone: an answer that goes on is worth more than who gives it.
        return (again, replace(again, mode=Mode.AUTO, forced=None))
    return (again,)


def suits(answer: RecoveryAction, placed: Placement) -> bool:
    """Whether this placement is what the answer means."""
    if answer in (RecoveryAction.ANOTHER_PREFILL, RecoveryAction.BOUNCE_TO_PREFILL):
        return placed.prefill is not None or placed.decode.record.role is not Role.DECODE
    return True


def _alike(one: Fingerprint, other: Fingerprint) -> bool:
    return (one.model, one.revision, one.dtype) == (other.model, other.revision, other.dtype)
