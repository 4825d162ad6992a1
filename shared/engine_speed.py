"""What an engine's steps computed, and the law by which that takes time.

    seconds = prefill_step_s * prefill_steps + prefill_token_s * prefill_tokens + prefill_pair_s * prefill_pairs
            + decode_step_s * decode_steps + decode_request_s * decode_requests
            + decode_context_token_s * decode_context_tokens

So what lies between two load reports is one equation of the engine's speeds. How such equations are solved is each
service's own, since each asks something else: a router follows a single worker from report to report, the planner
must not forget what full batches took, and a verdict has to know what its equations leave open.
"""

from __future__ import annotations

import math
import operator
from typing import NamedTuple

import msgspec
from msgspec.structs import astuple

from shared.contracts.load import StepTotals


class Steps(msgspec.Struct, frozen=True):
    """What ``StepTotals`` counts, as numbers: of some steps, of several engines, or per second."""

    seconds: float = 0.0
    prefill_steps: float = 0.0
    prefill_tokens: float = 0.0
    prefill_pairs: float = 0.0
    decode_steps: float = 0.0
    decode_requests: float = 0.0
    decode_context_tokens: float = 0.0

    @classmethod
    def between(cls, earlier: StepTotals, later: StepTotals) -> Steps:
        """What an engine did from one report to another."""
        return cls(
            later.seconds - earlier.seconds,
            later.prefill_steps - earlier.prefill_steps,
            later.prefill_tokens - earlier.prefill_tokens,
            later.prefill_pairs - earlier.prefill_pairs,
            later.decode_steps - earlier.decode_steps,
            later.decode_requests - earlier.decode_requests,
            later.decode_context_tokens - earlier.decode_context_tokens,
        )

    def __add__(self, other: Steps) -> Steps:
        return Steps(*map(operator.add, astuple(self), astuple(other)))

    def per(self, seconds: float) -> Steps:
        """The rate, when all of it took that long."""
        return Steps(*(each / seconds for each in astuple(self)))

    def work(self) -> tuple[float, ...]:
        """All but the seconds, in the order of ``StepTimeModel``."""
        return astuple(self)[1:]

    @property
    def is_possible(self) -> bool:
        """Whether an engine can have done this: nothing is negative, and everything a number."""
        return all(0.0 <= each < math.inf for each in astuple(self))


NO_STEPS = Steps()


class StepTimeModel(NamedTuple):
    """How fast an engine is: seconds for one of each."""

    prefill_step_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_pair_s: float = 0.0
    decode_step_s: float = 0.0
    decode_request_s: float = 0.0
    decode_context_token_s: float = 0.0

    def prefill_s(self, done: Steps) -> float:
        """What of these steps' time went to prompts."""
        return (
            done.prefill_steps * self.prefill_step_s
            + done.prefill_tokens * self.prefill_token_s
            + done.prefill_pairs * self.prefill_pair_s
        )

    def decode_step_of(self, requests: float, context_tokens: float) -> float:
        """Duration of a step in which so many completions go on, each with so much context."""
        return self.decode_step_s + requests * (self.decode_request_s + context_tokens * self.decode_context_token_s)


USUAL = StepTimeModel(
    prefill_step_s=0.005,
    prefill_token_s=1 / 4000,
    prefill_pair_s=1 / 4000 / 32_768,  # A token that attends to so many others takes twice as long.
    decode_step_s=0.015,
    decode_request_s=0.000_2,
    decode_context_token_s=5e-8,
)
"""Assumed of an engine before it is measured. Engines differ by factors of hundreds, these proportions by far less."""


class Untaught:
    """Steps from which nothing was learned yet, of one life of an engine. Its totals go in, samples come out."""

    __slots__ = ("_taught",)

    def __init__(self) -> None:
        self._taught = StepTotals()

    def sample(self, totals: StepTotals, seconds_min: float) -> Steps | None:
        """All that was done since the last one, once it took ``seconds_min``. Totals that begin anew are no sample."""
        if not (math.isfinite(totals.seconds) and math.isfinite(totals.prefill_pairs)):
            return None
        seconds = totals.seconds - self._taught.seconds
        if 0.0 <= seconds < seconds_min:
            return None
        done = Steps.between(self._taught, totals)
        self._taught = totals
        return done if seconds >= 0.0 else None
