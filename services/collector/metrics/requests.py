"""Totals and latencies of finished requests, as routers report them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from services.collector.metrics.windows import OTHER, Histogram, LabelSet, Rate
from shared.contracts.failures import Reason
from shared.contracts.inference import RequestFinished

MODELS_MAX = 64
STREAMED, OFFERED = HANDOFFS = ("streamed", "offered")
MODES = ("aggregated", "disaggregated", "decode_first")
TOKENS_MAX = 1 << 32
"""Of one request. Workers report the counts; a total that has taken in more is a float too coarse to count on."""
REASONS = frozenset(reason.value for reason in Reason)


def plausible(tokens: int) -> int:
    """The tokens of one request; 0 where they are not known (-1), and for more than any request has."""
    return tokens if 0 <= tokens <= TOKENS_MAX else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Upper bounds of the histograms' buckets, seconds."""

    ttft: tuple[float, ...]
    itl: tuple[float, ...]
    e2e: tuple[float, ...]
    kv: tuple[float, ...]
    """KV wait and KV read times."""


class Latencies:
    """TTFT, ITL and E2E of requests, seconds."""

    __slots__ = ("e2e", "itl", "ttft")

    def __init__(self, bounds: Bounds) -> None:
        self.ttft = Histogram(bounds.ttft)
        self.itl = Histogram(bounds.itl)
        self.e2e = Histogram(bounds.e2e)

    def observe(self, request: RequestFinished) -> None:
        """Add one request's latencies; -1 means not known and is skipped, and so is a line of a batch."""
        if request.is_batch:
            return
        for histogram, value in ((self.ttft, request.ttft_s), (self.itl, request.itl_s), (self.e2e, request.e2e_s)):
            if value >= 0.0:
                histogram.observe(value)


@dataclass(slots=True)
class CachePredictions:
    """Cached tokens as the router predicted them and as the engines found them, where both are known."""

    predicted: int = 0
    actual: int = 0
    missed: int = 0
    """Sum of absolute errors, so that errors in both directions do not cancel out."""

    def compare(self, predicted: int, actual: int) -> None:
        """Add one request; -1 means not known."""
        if 0 <= predicted <= TOKENS_MAX and 0 <= actual <= TOKENS_MAX:
            self.predicted += predicted
            self.actual += actual
            self.missed += abs(predicted - actual)


class Handoffs:
    """KV handoffs of disaggregated requests: streamed during prefill, or offered after it."""

    def __init__(self, bounds: Bounds) -> None:
        self.count = dict.fromkeys(HANDOFFS, 0)
        self.waits = {each: Histogram(bounds.kv) for each in HANDOFFS}
        self.reads = {each: Histogram(bounds.kv) for each in HANDOFFS}
        self.recomputed = 0
        """Tokens that were computed again after a failed transfer: the first sign of trouble with the KV exchange."""
        self.reprefilled = 0
        self.read_back = 0

    def add(self, request: RequestFinished) -> None:
        """Add one request; -1 means not known."""
        self.recomputed += plausible(request.recomputed_tokens)
        self.reprefilled += plausible(request.reprefilled_tokens)
        self.read_back += plausible(request.readback_tokens)
        if request.mode != "disaggregated" or request.received_tokens <= 0:
            return
        handoff = STREAMED if request.streamed_handoff else OFFERED
        self.count[handoff] += 1
        for histogram, value in ((self.waits[handoff], request.kv_wait_s), (self.reads[handoff], request.kv_read_s)):
            if value >= 0.0:
                histogram.observe(value)


class Requests:
    """All requests since the start. Label values are bounded."""

    def __init__(self, bounds: Bounds, now: float) -> None:
        self.finished: Counter[tuple[str, str, str]] = Counter()
        """By model, mode and HTTP status."""
        self.failed: Counter[tuple[str, str]] = Counter()
        """By model and reason."""
        self.tokens: Counter[tuple[str, str]] = Counter()
        """By model and kind: prompt or completion."""
        self.latencies: dict[tuple[str, str], Latencies] = {}
        """By model and mode."""
        self.predictions = CachePredictions()
        self.handoffs = Handoffs(bounds)
        self.rate = Rate(now)
        self.prompt_tokens, self.completion_tokens = Rate(now), Rate(now)
        self._bounds = bounds
        self._models = LabelSet(MODELS_MAX)

    def add(self, request: RequestFinished, now: float) -> None:
        # Clients can send any model name. Unknown ones would fill the label set and displace served models.
        is_unknown = request.reason == Reason.MODEL_UNKNOWN
        model, mode = OTHER if is_unknown else self._models.bounded(request.model), mode_of(request)
        self.finished[model, mode, str(request.status)] += 1
        if request.reason:
            self.failed[model, reason_of(request)] += 1
        if (model, mode) not in self.latencies:
            self.latencies[model, mode] = Latencies(self._bounds)
        self.latencies[model, mode].observe(request)
        self.predictions.compare(request.predicted_cached_tokens, request.cached_tokens)
        self.handoffs.add(request)
        self.rate.add(1, now)
        for kind, tokens, rate in (
            ("prompt", request.prompt_tokens, self.prompt_tokens),
            ("completion", request.completion_tokens, self.completion_tokens),
        ):
            known = plausible(tokens)
            self.tokens[model, kind] += known
            rate.add(known, now)


def mode_of(request: RequestFinished) -> str:
    return request.mode if request.mode in MODES else OTHER


def reason_of(request: RequestFinished) -> str:
    """The failure reason as a label."""
    return request.reason if request.reason in REASONS else OTHER
