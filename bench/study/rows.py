"""The study's numbers as the page has them, kept beside it as JSON. Infinity is null there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from bench.study.bound import Bound
from bench.study.code_digest import analysis_digest, is_own
from bench.study.results import Bucket
from bench.study.runs import Run
from bench.study.samples import decode
from bench.study.statistics import Interval, Pool, compared, measured
from replay.spread import Spread

Number = float | None
"""None: infinite."""
Range = tuple[Number, Number, Number]
"""Value, and ends of its 95 % interval."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One policy at one load of one workload on one fleet."""

    policy: str
    values: str
    """The policy with its tuned values."""
    code: str
    """Digest of the code that was measured."""
    measured_at: str
    """Date of the oldest of its runs."""
    commit: str
    goodput: Range
    """Requests per second."""
    goodput_tokens: Range
    good_share: Range
    good_tokens_share: Range
    ttft_p50: Range
    ttft_p95: Range
    ttft_p99: Range
    itl_s: tuple[Number, Number, Number]
    """p50, p95 and p99; means of the seeds, as are those below."""
    hit_share: float
    fetched_share: float
    refused_share: float
    preemptions: float
    buckets: list[Bucket]


class Versus(msgspec.Struct, frozen=True, kw_only=True):
    """One of Baton's policies less the best rival in the same measure, relative to it and paired."""

    policy: str
    rivals: dict[str, str]
    """The best rival by measure."""
    differences: dict[str, Range]


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """All policies with the same requests on the same fleet."""

    section: str
    workload: str
    is_tuned: bool
    fleet: str
    label: str
    load: float
    offered_per_s: float
    requests: int
    """Of all seeds together."""
    seeds: list[int]
    analysis: str
    """Digest of the code that made the bound and the intervals."""
    bound_per_s: float
    """Mean of the seeds, as below."""
    bound_tokens_per_s: float
    rows: list[Row]
    versus: list[Versus]


class Data(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of the page that was measured."""

    command: str
    machine: str
    is_quick: bool
    ttft_s: float
    itl_s: float
    missing: list[str]
    """Workloads whose trace was not given."""
    groups: list[Group]


COMPARED = ("good_share", "good_tokens_share", "ttft_p95")
MORE_IS_BETTER = ("good_share", "good_tokens_share")


def group_of(
    names: tuple[str, str], runs: dict[str, Sequence[Run]], bounds: Sequence[Bound], commit: str, *, is_tuned: bool
) -> Group:
    """``names``: section and load. ``runs``: by policy, a seed each, in the same order."""
    first = next(iter(runs.values()))
    case = first[0].case
    pools = {policy: Pool([decode(run.samples) for run in each], case.slo) for policy, each in runs.items()}
    rows = [row_of(policy, each, pools[policy], commit) for policy, each in runs.items()]
    return Group(
        section=names[0],
        workload=case.workload.name,
        is_tuned=is_tuned,
        fleet=case.fleet.name,
        label=names[1],
        load=case.load,
        offered_per_s=mean([run.result.offered_per_s for run in first]),
        requests=sum(run.result.requests for run in first),
        seeds=[run.case.seed for run in first],
        analysis=analysis_digest(),
        bound_per_s=mean([bound.requests_per_s for bound in bounds]),
        bound_tokens_per_s=mean([bound.tokens_per_s for bound in bounds]),
        rows=rows,
        versus=[versus_of(policy, rows, pools) for policy in runs if is_own(policy)],
    )


def row_of(policy: str, runs: Sequence[Run], pool: Pool, commit: str) -> Row:
    results, found = [run.result for run in runs], measured(pool)
    itl: list[Spread] = [result.itl for result in results]
    return Row(
        policy=policy,
        values=runs[0].case.policy,
        code=runs[0].case.code,
        measured_at=day_of(min(run.ended_at for run in runs)),
        commit=commit,
        goodput=scaled(found["good_share"], mean([one.goodput_per_s for one in results])),
        goodput_tokens=scaled(found["good_tokens_share"], mean([one.goodput_tokens_per_s for one in results])),
        good_share=range_of(found["good_share"]),
        good_tokens_share=range_of(found["good_tokens_share"]),
        ttft_p50=range_of(found["ttft_p50"]),
        ttft_p95=range_of(found["ttft_p95"]),
        ttft_p99=range_of(found["ttft_p99"]),
        itl_s=(
            finite(mean([one.p50 for one in itl])),
            finite(mean([one.p95 for one in itl])),
            finite(mean([one.p99 for one in itl])),
        ),
        hit_share=mean([one.hit_share for one in results]),
        fetched_share=mean([one.fetched_share for one in results]),
        refused_share=mean([one.refused / one.requests for one in results]),
        preemptions=mean([float(one.preemptions) for one in results]),
        buckets=merged([one.buckets for one in results]),
    )


def versus_of(policy: str, rows: Sequence[Row], pools: dict[str, Pool]) -> Versus:
    """The best rival is chosen with hindsight, by measure: that favours rivals."""
    rivals = [row for row in rows if not is_own(row.policy)]
    best: dict[str, str] = {}
    differences: dict[str, Range] = {}
    for name in COMPARED if rivals else ():
        sign = -1.0 if name in MORE_IS_BETTER else 1.0
        best[name] = min(rivals, key=lambda row: sign * value_of(getattr(row, name)[0])).policy
        differences[name] = range_of(compared(pools[policy], pools[best[name]], [name])[name])
    return Versus(policy=policy, rivals=best, differences=differences)


def merged(runs: Sequence[Sequence[Bucket]]) -> list[Bucket]:
    """Buckets of all seeds together."""
    found = []
    for start in sorted({bucket.tokens_min for run in runs for bucket in run}):
        same = [bucket for run in runs for bucket in run if bucket.tokens_min == start]
        count = sum(bucket.requests for bucket in same)
        found.append(
            Bucket(
                tokens_min=start,
                requests=count,
                served_share=sum(bucket.served_share * bucket.requests for bucket in same) / count,
                good_share=sum(bucket.good_share * bucket.requests for bucket in same) / count,
            )
        )
    return found


def scaled(interval: Interval, per_s: float) -> Range:
    """The interval of a share as one of a rate."""
    factor = per_s / interval.value if interval.value else 0.0
    return per_s, interval.low * factor, interval.high * factor


def range_of(interval: Interval) -> Range:
    """For JSON."""
    return finite(interval.value), finite(interval.low), finite(interval.high)


def finite(value: float) -> Number:
    """None for infinity."""
    return value if math.isfinite(value) else None


def value_of(value: Number) -> float:
    """Back again."""
    return math.inf if value is None else value


def mean(values: Sequence[float]) -> float:
    """Infinite where one is."""
    return sum(values) / len(values)


def day_of(at_s: float) -> str:
    """UTC."""
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d}"
