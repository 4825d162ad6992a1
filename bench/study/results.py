"""Results of one policy at one load (latencies, hit rate, goodput): tables on the screen and in files, and plots."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from bench.policies import BATON, BATON_STRICT, BATON_WAITING, ORACLE
from replay.capacity.report import pyplot
from replay.legs import ReplayedRequest
from replay.profile import seconds_of
from replay.simworker import SimWorker
from replay.spread import NEVER, Spread, rank, spread_of


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Targets: the first token within ``ttft_s``, further tokens on average within ``itl_s`` of each other."""

    ttft_s: float = 5.0
    itl_s: float = 0.1

    def met_by(self, ttft_s: float, tpot_s: float) -> bool:
        """Whether a served request met both."""
        return ttft_s <= self.ttft_s and tpot_s <= self.itl_s


LENGTHS = (1024, 4096, 16_384, 65_536)
"""Prompt tokens at which the next bucket of ``Result.buckets`` begins."""


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """Requests with prompts of one range of lengths."""

    tokens_min: int
    """Shortest prompt of the bucket; it ends where the next one begins."""
    requests: int
    served_share: float
    """Share of them that was served, however late."""
    good_share: float
    """Share of them that met both targets."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One policy at one load. A request that was rejected or failed is infinitely late, and so are all its tokens."""

    policy: str
    load: float
    label: str
    """Name of the load, such as knee."""
    offered_per_s: float
    requests: int
    refused: int
    """Requests that were rejected or failed."""
    ttft: Spread
    """The mean is over served requests, here and below."""
    tpot: Spread
    """Mean time between tokens per request."""
    itl: Spread
    """Time between tokens, over all tokens."""
    hit_share: float
    """Share of the served requests' prompt tokens that the worker which computed the prompt had cached."""
    fetched_share: float
    """Share of the served requests' prompt tokens that was read from other workers and stores."""
    tier_share: float = 0.0
    """Part of ``fetched_share`` that stores in host memory had."""
    goodput_per_s: float
    """Requests that met both targets, per second of the trace."""
    good_share: float
    goodput_tokens_per_s: float = 0.0
    """Prompt and completion tokens of the requests that met both targets, per second of the trace."""
    good_tokens_share: float = 0.0
    buckets: list[Bucket] = []
    """By prompt length, without empty ones."""
    preemptions: int
    busy_share: float
    """Share of the workers' time spent in steps while requests arrived."""
    cpu_s: float
    """CPU seconds of the run."""


def summarise(
    name: tuple[str, float, str],
    outcomes: Sequence[ReplayedRequest],
    workers: Iterable[SimWorker],
    slo: Slo,
    cpu_s: float,
) -> Result:
    """``name``: policy, load and the load's label."""
    served = [replayed for replayed in outcomes if replayed.finished_at is not None]
    lost = [replayed.request for replayed in outcomes if replayed.finished_at is None]
    arrivals = [replayed.request.at_s for replayed in outcomes]
    span_s = max(max(arrivals) - min(arrivals), 1e-9)
    ended_s = max((replayed.finished_at or 0.0 for replayed in served), default=span_s)
    prompt_tokens = max(1, sum(replayed.request.input_tokens for replayed in served))
    good = [replayed for replayed in served if slo.met_by(replayed.ttft_s, replayed.tpot_s)]
    good_tokens = sum(replayed.request.tokens for replayed in good)
    itl: Counter[int] = Counter()
    busy_s, count = 0.0, 0
    for worker in workers:
        itl.update(worker.engine.speeds.itl)
        busy_s, count = busy_s + worker.engine.speeds.busy_s, count + 1
    return Result(
        policy=name[0],
        load=name[1],
        label=name[2],
        offered_per_s=len(outcomes) / span_s,
        requests=len(outcomes),
        refused=len(lost),
        ttft=spread_of([replayed.ttft_s for replayed in served], len(lost)),
        tpot=spread_of(
            [replayed.tpot_s for replayed in served if replayed.request.output_tokens > 1],
            sum(request.output_tokens > 1 for request in lost),
        ),
        itl=spread_of_counts(itl, sum(request.output_tokens - 1 for request in lost)),
        hit_share=sum(replayed.cached_tokens for replayed in served) / prompt_tokens,
        fetched_share=sum(replayed.fetched_tokens for replayed in served) / prompt_tokens,
        tier_share=sum(replayed.tier_tokens for replayed in served) / prompt_tokens,
        goodput_per_s=len(good) / span_s,
        good_share=len(good) / len(outcomes),
        goodput_tokens_per_s=good_tokens / span_s,
        good_tokens_share=good_tokens / sum(replayed.request.tokens for replayed in outcomes),
        buckets=buckets_of([replayed.request.input_tokens for replayed in group] for group in (outcomes, served, good)),
        preemptions=sum(replayed.preemptions for replayed in served),
        busy_share=busy_s / (max(1, count) * max(ended_s, 1e-9)),
        cpu_s=cpu_s,
    )


def buckets_of(groups: Iterable[Iterable[int]]) -> list[Bucket]:
    """``groups``: prompt lengths of all requests, of the served ones and of the good ones."""
    offered, served, good = (Counter(bisect_right(LENGTHS, tokens) for tokens in group) for group in groups)
    return [
        Bucket(
            tokens_min=(1, *LENGTHS)[index],
            requests=requests,
            served_share=served[index] / requests,
            good_share=good[index] / requests,
        )
        for index, requests in sorted(offered.items())
    ]


def spread_of_counts(counts: Counter[int], never: int = 0) -> Spread:
    """As ``spread_of``, for times counted in buckets."""
    served = sum(counts.values())
    if not served:
        return NEVER if never else Spread()
    total = served + never
    mean = sum(seconds_of(bucket) * times for bucket, times in counts.items()) / served
    found: dict[str, float] = {f"p{percent}": inf for percent in (50, 95, 99)}
    seen = 0
    wanted = [50, 95, 99]
    for bucket in sorted(counts):
        seen += counts[bucket]
        while wanted and seen > rank(total, wanted[0]):
            found[f"p{wanted.pop(0)}"] = seconds_of(bucket)
    return Spread(mean=mean, **found)


COLUMNS: dict[str, Callable[[Result], str]] = {
    "policy": lambda r: r.policy,
    "TTFT p50 s": lambda r: f"{r.ttft.p50:.2f}",
    "p95": lambda r: f"{r.ttft.p95:.2f}",
    "p99": lambda r: f"{r.ttft.p99:.2f}",
    "mean": lambda r: f"{r.ttft.mean:.2f}",
    "ITL p50 ms": lambda r: f"{r.itl.p50 * 1e3:.1f}",
    "p95 ": lambda r: f"{r.itl.p95 * 1e3:.1f}",
    "p99 ": lambda r: f"{r.itl.p99 * 1e3:.1f}",
    "hit %": lambda r: f"{r.hit_share * 100:.1f}",
    "+fetched %": lambda r: f"{r.fetched_share * 100:.1f}",
    "of it host memory %": lambda r: f"{r.tier_share * 100:.1f}",
    "goodput/s": lambda r: f"{r.goodput_per_s:.3f}",
    "good %": lambda r: f"{r.good_share * 100:.1f}",
    "tokens/s": lambda r: f"{r.goodput_tokens_per_s:.0f}",
    "tokens %": lambda r: f"{r.good_tokens_share * 100:.1f}",
    "refused": lambda r: str(r.refused),
    "preempted": lambda r: str(r.preemptions),
    "CPU s": lambda r: f"{r.cpu_s:.0f}",
}


def title_of(result: Result) -> str:
    """Title of the table for one load."""
    load = f"{result.load:.3g} times the trace"
    return f"{result.label}: {result.offered_per_s:.2f} requests/s ({load})"


def table_of(results: Sequence[Result]) -> Table:
    """Table for the screen; all results are of one load."""
    table = Table(title=title_of(results[0]), title_justify="left")
    for name in COLUMNS:
        table.add_column(name.strip(), justify="left" if name == "policy" else "right")
    for result in results:
        table.add_row(*(column(result) for column in COLUMNS.values()))
    return table


def markdown_of(results: Sequence[Result]) -> str:
    """One table for each load."""
    parts = []
    for label in dict.fromkeys(result.label for result in results):
        rows = [result for result in results if result.label == label]
        lines = [f"### {title_of(rows[0])}", ""]
        lines.append("| " + " | ".join(name.strip() for name in COLUMNS) + " |")
        lines.append("|---" + "|---:" * (len(COLUMNS) - 1) + "|")
        lines += ["| " + " | ".join(column(row) for column in COLUMNS.values()) + " |" for row in rows]
        parts += ["\n".join(lines), buckets_markdown_of(rows)]
    return "\n\n".join(parts) + "\n"


def buckets_markdown_of(results: Sequence[Result]) -> str:
    """Served and good shares by prompt length; all results are of one load."""
    starts = sorted({bucket.tokens_min for result in results for bucket in result.buckets})
    names = [f"{start} to {end - 1}" for start, end in pairwise(starts)] + [f"from {start}" for start in starts[-1:]]
    lines = ["| served / good %, by prompt tokens | " + " | ".join(names) + " |", "|---" + "|---:" * len(names) + "|"]
    for result in results:
        cells = {one.tokens_min: f"{one.served_share * 100:.1f} / {one.good_share * 100:.1f}" for one in result.buckets}
        lines.append(f"| {result.policy} | " + " | ".join(cells.get(start, "") for start in starts) + " |")
    return "\n".join(lines)


def save(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write ``results.md`` and ``results.json``, where infinity is null; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "results.md", folder / "results.json"]
    paths[0].write_text(markdown_of(results))
    paths[1].write_bytes(msgspec.json.format(msgspec.json.encode(list(results)), indent=1) + b"\n")
    return paths


Measure = Callable[[Result], float]
STYLES: dict[str, dict[str, Any]] = {
    BATON: {"color": "black", "linewidth": 1.2},
    BATON_WAITING: {"color": "black", "linewidth": 2.5},
    BATON_STRICT: {"color": "crimson", "linewidth": 2.5},
    ORACLE: {"color": "grey", "linestyle": "--"},
}
OTHERS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan")
LINES = ("-", ":")
"""Line styles of policies without one of their own."""
PICTURES: dict[str, tuple[str, list[tuple[str, Measure]]]] = {
    "ttft": (
        "time to the first token (s)",
        [("p50", lambda r: r.ttft.p50), ("p95", lambda r: r.ttft.p95), ("p99", lambda r: r.ttft.p99)],
    ),
    "itl": (
        "time between tokens (ms)",
        [("p50", lambda r: r.itl.p50 * 1e3), ("p95", lambda r: r.itl.p95 * 1e3), ("p99", lambda r: r.itl.p99 * 1e3)],
    ),
    "hits": (
        "share of prompt tokens",
        [("cached", lambda r: r.hit_share), ("cached or fetched", lambda r: r.hit_share + r.fetched_share)],
    ),
    "goodput": ("requests/s that kept both targets", [("goodput", lambda r: r.goodput_per_s)]),
}


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """One file for each picture."""
    plt = pyplot()
    paths = []
    for name, (unit, measures) in PICTURES.items():
        size = (max(6.4, 4.6 * len(measures)), 4.6)
        figure, axes = plt.subplots(1, len(measures), figsize=size, squeeze=False, layout="constrained")
        for axis, (title, measure) in zip(axes[0], measures, strict=True):
            draw_lines(axis, results, measure)
            axis.set_title(title)
            axis.set_xlabel("offered requests/s")
            axis.set_ylabel(unit)
            if name == "ttft":
                axis.set_yscale("log")
        figure.legend(*axes[0][-1].get_legend_handles_labels(), fontsize="x-small", ncols=4, loc="outside lower center")
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=90)
        plt.close(figure)
    return paths


def draw_lines(axis: Any, results: Sequence[Result], measure: Measure) -> None:
    """One for each policy, in the order of loads."""
    others = ({"linestyle": line, "color": color, "linewidth": 1.0} for line in LINES for color in OTHERS)
    for policy in dict.fromkeys(result.policy for result in results):
        points = sorted((result.offered_per_s, measure(result)) for result in results if result.policy == policy)
        style = STYLES.get(policy) or next(others, {})
        axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=policy, **style)
    axis.grid(alpha=0.3)
