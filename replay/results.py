"""What a run came to: latencies, hit rate and goodput of one policy at one load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf

import msgspec

from replay.legs import Flight
from replay.simworker import SimWorker
from replay.speeds import seconds_of


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """What counts as good: the first token within ``ttft_s``, the others ``itl_s`` apart on average."""

    ttft_s: float = 5.0
    itl_s: float = 0.1


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Of one measure, in seconds."""

    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One policy at one load."""

    policy: str
    load: float
    label: str
    """What the load is called, such as knee."""
    offered_per_s: float
    requests: int
    refused: int
    ttft: Spread
    """A refused request counts as later than any other; the mean is of those that were served."""
    tpot: Spread
    """The mean time between tokens of each request."""
    itl: Spread
    """The time between tokens, of all tokens."""
    hit_share: float
    """Of all prompt tokens, those found where they were wanted."""
    fetched_share: float
    """And those read from other workers."""
    goodput_per_s: float
    """Requests that kept both targets, in a second of the trace; refused ones did not."""
    good_share: float
    preemptions: int
    busy_share: float
    """Of the workers' time while requests arrived, spent in steps."""
    cpu_s: float
    """What the run took."""


def summarise(
    name: tuple[str, float, str], flights: Sequence[Flight], workers: Iterable[SimWorker], slo: Slo, cpu_s: float
) -> Result:
    """``name``: policy, load and the load's label."""
    served = [flight for flight in flights if flight.finished_at is not None]
    span_s = max(flights[-1].request.at_s - flights[0].request.at_s, 1e-9)
    ended_s = max((flight.finished_at or 0.0 for flight in served), default=span_s)
    prompt_tokens = max(1, sum(flight.request.input_tokens for flight in served))
    good = sum(flight.ttft_s <= slo.ttft_s and flight.tpot_s <= slo.itl_s for flight in served)
    itl: Counter[int] = Counter()
    busy_s, count = 0.0, 0
    for worker in workers:
        itl.update(worker.engine.speeds.itl)
        busy_s, count = busy_s + worker.engine.speeds.busy_s, count + 1
    return Result(
        policy=name[0],
        load=name[1],
        label=name[2],
        offered_per_s=len(flights) / span_s,
        requests=len(flights),
        refused=len(flights) - len(served),
        ttft=spread_of([flight.ttft_s for flight in served], len(flights) - len(served)),
        tpot=spread_of([flight.tpot_s for flight in served if flight.request.output_tokens > 1]),
        itl=spread_of_counts(itl),
        hit_share=sum(flight.cached_tokens for flight in served) / prompt_tokens,
        fetched_share=sum(flight.fetched_tokens for flight in served) / prompt_tokens,
        goodput_per_s=good / span_s,
        good_share=good / len(flights),
        preemptions=sum(flight.preemptions for flight in served),
        busy_share=busy_s / (max(1, count) * max(ended_s, 1e-9)),
        cpu_s=cpu_s,
    )


def spread_of(values: Sequence[float], never: int = 0) -> Spread:
    """Percentiles by the nearest rank; so many more values never came, and count as infinite."""
    if not values:
        return Spread()
    ordered = sorted(values) + [inf] * never
    return Spread(mean=sum(values) / len(values), **{f"p{p}": ordered[rank(len(ordered), p)] for p in (50, 95, 99)})


def rank(count: int, percent: int) -> int:
    """Index of a percentile among so many."""
    return min(count - 1, -(-count * percent // 100) - 1)


def spread_of_counts(counts: Counter[int]) -> Spread:
    """The same, of times counted in buckets."""
    total = sum(counts.values())
    if not total:
        return Spread()
    mean = sum(seconds_of(bucket) * times for bucket, times in counts.items()) / total
    found: dict[str, float] = {}
    seen = 0
    wanted = [50, 95, 99]
    for bucket in sorted(counts):
        seen += counts[bucket]
        while wanted and seen > rank(total, wanted[0]):
            found[f"p{wanted.pop(0)}"] = seconds_of(bucket)
    return Spread(mean=mean, **found)
