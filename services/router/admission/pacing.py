"""Spreads prompts over time where an engine's steps are too long for its answers while it computes a prompt.

An engine that always has a prompt to compute does a part of one in each step, so each of its answers gets a token per
such step. Where that takes longer than the target between tokens, an answer meets its target only if some of its steps
compute no prompt. They are short, so they cost little throughput, but they are there only if prompts leave gaps: after
the work of each prompt, the next one is sent later by a share of that work.

The share is the one with the most requests within their target. With a part ``mixed`` of the steps computing prompts,
prompts are begun in proportion to ``mixed / (mixed * long_s + (1 - mixed) * short_s)``. An answer of k tokens misses if
more than the share ``limit = (target_s - short_s) / (long_s - short_s)`` of its steps is long: if each is long by
chance, with a probability of at most ``exp(-k * divergence(limit, mixed))`` (Chernoff's bound by the Kullback-Leibler
divergence; exact where a single short step is enough). The lengths of answers are taken to be geometric.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

from services.router.placement.placement import Placement
from shared.contracts.ids import WorkerId

NEAR: Final = 0.98
"""Steps count as too long from this share of the target on: predictions of single steps are off by a few percent."""
GAP_MAX: Final = 1.0
"""Longest gap after a prompt, in units of its work: where answers get slow for other reasons, prompts still go on."""
MIXED: Final = [number / 32 for number in range(1, 33)]
"""Shares of steps with prompts that are tried."""
OWED_STEPS: Final = 24.0
"""Short steps that an idle engine may owe its answers. Reports correct what was predicted of prompts: after a wrong
prediction, the next prompt waits for no more than these. It must exceed the gaps that answers need: in replays, half as
many gave the same results, and a quarter cut gaps short.
"""
EARLY_S: Final = 0.05
"""How long before the end of a gap a prompt may be sent. Others were sent late, after a report or a scheduling pass,
and left longer gaps than computed; this makes up for them. An engine that was idle gets as much work without a gap, so
this must be short: with 0.25, bursts of a few seconds got no gaps.
"""
WORKERS_MAX: Final = 1024
"""Workers whose gaps are kept before those that are over are dropped."""


@lru_cache(maxsize=4096)
def best_gap(long: float, short: float, tokens_out: float) -> float:
    """The gap after each prompt, in units of its work, with the most requests within the target between tokens.

    ``long`` and ``short``: a step with and without prompt tokens, in units of the target; ``tokens_out``: mean length
    of answers.
    """
    if long <= 1.0 or short >= long:
        return 0.0
    limit = max(0.0, (1.0 - short) / (long - short))
    best, best_mixed = 0.0, 1.0
    for mixed in MIXED:
        begun = mixed / (mixed * long + (1.0 - mixed) * short)
        met = begun * (1.0 - missed(limit, mixed, tokens_out))
        if met > best:
            best, best_mixed = met, mixed
    return min(GAP_MAX, (1.0 - best_mixed) * short / (best_mixed * long))


def missed(limit: float, mixed: float, tokens_out: float) -> float:
    """Share of answers with more than ``limit`` of their steps long, if ``mixed`` of all steps are."""
    if mixed >= limit:
        return 1.0
    divergence = limit * math.log(limit / mixed)
    if limit < 1.0:
        divergence += (1.0 - limit) * math.log((1.0 - limit) / (1.0 - mixed))
    each, goes_on = math.exp(-divergence), 1.0 - 1.0 / max(1.0, tokens_out)
    return each * (1.0 - goes_on) / (1.0 - goes_on * each)


class Pacing:
    """When each worker may be sent its next prompt."""

    def __init__(self) -> None:
        self._until: dict[WorkerId, float] = {}
        """When the work of a worker's prompts and the gaps after them are over."""

    def gap(self, placement: Placement, work_s: float, itl_target_s: float, tokens_out: float) -> float:
        """The gap after the request's prompt, in units of its work ``work_s``; 0 where no gap is needed."""
        long_s = placement.step_s + min(placement.prompt_step_s, work_s)
        limit_s = NEAR * itl_target_s
        if long_s <= limit_s or not placement.prompt_step_s:
            return 0.0
        return best_gap(round(long_s / limit_s, 2), round(placement.step_s / limit_s, 2), float(f"{tokens_out:.1e}"))

    def wait_s(self, placement: Placement, worker_id: WorkerId, given_s: float, now: float) -> float:
        """How long the worker's next prompt must wait for the end of a gap; 0 or less: not at all. ``given_s``: work
        that it got and that its predicted queue does not contain yet.
        """
        over_at = self._over_at(placement, worker_id, now)
        if not given_s and worker_id in self._until:
            self._until[worker_id] = over_at
        return over_at + given_s - EARLY_S - now

    def begun(self, placement: Placement, worker_id: WorkerId, work_s: float, gap: float, now: float) -> None:
        """A prompt was sent."""
        if worker_id not in self._until and len(self._until) >= WORKERS_MAX:
            self._until = {one: until for one, until in self._until.items() if until > now}
        self._until[worker_id] = self._over_at(placement, worker_id, now) + work_s * (1.0 + gap)

    def _over_at(self, placement: Placement, worker_id: WorkerId, now: float) -> float:
        """When the worker's prompts and their gaps are over. Reports correct what was predicted of earlier prompts:
        when the engine has computed them, it owes ``OWED_STEPS`` at most.
        """
        latest = now + placement.predicted.queue_s + EARLY_S + OWED_STEPS * placement.step_s
        return min(max(self._until.get(worker_id, now), now), latest)
