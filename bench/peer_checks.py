"""What must hold of a run before its figures count: every request answered in full, and served as the row says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CACHED_SHARE_MIN = 0.5
"""Of the tokens of all next turns; the rest is new, or read from another engine."""
REPEATED_SHARE_MAX = 0.01
"""Of a run's requests: legs that another router may send again by itself. They make it look a little dearer than it is."""

LATE_SHARE_MAX = 0.01
"""Of a run's decisions: those made while the engine's word of the turn before was on its way. A conversation here goes on
at once.
"""


class RunFailed(Exception):
    """A run whose figures mean nothing; the text says what was wrong."""


def check_answers(result: dict[str, Any], requests: int = 0) -> None:
    """The load client's result: no error, no short answer, and as many answers as requests (or, with 0, as were sent)."""
    if result["errors"]:
        raise RunFailed(f"{result['errors']} of {result['sent']} requests failed: {result['first_error']}")
    expected = requests or result["sent"]
    if not expected or result["sent"] != expected or result["ended"] != expected:
        raise RunFailed(f"{result['sent']} of {expected} requests were sent, {result['ended']} answered")


def check_legs(before: Sequence[dict[str, int]], after: Sequence[dict[str, int]], requests: int) -> int:
    """The counts of the engines behind another router: each request was a prefill leg and a decode leg. Returns how many
    of them the router sent again: at most ``REPEATED_SHARE_MAX`` of the requests, or one.
    """
    repeated_max = max(1, int(requests * REPEATED_SHARE_MAX))
    repeated = 0
    for kind, expected, more_max in (
        ("prefill", requests, repeated_max),
        ("decode", requests, repeated_max),
        ("whole", 0, 0),
    ):
        legs = sum(engine[kind] for engine in after) - sum(engine[kind] for engine in before)
        if not expected <= legs <= expected + more_max:
            raise RunFailed(f"the engines served {legs} {kind} legs of {requests} requests, not {expected}")
        repeated += legs - expected
    return repeated


def check_decisions(decisions: Sequence[dict[str, Any]], expected: int, *, next_turns: bool) -> None:
    """Baton's decisions, the newest of a run: kept, disaggregated, and for ``next_turns`` with the exact prefix: the
    engines found the cached tokens that the decisions counted on (``LATE_SHARE_MAX`` of them, or one, may find more), and
    these are most of the prompts.
    """
    late_left = max(1, int(len(decisions) * LATE_SHARE_MAX))
    if len(decisions) < expected:
        raise RunFailed(f"Baton kept {len(decisions)} decisions of {expected}")
    for decision in decisions:
        which = f"decision {decision['decision_id']}"
        if decision["outcome"] != "ok":
            raise RunFailed(f"{which} ended with {decision['outcome'] or 'nothing'}")
        if decision["mode"] != "disaggregated" or not decision["prefill_worker"] or not decision["decode_worker"]:
            raise RunFailed(f"{which} is {decision['mode'] or 'no placement'}, not disaggregated")
        if not next_turns:
            continue
        if decision["exact"] and late_left and decision["predicted_cached_tokens"] < decision["cached_tokens"]:
            late_left -= 1
        elif not decision["exact"] or decision["predicted_cached_tokens"] != decision["cached_tokens"]:
            raise RunFailed(
                f"{which} is exact: {decision['exact']} {decision['why_inexact']}; it counted on"
                f" {decision['predicted_cached_tokens']} cached tokens, the engine had {decision['cached_tokens']}"
            )
    if next_turns:
        cached, tokens = (sum(decision[name] for decision in decisions) for name in ("cached_tokens", "prompt_tokens"))
        if cached < tokens * CACHED_SHARE_MIN:
            raise RunFailed(f"{cached} of {tokens} tokens of next turns were cached, less than {CACHED_SHARE_MIN:.0%}")
