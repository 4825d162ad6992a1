"""How many tokens of recomputes a step may compute beside ready requests.

A decode leg whose KV does not arrive computes its prompt. A step takes as long as all that it computes, so the other
requests of the step would wait for that prompt. This module bounds it: beside a ready request, a step computes so many
tokens of recomputes that it ends within the ready requests' target for the time between tokens, or, without a target,
within ``GROWTH`` of a decode step. What a decode step and a token of a prompt take is learned from the engine's steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf

TARGET_SHARE = 0.9
"""A step with recomputes may take this part of a target: steps vary, and tokens still have their way to the client."""
GROWTH = 1.15
"""A step with recomputes may take so many times as long as a decode step, if no ready request has a target."""
GROWTH_MIN = 1.1
"""A step with recomputes may take so many times as long as a decode step, whatever the targets: recomputes proceed."""
TOKENS_MIN = 8
"""The smallest share of a step, also before anything is learned. Steps with fewer tokens of prompts count as decode
steps."""
SLOWED_S_MAX = 10.0
"""A recompute that was slowed for this time is no longer bounded."""
SMOOTHING = 0.1
"""Weight of the newest step in what is learned."""
OUTLIER = 4.0
"""A step counts for at most so many times what was learned: the process may not have had the processor."""
STEPS_MAX = 64
"""Steps in flight of which the work is remembered; vLLM has one for each pipeline stage, and one more."""


@dataclass(slots=True)
class Slowed:
    """A recompute that began beside ready requests."""

    since_s: float
    until_s: float
    """The last step in which it got less than it needed."""


class RecomputeShare:
    """One per engine. Call ``begin`` before a step is made, ``allow`` for each recompute, ``made`` and ``ended``."""

    def __init__(self) -> None:
        self.slowed: dict[str, Slowed] = {}
        """Recomputes under way that were bounded, by request."""
        self._decode_s = 0.0
        self._token_s = 0.0
        self._left = inf
        self._steps = deque[tuple[float, int]](maxlen=STEPS_MAX)
        """When each step in flight was made, and its tokens of prompts."""
        self._ended_at = 0.0

    def begin(self, *, target_s: float | None) -> None:
        """A step is made in which a recompute takes part. ``target_s``: the shortest target of the ready requests;
        infinite if none has one; None if there is no ready request.
        """
        self._left = inf if target_s is None else self.tokens(target_s)

    def tokens(self, target_s: float) -> float:
        """The share of a step beside ready requests."""
        if not self._decode_s or not self._token_s:
            return TOKENS_MIN
        has_target = target_s < inf
        step_s = max(TARGET_SHARE * target_s, GROWTH_MIN * self._decode_s) if has_target else GROWTH * self._decode_s
        return max(TOKENS_MIN, (step_s - self._decode_s) / self._token_s)

    def allow(self, request_id: str, tokens: int, now: float) -> int:
        """How many of the tokens that a recompute needs the step may compute; recomputes are asked for in order."""
        slowed = self.slowed.get(request_id)
        if slowed is not None and now > slowed.since_s + SLOWED_S_MAX:
            return tokens
        allowed = int(min(tokens, self._left))
        self._left -= allowed
        if allowed < tokens:
            if slowed is None:
                slowed = self.slowed[request_id] = Slowed(now, now)
            slowed.until_s = now
        return allowed

    def finished(self, request_id: str) -> float:
        """The recompute is over, or its request; for how many seconds it was slowed."""
        slowed = self.slowed.pop(request_id, None)
        return slowed.until_s - slowed.since_s if slowed is not None else 0.0

    def made(self, prompt_tokens: int, now: float) -> None:
        """A step was made that computes something: so many tokens besides one for each request."""
        self._steps.append((now, prompt_tokens))

    def ended(self, now: float) -> None:
        """The oldest step made has been computed."""
        if not self._steps:
            return
        made_at, prompt_tokens = self._steps.popleft()
        seconds = now - max(made_at, self._ended_at)
        self._ended_at = now
        if prompt_tokens < TOKENS_MIN:
            self._decode_s = _smoothed(self._decode_s, seconds)
        elif seconds > self._decode_s:
            self._token_s = _smoothed(self._token_s, (seconds - self._decode_s) / prompt_tokens)


def _smoothed(known: float, newest: float) -> float:
    if not known:
        return newest
    return known + SMOOTHING * (min(newest, OUTLIER * known) - known)
