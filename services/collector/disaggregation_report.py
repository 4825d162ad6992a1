"""The disaggregation report: whether separate prefill and decode workers pay off, by prompt length.

Disaggregated requests are compared with aggregated requests of the same length. Without enough of those, aggregated
latencies are estimated (``aggregated``). When an estimate is not possible, the result is unsure and says why.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from services.collector.aggregated_estimate import (
    MODELS_MAX,
    WINDOW_S,
    Engines,
    FleetWork,
    Latencies,
    Sample,
    aggregated,
    step_time_models,
)
from shared.contracts.failures import Reason
from shared.contracts.inference import RequestFinished
from shared.contracts.load import LoadReport
from shared.contracts.planning import DisaggregationReport, ReportBucket
from shared.contracts.workers import Role
from shared.engine_speed.steps import StepTimeModel

STARTS = (1, 256, 1024, 4096, 16384)
"""Lower bounds of the prompt-length ranges, in tokens."""
TOKENS_MAX = (1 << 31) - 1
SAMPLES_MAX = 256
"""Newest requests that are kept for each range and mode."""
SAMPLES_MIN = 20
"""Requests of each mode that a median needs."""
MARGIN_MEASURED, MARGIN_ESTIMATED = 0.1, 0.2
"""Smaller relative differences count as equal."""
COMPUTED_RATIO_MAX = 2.0
"""Two groups are comparable when their median computed tokens differ by at most this factor."""
MODEL_RATIO = (0.4, 2.5)
"""Range of modelled over measured ITL in which the step-time model is trusted."""
OK = 200
YES, NO, UNSURE = "yes", "no", "unsure"
DISAGGREGATED, AGGREGATED = "disaggregated", "aggregated"


@dataclass(slots=True)
class LengthRange:
    """Requests of one model and one range of prompt lengths, each with its time of arrival."""

    disaggregated: deque[tuple[float, Sample]] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    aggregated: deque[tuple[float, Sample, bool]] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    """The flag says whether the request ran on a decode worker, which computes few prompts."""

    def forget(self, before: float) -> None:
        """Drop requests that arrived before this time."""
        for requests in (self.disaggregated, self.aggregated):
            while requests and requests[0][0] < before:
                requests.popleft()


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Aggregated serving of the same requests, measured or estimated. Two latencies are the ends of an interval."""

    latencies: Sequence[Latencies] = ()
    measured: bool = False
    biased: bool = False
    """The measured engines computed hardly any prompts; more aggregated requests would be slower."""
    overloaded: bool = False
    """Aggregated engines could not carry this load."""
    unknown: str = ""
    """Why there is neither a measurement nor an estimate; empty when there is."""


class ReportBuilder:
    """Collects requests and engine work, and builds the report on demand. Bounded."""

    def __init__(self, silent_s_max: float) -> None:
        self._silent_s_max = silent_s_max
        self._ranges: dict[tuple[str, int], LengthRange] = {}
        self._models: dict[str, None] = {}
        self._engines = Engines()

    def load_reported(self, load: LoadReport, now: float) -> None:
        self._engines.load_reported(load, now)

    def request_finished(self, request: RequestFinished, now: float) -> None:
        """Add a finished request. Failed, retried and migrated requests do not count."""
        if request.reason == Reason.MODEL_UNKNOWN or not self._is_known(request.model):
            return
        self._engines.served(request.model, filter(None, (request.prefill_worker, request.decode_worker)))
        if not is_comparable(request):
            return
        sample = sample_of(request)
        key = (request.model, bisect_right(STARTS, request.prompt_tokens) - 1)
        requests = self._ranges.setdefault(key, LengthRange())
        if request.mode == DISAGGREGATED and sample is not None:
            requests.disaggregated.append((now, sample))
        elif request.mode == AGGREGATED and sample is not None:
            requests.aggregated.append((now, sample, self._engines.role_of(request.decode_worker) is Role.DECODE))

    def build(self, model: str, now: float, step_tokens: Callable[[str], int]) -> DisaggregationReport:
        """The report for one model, or for all (empty name). ``step_tokens`` gives the most tokens that a model's
        engines compute in one step.
        """
        buckets = []
        for (name, number), requests in sorted(self._ranges.items()):
            requests.forget(now - WINDOW_S)
            if (model in ("", name)) and (requests.disaggregated or requests.aggregated):
                alternative = self._alternative(name, requests, now, step_tokens(name))
                buckets.append(report_bucket(name, number, requests, alternative))
        return DisaggregationReport(seconds=WINDOW_S, buckets=buckets, summary=summary_of(buckets))

    def _is_known(self, model: str) -> bool:
        if model not in self._models and len(self._models) < MODELS_MAX:
            self._models[model] = None
        return model in self._models

    def _alternative(self, model: str, requests: LengthRange, now: float, step_tokens: int) -> Alternative:
        disaggregated = [sample for _at, sample in requests.disaggregated]
        aggregated_ones = [sample for _at, sample, _on_decode in requests.aggregated]
        if len(disaggregated) < SAMPLES_MIN:
            return Alternative(unknown=f"only {len(disaggregated)} requests of this length were disaggregated")
        if len(aggregated_ones) >= SAMPLES_MIN and are_comparable(disaggregated, aggregated_ones):
            on_decode = sum(on_decode for _at, _sample, on_decode in requests.aggregated)
            biased = 2 * on_decode > len(aggregated_ones)
            return Alternative(latencies=[medians(aggregated_ones)], measured=True, biased=biased)
        work = self._engines.of(model, now, self._silent_s_max)
        models = step_time_models(self._engines.speed(model), work.work)
        return estimate(disaggregated, work, models, step_tokens)


def is_comparable(request: RequestFinished) -> bool:
    """Whether it was served without an incident, a user waited for it, and everything about it is known."""
    is_smooth = request.status == OK and request.attempts == 1 and not request.resumes and not request.is_batch
    return (
        is_smooth
        and request.completion_tokens > 1
        and min(request.ttft_s, request.e2e_s) >= 0
        and request.prompt_tokens >= 1
    )


def sample_of(request: RequestFinished) -> Sample | None:
    """The request's latencies; None when the router did not measure all of them."""
    if request.ttft_parts is None:
        return None
    held = max(0, request.cached_tokens) + max(0, request.readback_tokens)
    return Sample(
        ttft_s=request.ttft_s,
        # Without streaming the router does not see single tokens, so the mean stands in.
        itl_s=request.itl_s
        if request.itl_s >= 0
        else max(0.0, request.e2e_s - request.ttft_s) / (request.completion_tokens - 1),
        e2e_s=request.e2e_s,
        completion_tokens=request.completion_tokens,
        computed_tokens=max(1, request.prompt_tokens - held),
        parts=request.ttft_parts,
    )


def are_comparable(ones: Sequence[Sample], others: Sequence[Sample]) -> bool:
    """Whether both computed about as many tokens: routers tend to serve mostly cached prompts aggregated."""
    few, many = sorted(median(one.computed_tokens for one in some) for some in (ones, others))
    return many <= COMPUTED_RATIO_MAX * few


def medians(samples: Sequence[Sample | Latencies]) -> Latencies:
    return Latencies(
        ttft_s=median(one.ttft_s for one in samples),
        itl_s=median(one.itl_s for one in samples),
        e2e_s=median(one.e2e_s for one in samples),
    )


def median(values: Iterable[float]) -> float:
    """Needs at least one value."""
    return float(np.median(list(values)))


def estimate(
    disaggregated: Sequence[Sample], work: FleetWork, step_times: Sequence[StepTimeModel], step_tokens: int
) -> Alternative:
    """Estimated latencies of these requests if they were aggregated, for each model that fits the engines' steps."""
    if not step_times or not work.prefills or not work.decodes:
        return Alternative(unknown="too few engine steps have been measured")
    found = []
    for times in step_times:
        fleet = aggregated(work, times, step_tokens)
        predicted = [fleet.of(sample) for sample in disaggregated] if fleet is not None else []
        stable = [one for one in predicted if one is not None]
        if fleet is None or 2 * len(stable) < len(disaggregated):
            return Alternative(overloaded=True) if len(step_times) == 1 else Alternative(unknown=BATCHES_ALIKE)
        ratio = fleet.itl_now_s / max(median(one.itl_s for one in disaggregated), 1e-9)
        if not MODEL_RATIO[0] <= ratio <= MODEL_RATIO[1]:
            return Alternative(unknown="the step-time model does not match the measured ITL")
        found.append(medians(stable))
    return Alternative(latencies=found)


BATCHES_ALIKE = "batch sizes have hardly varied, so the cost of a larger batch is not known"


def report_bucket(model: str, number: int, requests: LengthRange, alternative: Alternative) -> ReportBucket:
    """One row of the report."""
    ends = (*(start - 1 for start in STARTS[1:]), TOKENS_MAX)
    mine = medians([sample for _at, sample in requests.disaggregated]) if requests.disaggregated else None
    other = medians(alternative.latencies) if alternative.latencies else None
    worth, reason = decide(mine, alternative)
    return ReportBucket(
        model=model,
        tokens_min=STARTS[number],
        tokens_max=ends[number],
        disaggregated=len(requests.disaggregated),
        aggregated=len(requests.aggregated),
        ttft_s=mine.ttft_s if mine else 0.0,
        itl_s=mine.itl_s if mine else 0.0,
        e2e_s=mine.e2e_s if mine else 0.0,
        other_ttft_s=other.ttft_s if other else 0.0,
        other_itl_s=other.itl_s if other else 0.0,
        other_e2e_s=other.e2e_s if other else 0.0,
        measured=alternative.measured,
        worth=worth,
        reason=reason,
    )


def decide(mine: Latencies | None, alternative: Alternative) -> tuple[str, str]:
    """Yes, no or unsure, and why."""
    if alternative.overloaded:
        return YES, "aggregated engines could not carry this load"
    if mine is None or alternative.unknown:
        return UNSURE, alternative.unknown or "no request was disaggregated"
    margin = MARGIN_MEASURED if alternative.measured else MARGIN_ESTIMATED
    results = {compare(mine, one, margin) for one in alternative.latencies}
    if len(results) > 1:
        return UNSURE, BATCHES_ALIKE
    worth, reason = results.pop()
    if worth == NO and alternative.biased:
        return UNSURE, f"{reason}; but the aggregated requests ran on decode workers, which compute hardly any prompts"
    return worth, reason


def compare(mine: Latencies, other: Latencies, margin: float) -> tuple[str, str]:
    """E2E latency decides. When it is about equal, TTFT and ITL must agree."""
    whole, first, between = (
        better(one, two, margin)
        for one, two in ((mine.e2e_s, other.e2e_s), (mine.ttft_s, other.ttft_s), (mine.itl_s, other.itl_s))
    )
    if whole:
        return (YES if whole > 0 else NO), f"responses complete {'sooner' if whole > 0 else 'later'} disaggregated"
    if first * between < 0:
        lower, higher = ("TTFT", "ITL") if first > 0 else ("ITL", "TTFT")
        return UNSURE, f"disaggregated, {lower} is lower and {higher} is higher: it depends on which matters more"
    if first + between:
        which = "TTFT and ITL are" if first and between else "TTFT is" if first else "ITL is"
        return (YES, f"{which} lower disaggregated") if first + between > 0 else (NO, f"{which} higher disaggregated")
    return NO, "about equal, and aggregated serving is simpler"


def better(mine_s: float, other_s: float, margin: float) -> int:
    """1: clearly lower, -1: clearly higher, 0: about equal."""
    low, high = sorted((mine_s, other_s))
    if high <= low * (1.0 + margin):
        return 0
    return 1 if mine_s < other_s else -1


def summary_of(buckets: Sequence[ReportBucket]) -> str:
    """One sentence for the whole report; each range weighs as much as it has requests."""
    weights = {
        worth: sum(one.disaggregated + one.aggregated for one in buckets if one.worth == worth)
        for worth in (YES, NO, UNSURE)
    }
    total = sum(weights.values())
    if not total:
        return "No requests were served recently."
    most = max(weights, key=lambda worth: weights[worth])
    share = f"{weights[most] / total:.0%} of the requests"
    if most == UNSURE:
        return f"Not known yet whether disaggregation pays off: the data is not sufficient for {share}."
    if most == YES:
        return f"Disaggregation pays off: {share} are served better with separate prefill and decode workers."
    return f"Disaggregation does not pay off: {share} would be served as well or better by aggregated workers."
