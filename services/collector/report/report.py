"""Whether splitting prefill from decode is worth it here: requests of like length, held against aggregated serving.

Where enough like requests were served aggregated, they are the measure. Where not, it is estimated (``aggregated``).
Where that estimate would be a guess, the answer is unsure, and says why.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from services.collector.metrics.engine_work import MODELS_MAX, WINDOW_S, Engines, FleetWork
from services.collector.report.aggregated import Latencies, Sample, aggregated
from services.collector.report.step_time import step_time_models
from shared.contracts.disaggregation_report import DisaggregationReport, ReportBucket
from shared.contracts.failures import Reason
from shared.contracts.inference import RequestFinished
from shared.contracts.load import LoadReport
from shared.contracts.workers import Role
from shared.engine_speed.steps import StepTimeModel

STARTS = (1, 256, 1024, 4096, 16384)
"""Where each range of prompt lengths begins, in tokens."""
TOKENS_MAX = (1 << 31) - 1
SAMPLES_MAX = 256
"""Of each range and kind; the newest count."""
ENOUGH = 20
"""Requests, of each kind, from which a median says something."""
MARGIN_MEASURED, MARGIN_ESTIMATED = 0.1, 0.2
"""Differences that are smaller say nothing."""
LIKE_MAX = 2.0
"""How much more of their prompts some requests may compute than others, to be compared."""
EXPLAINED = (0.4, 2.5)
"""What the engines' steps say of the time between tokens, against what is measured: else they explain nothing."""
OK = 200
YES, NO, UNSURE = "yes", "no", "unsure"
DISAGGREGATED, AGGREGATED = "disaggregated", "aggregated"


@dataclass(slots=True)
class Bucket:
    """Requests of one model and range of lengths: each with the time at which it was told of."""

    apart: deque[tuple[float, Sample]] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    whole: deque[tuple[float, Sample, bool]] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    """With whether its worker was one that computes few prompts."""

    def forget(self, before: float) -> None:
        """What was told of earlier is too old."""
        for kept in (self.apart, self.whole):
            while kept and kept[0][0] < before:
                kept.popleft()


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """The other side: what aggregated serving gave, or would have given. One or two answers, from which to which."""

    latencies: Sequence[Latencies] = ()
    measured: bool = False
    flattered: bool = False
    """It was measured on engines that computed hardly any prompts: more of it would be slower."""
    overloaded: bool = False
    """It could not have carried the load."""
    unknown: str = ""
    """Why nothing can be said."""


class Judge:
    """Listens to requests and engines, and judges when asked. Bounded."""

    def __init__(self, silent_s_max: float) -> None:
        self._silent_s_max = silent_s_max
        self._buckets: dict[tuple[str, int], Bucket] = {}
        self._models: dict[str, None] = {}
        self._engines = Engines()

    def load_reported(self, load: LoadReport, now: float) -> None:
        """A worker says what its engine has done."""
        self._engines.load_reported(load, now)

    def request_finished(self, told: RequestFinished, now: float) -> None:
        """A request has ended. Those that did not go well, or had to go on elsewhere, are no measure."""
        if told.reason == Reason.MODEL_UNKNOWN or not self._knows(told.model):
            return
        self._engines.served(told.model, filter(None, (told.prefill_worker, told.decode_worker)))
        smooth = told.status == OK and told.attempts == 1 and not told.resumes and told.completion_tokens > 1
        if not smooth or min(told.ttft_s, told.e2e_s) < 0 or told.prompt_tokens < 1:
            return
        sample = sample_of(told)
        bucket = self._buckets.setdefault((told.model, bisect_right(STARTS, told.prompt_tokens) - 1), Bucket())
        if told.mode == DISAGGREGATED and sample is not None:
            bucket.apart.append((now, sample))
        elif told.mode == AGGREGATED and sample is not None:
            bucket.whole.append((now, sample, self._engines.role_of(told.decode_worker) is Role.DECODE))

    def verdict(self, model: str, now: float, step_tokens: Callable[[str], int]) -> DisaggregationReport:
        """Of one model, or of all. ``step_tokens``: what a model's engines compute in one step, at most."""
        buckets = []
        for (name, number), bucket in sorted(self._buckets.items()):
            bucket.forget(now - WINDOW_S)
            if (model in ("", name)) and (bucket.apart or bucket.whole):
                other = self._other(name, bucket, now, step_tokens(name))
                buckets.append(judged(name, number, bucket, other))
        return DisaggregationReport(seconds=WINDOW_S, buckets=buckets, words=words(buckets))

    def _knows(self, model: str) -> bool:
        if model not in self._models and len(self._models) < MODELS_MAX:
            self._models[model] = None
        return model in self._models

    def _other(self, model: str, bucket: Bucket, now: float, step_tokens: int) -> Other:
        apart, whole = [sample for _at, sample in bucket.apart], [sample for _at, sample, _few in bucket.whole]
        if len(apart) < ENOUGH:
            return Other(unknown=f"only {len(apart)} of its requests were disaggregated")
        if len(whole) >= ENOUGH and alike(apart, whole):
            few = sum(few for _at, _sample, few in bucket.whole)
            return Other(latencies=[medians(whole)], measured=True, flattered=2 * few > len(whole))
        work = self._engines.of(model, now, self._silent_s_max)
        models = step_time_models(self._engines.speed(model), work.work)
        return estimated(apart, work, models, step_tokens)


def sample_of(told: RequestFinished) -> Sample | None:
    """None where the router does not know enough of it."""
    if told.ttft_parts is None:
        return None
    had = max(0, told.cached_tokens) + max(0, told.readback_tokens)
    return Sample(
        ttft_s=told.ttft_s,
        # Of an answer that is no stream nobody has seen its tokens come.
        itl_s=told.itl_s if told.itl_s >= 0 else max(0.0, told.e2e_s - told.ttft_s) / (told.completion_tokens - 1),
        e2e_s=told.e2e_s,
        completion_tokens=told.completion_tokens,
        computed_tokens=max(1, told.prompt_tokens - had),
        parts=told.ttft_parts,
    )


def alike(ones: Sequence[Sample], others: Sequence[Sample]) -> bool:
    """Whether both had about as much to compute: a router that has the choice sends what is cached the short way."""
    few, many = sorted(median(one.computed_tokens for one in some) for some in (ones, others))
    return many <= LIKE_MAX * few


def medians(samples: Sequence[Sample | Latencies]) -> Latencies:
    """Of each latency by itself."""
    return Latencies(
        ttft_s=median(one.ttft_s for one in samples),
        itl_s=median(one.itl_s for one in samples),
        e2e_s=median(one.e2e_s for one in samples),
    )


def median(values: Iterable[float]) -> float:
    """Of at least one."""
    return float(np.median(list(values)))


def estimated(apart: Sequence[Sample], work: FleetWork, laws: Sequence[StepTimeModel], step_tokens: int) -> Other:
    """What these requests would have experienced, for each law that fits what the engines' steps have shown."""
    if not laws or not work.prefills or not work.decodes:
        return Other(unknown="too little is known yet of how fast the engines are")
    found = []
    for law in laws:
        fleet = aggregated(work, law, step_tokens)
        would = [fleet.of(sample) for sample in apart] if fleet is not None else []
        steady = [one for one in would if one is not None]
        if fleet is None or 2 * len(steady) < len(apart):
            return Other(overloaded=True) if len(laws) == 1 else Other(unknown=NOT_TOLD_APART)
        if not EXPLAINED[0] <= fleet.itl_now_s / max(median(one.itl_s for one in apart), 1e-9) <= EXPLAINED[1]:
            return Other(unknown="the engines' steps do not explain the time between tokens that is measured")
        found.append(medians(steady))
    return Other(latencies=found)


NOT_TOLD_APART = "batches have hardly varied, so nobody can tell what a larger one costs"


def judged(model: str, number: int, bucket: Bucket, other: Other) -> ReportBucket:
    """The bucket with what was found."""
    ends = (*(start - 1 for start in STARTS[1:]), TOKENS_MAX)
    mine = medians([sample for _at, sample in bucket.apart]) if bucket.apart else None
    others = medians(other.latencies) if other.latencies else None
    worth, why = decided(mine, other)
    return ReportBucket(
        model=model,
        tokens_min=STARTS[number],
        tokens_max=ends[number],
        disaggregated=len(bucket.apart),
        aggregated=len(bucket.whole),
        ttft_s=mine.ttft_s if mine else 0.0,
        itl_s=mine.itl_s if mine else 0.0,
        e2e_s=mine.e2e_s if mine else 0.0,
        other_ttft_s=others.ttft_s if others else 0.0,
        other_itl_s=others.itl_s if others else 0.0,
        other_e2e_s=others.e2e_s if others else 0.0,
        measured=other.measured,
        worth=worth,
        why=why,
    )


def decided(mine: Latencies | None, other: Other) -> tuple[str, str]:
    """Yes, no or unsure, and why."""
    if other.overloaded:
        return YES, "engines that do both could not carry this load"
    if mine is None or other.unknown:
        return UNSURE, other.unknown or "nothing was disaggregated"
    margin = MARGIN_MEASURED if other.measured else MARGIN_ESTIMATED
    said = {compared(mine, one, margin) for one in other.latencies}
    if len(said) > 1:
        return UNSURE, NOT_TOLD_APART
    worth, why = said.pop()
    if worth == NO and other.flattered:
        return UNSURE, f"{why}; but these were few, on engines that compute hardly any prompts besides"
    return worth, why


def compared(mine: Latencies, other: Latencies, margin: float) -> tuple[str, str]:
    """The whole time decides; where that is about the same, the others must agree."""
    whole, first, between = (
        better(one, two, margin)
        for one, two in (
            (mine.e2e_s, other.e2e_s),
            (mine.ttft_s, other.ttft_s),
            (mine.itl_s, other.itl_s),
        )
    )
    if whole:
        return (YES, "whole answers come sooner apart") if whole > 0 else (NO, "whole answers come later apart")
    if first * between < 0:
        sooner, later = ("the first token", "those after it") if first > 0 else ("tokens after the first", "the first")
        return UNSURE, f"apart, {sooner} sooner and {later} later: it depends on which matters more"
    if first + between:
        which = "all tokens come" if first and between else "the first token comes" if first else "later tokens come"
        return (YES, f"{which} sooner apart") if first + between > 0 else (NO, f"{which} later apart")
    return NO, "about the same, and one engine for both is simpler"


def better(mine_s: float, other_s: float, margin: float) -> int:
    """1: clearly sooner, -1: clearly later, 0: about the same."""
    low, high = sorted((mine_s, other_s))
    if high <= low * (1.0 + margin):
        return 0
    return 1 if mine_s < other_s else -1


def words(buckets: Sequence[ReportBucket]) -> str:
    """One or two sentences for all of it, each range counting as much as it has requests."""
    weights = {
        worth: sum(one.disaggregated + one.aggregated for one in buckets if one.worth == worth)
        for worth in (YES, NO, UNSURE)
    }
    total = sum(weights.values())
    if not total:
        return "Nothing was served lately."
    most = max(weights, key=lambda worth: weights[worth])
    share = f"{weights[most] / total:.0%} of the requests"
    if most == UNSURE:
        return f"Nobody can say yet whether prefill and decode should be apart here, for {share}."
    if most == YES:
        return f"It is worth it: {share} are better served with prefill and decode apart."
    return f"It is not worth it: {share} would be served as well or better by engines that do both."
