"""What an engine's steps computed, and the model of how long that takes.

    seconds = prefill_step_s * prefill_steps + prefill_token_s * prefill_tokens + prefill_pair_s * prefill_pairs
            + decode_step_s * decode_steps + decode_request_s * decode_requests
            + decode_context_token_s * decode_context_tokens

So the work between two totals is one equation of the engine's speed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import astuple

from shared.contracts.load import EngineSpeed, StepTotals


class Steps(msgspec.Struct, frozen=True):
    """The counts of ``StepTotals`` as floats: of some steps, of several engines, or per second."""

    seconds: float = 0.0
    prefill_steps: float = 0.0
    prefill_tokens: float = 0.0
    prefill_pairs: float = 0.0
    decode_steps: float = 0.0
    decode_requests: float = 0.0
    decode_context_tokens: float = 0.0

    @classmethod
    def between(cls, earlier: StepTotals, later: StepTotals) -> Steps:
        """The steps between two totals of one engine."""
        return cls(*map(operator.sub, astuple(later), astuple(earlier)))

    def __add__(self, other: Steps) -> Steps:
        return Steps(*map(operator.add, astuple(self), astuple(other)))

    def per(self, seconds: float) -> Steps:
        return Steps(*(each / seconds for each in astuple(self)))

    def work(self) -> tuple[float, ...]:
        """All fields but ``seconds``, in the order of ``StepTimeModel``."""
        return astuple(self)[1:]

    @property
    def is_possible(self) -> bool:
        """Whether an engine can have done this: nothing is negative, infinite or NaN."""
        return all(0.0 <= each < math.inf for each in astuple(self))


NO_STEPS = Steps()


class StepTimeModel(NamedTuple):
    """Seconds for one unit of each kind of work."""

    prefill_step_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_pair_s: float = 0.0
    decode_step_s: float = 0.0
    decode_request_s: float = 0.0
    decode_context_token_s: float = 0.0

    @classmethod
    def of(cls, speed: EngineSpeed) -> StepTimeModel:
        """The estimate without its spread."""
        return cls(*(getattr(speed, name) for name in cls._fields))

    def prefill_s(self, done: Steps) -> float:
        """The part of these steps' time that prompts took."""
        return (
            done.prefill_steps * self.prefill_step_s
            + done.prefill_tokens * self.prefill_token_s
            + done.prefill_pairs * self.prefill_pair_s
        )

    def decode_step_of(self, requests: float, context_tokens: float) -> float:
        """Duration of a decode step with ``requests`` in the batch, each with ``context_tokens``."""
        return self.decode_step_s + requests * (self.decode_request_s + context_tokens * self.decode_context_token_s)


DEFAULT_STEP_TIMES = StepTimeModel(
    prefill_step_s=0.005,
    prefill_token_s=1 / 4000,
    prefill_pair_s=1 / 4000 / 32_768,  # A token that attends to so many others takes twice as long.
    decode_step_s=0.015,
    decode_request_s=0.000_2,
    decode_context_token_s=5e-8,
)
"""Assumed of an engine before it is measured. Engines differ by factors of hundreds, these proportions by far less."""


class PendingSteps:
    """The steps of one engine that are in no sample yet. Its totals go in, samples come out."""

    __slots__ = ("_sampled",)

    def __init__(self) -> None:
        self._sampled = StepTotals()

    def sample(self, totals: StepTotals, seconds_min: float) -> Steps | None:
        """All steps since the last sample, once they took ``seconds_min``. Totals that start over are no sample."""
        if not (math.isfinite(totals.seconds) and math.isfinite(totals.prefill_pairs)):
            return None
        seconds = totals.seconds - self._sampled.seconds
        if 0.0 <= seconds < seconds_min:
            return None
        done = Steps.between(self._sampled, totals)
        self._sampled = totals
        return done if seconds >= 0.0 else None


def by_field(operation: Callable[[Any, Any], Any], one: StepTotals, other: StepTotals) -> StepTotals:
    """The totals whose fields are the operation's results for those of two."""
    fields = StepTotals.__struct_fields__
    return StepTotals(**{name: operation(getattr(one, name), getattr(other, name)) for name in fields})


class StepSum:
    """A sum of steps. Each is added as the totals of that step alone."""

    __slots__ = ("_context", "_decode_steps", "_pairs", "_prefill_steps", "_prompt_tokens", "_requests", "_seconds")

    def __init__(self) -> None:
        self._seconds = 0.0
        self._prefill_steps = 0
        self._prompt_tokens = 0
        self._pairs = 0.0
        self._decode_steps = 0
        self._requests = 0
        self._context = 0

    def add(self, step: StepTotals) -> None:
        self._seconds += step.seconds
        self._prefill_steps += step.prefill_steps
        self._prompt_tokens += step.prefill_tokens
        self._pairs += step.prefill_pairs
        self._decode_steps += step.decode_steps
        self._requests += step.decode_requests
        self._context += step.decode_context_tokens

    def totals(self) -> StepTotals:
        return StepTotals(
            seconds=self._seconds,
            prefill_steps=self._prefill_steps,
            prefill_tokens=self._prompt_tokens,
            prefill_pairs=self._pairs,
            decode_steps=self._decode_steps,
            decode_requests=self._requests,
            decode_context_tokens=self._context,
        )


RECENT: Final = 0.2
"""The share of the newest step in a moving average."""


class StepTotalsCounter:
    """Sums the steps of this engine for its load reports."""

    __slots__ = ("_decoding", "_prompts", "_recent_s", "_recent_tokens")

    def __init__(self) -> None:
        self._prompts, self._decoding = StepSum(), StepSum()
        self._recent_tokens = self._recent_s = 0.0
        """Moving averages of the steps that compute prompts."""

    def add(self, step: StepTotals) -> None:
        """``step``: the totals of that step alone."""
        if not step.prefill_tokens:
            self._decoding.add(step)
            return
        self._prompts.add(step)
        weight = RECENT if self._recent_s else 1.0
        self._recent_tokens += weight * (step.prefill_tokens - self._recent_tokens)
        self._recent_s += weight * (step.seconds - self._recent_s)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Recent speed of steps that compute prompts, however short; 0 before the first one."""
        return self._recent_tokens / self._recent_s if self._recent_s > 0.0 else 0.0

    def prompt_totals(self) -> StepTotals:
        """The steps that computed prompts."""
        return self._prompts.totals()

    def totals(self) -> StepTotals:
        """All steps."""
        return by_field(operator.add, self._prompts.totals(), self._decoding.totals())
