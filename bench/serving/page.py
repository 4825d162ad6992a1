"""docs/benchmarks/serving.md, from the runs of ``bench.serving``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.kv_bench_page import table
from bench.serving.loads import Load, Result
from bench.serving.systems import APART, AUTO, DISAGGREGATED, ENGINE, NAMES, ROUTER, SERVER, TWO, Counts
from replay.capacity.report import pyplot

AHEAD = 0.03
"""Below that a difference is called none, and the goal is that auto is no further behind."""
BATONS = (TWO, APART, AUTO)
COLORS = {
    TWO: "tab:orange",
    APART: "tab:red",
    AUTO: "black",
    **dict(
        zip(
            [name for name in NAMES if name not in BATONS],
            ("tab:blue", "tab:green", "tab:purple", "tab:grey"),
            strict=True,
        )
    ),
}


@dataclass(frozen=True)
class Limits:
    """The SLO of a request."""

    ttft_s: float
    tpot_s: float

    def __str__(self) -> str:
        return f"TTFT {self.ttft_s * 1e3:.0f} ms and TPOT {self.tpot_s * 1e3:.0f} ms"


@dataclass(frozen=True)
class Run:
    """One system under one load in one round."""

    result: Result
    counts: Counts
    cpu_s: dict[str, float]
    limits: Limits

    @property
    def tokens_per_s(self) -> float:
        return sum(one.tokens for one in self.result.answers) / self.result.took_s

    @property
    def good_per_s(self) -> float:
        return self.good_share * len(self.result.answers) / self.result.took_s

    @property
    def good_share(self) -> float:
        limits = self.limits
        return fmean(one.ttft_s <= limits.ttft_s and one.tpot_s <= limits.tpot_s for one in self.result.answers)

    @property
    def cached_share(self) -> float:
        """Of the prompts' tokens, what no engine computed."""
        computed = self.counts.computed_tokens / sum(one.prompt_tokens for one in self.result.answers)
        return max(0.0, 1.0 - computed)

    def ttft_ms(self, part: float) -> float:
        return at(part, [one.ttft_s for one in self.result.answers]) * 1e3

    def tpot_ms(self, part: float) -> float:
        return at(part, [one.tpot_s for one in self.result.answers]) * 1e3

    def cpu_ms(self, *groups: str) -> float:
        """Of one request."""
        return sum(self.cpu_s.get(group, 0.0) for group in groups) * 1e3 / len(self.result.answers)

    @property
    def others(self) -> list[str]:
        """What is neither engine, server nor router."""
        return [what for what in self.cpu_s if what not in (ENGINE, SERVER, ROUTER)]

    def said(self) -> str:
        return (
            f"{self.tokens_per_s:.1f} tokens/s, {self.good_share:.0%} good, TTFT p50 {self.ttft_ms(0.5):.0f} ms, "
            f"TPOT p50 {self.tpot_ms(0.5):.1f} ms, cached {self.cached_share:.0%}, {self.counts.handoffs:.0f} handoffs"
        )


Runs = dict[str, dict[str, list[Run]]]
"""By load and system, a run for each round."""
Figure = Callable[[Run], float]


def at(part: float, values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def over(runs: Sequence[Run], figure: Figure, form: str) -> str:
    """The median of the rounds."""
    return format(median(map(figure, runs)), form)


def ranged(values: Sequence[float], form: str) -> str:
    """The median, and the least and the greatest of the rounds."""
    if len(values) == 1:
        return format(values[0], form)
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def ratios(runs: Sequence[Run], others: Sequence[Run], figure: Figure) -> list[float]:
    """Of each round; where the other has nothing good, and this one has, as if it were twice as good."""
    pairs = ((figure(one), figure(other)) for one, other in zip(runs, others, strict=True))
    return [one / other if other else 2.0 if one else 1.0 for one, other in pairs]


def best(by_name: dict[str, list[Run]], names: Sequence[str], figure: Figure) -> str:
    return max(names, key=lambda name: median(map(figure, by_name[name])))


def lines(
    runs: Runs,
    loads: Sequence[Load],
    idle: dict[str, list[dict[str, float]]],
    limits: dict[str, Limits],
    engines: str,
    said: str,
    pictures: Sequence[str],
) -> list[str]:
    """The page."""
    rounds = max(len(each) for by_name in runs.values() for each in by_name.values())
    page = [
        "# What a user would pick instead",
        "",
        "`make bench-serving`; short form: `ARGS=--quick`; on NVIDIA GPUs: `GPU=1`.",
        "",
        f"*{said}*",
        "",
        "Each system has the whole machine to itself, its engines, routers and the one load client included, and as much KV cache as the others.",
        f"{engines}.",
        "",
        "* `vllm serve`: vLLM's server, one engine with all cores (or GPUs).",
        "* sglang-router and vllm-router, from PyPI: two such servers with half of the machine each, `--policy cache_aware`.",
        "* vLLM's P/D proxy: a prefill and a decode server with vLLM's NixlConnector behind `toy_proxy_server.py` of vLLM's source",
        "  distribution, which is run as it is. The connector has Baton's settings of NIXL and UCX: with its defaults a thread of each engine spins.",
        "* Baton: `baton up` whole, with NATS under TLS, orchestrator and collector. `1P1D` asks with `x-baton-mode: disaggregated`; `--both auto`",
        "  starts an engine for each GPU, or on CPUs for each NUMA node.",
        "",
        f"All systems start anew in each of {rounds} round(s), in rotating order; prompts are new in each run. Figures are medians of the rounds, with the least and",
        "the greatest where two numbers follow. *Good*: requests within the SLO, which is 5 times the TTFT and 3 times the TPOT that `vllm serve` needs",
        "for one request of the load's mean length alone. *Cached*: of the prompts' tokens, those that no engine computed, by the engines' own",
        "counters. *Handoffs*: requests whose KV was read from another engine (of vLLM's proxy: reads), and bytes. *CPU*: of engines (EngineCore), of their servers (vLLM's API server,",
        "Baton's worker), of the router or proxy, and of NATS, orchestrator, collector and launcher together.",
        "",
        *summary(runs, loads),
        *(f"![{name}]({name})" for name in pictures),
        "",
    ]  # fmt: skip
    for load in loads:
        slo = f"SLO: {limits[load.kind]}."
        page += [f"## {load.name}", "", load.said, slo, "", *load_table(runs[load.name])]
    return [*page, *processes_table(runs, loads, idle), *tables_of_losses(runs, loads)]


def load_table(by_name: dict[str, list[Run]]) -> list[str]:
    rows: list[list[object]] = []
    for name in (name for name in NAMES if name in by_name):
        each = by_name[name]
        handoffs = over(each, lambda run: run.counts.handoffs, ".0f")
        rows.append([
            name,
            ranged([run.tokens_per_s for run in each], ".1f"),
            ranged([run.good_per_s for run in each], ".2f"),
            over(each, lambda run: run.good_share, ".0%"),
            *(over(each, lambda run, part=part: run.ttft_ms(part), ".0f") for part in (0.5, 0.95)),
            *(over(each, lambda run, part=part: run.tpot_ms(part), ".1f") for part in (0.5, 0.95)),
            over(each, lambda run: run.cached_share, ".0%"),
            f"{handoffs} / {over(each, lambda run: run.counts.handoff_bytes / 1e6, '.0f')}",
            over(each, lambda run: run.cpu_ms(ENGINE), ".0f"),
            over(each, lambda run: run.cpu_ms(SERVER), ".1f"),
            over(each, lambda run: run.cpu_ms(ROUTER), ".1f"),
            over(each, lambda run: run.cpu_ms(*run.others), ".1f"),
        ])  # fmt: skip
    head = (
        "system | tokens/s | good requests/s | good | TTFT ms p50 | p95 | TPOT ms p50 | p95 | cached | handoffs / MB"
        " | CPU ms/request: engines | servers | router | others"
    )
    return table(head, rows)


FIGURES: dict[str, Figure] = {"tokens/s": lambda run: run.tokens_per_s, "good requests/s": lambda run: run.good_per_s}


def summary(runs: Runs, loads: Sequence[Load]) -> list[str]:
    """Baton's auto against the best of the others, load by load."""
    others = [name for name in NAMES if name not in BATONS]
    rows: list[list[object]] = []
    behind = []
    for load in loads:
        by_name = runs[load.name]
        for what, figure in FIGURES.items():
            if load.kind == "rate" and what == "tokens/s":
                continue  # The client decides that.
            rival = best(by_name, others, figure)
            own = best(by_name, BATONS, figure)
            first = best(by_name, NAMES, figure)
            if median(ratios(by_name[AUTO], by_name[first], figure)) < 1.0 - AHEAD:
                behind.append(f"{load.name} ({what}, {first})")
            rows.append([
                load.name,
                what,
                rival,
                ranged(ratios(by_name[AUTO], by_name[rival], figure), ".2f"),
                own,
                ranged(ratios(by_name[own], by_name[rival], figure), ".2f"),
                ranged(ratios(by_name[AUTO], by_name[own], figure), ".2f"),
            ])  # fmt: skip
    where = f"by more than {AHEAD:.0%} at: {', '.join(behind)}" if behind else f"nowhere by more than {AHEAD:.0%}"
    return [
        f"`{AUTO.removeprefix('Baton ')}` is behind the best of all systems {where}.",
        "",
        *table(
            "load | figure | best of the others | auto / it | best of Baton's | it / best of the others | auto / best of Baton's",
            rows,
        ),
    ]


def processes_table(runs: Runs, loads: Sequence[Load], idle: dict[str, list[dict[str, float]]]) -> list[str]:
    """Where Baton's processes use CPU."""
    rows: list[list[object]] = []
    for name in BATONS:
        for what in sorted(idle[name][0]):
            cells = [over(runs[load.name][name], lambda run, what=what: run.cpu_ms(what), ".1f") for load in loads]
            rows.append([name, what, format(median(one[what] for one in idle[name]), ".1%"), *cells])
    return [
        "## Baton's processes",
        "",
        "CPU of each kind of process: of a core while idle, and milliseconds per request, the idle share included.",
        "",
        *table(f"system | process | idle | {' | '.join(load.name for load in loads)}", rows),
    ]


def tables_of_losses(runs: Runs, loads: Sequence[Load]) -> list[str]:
    """Where systems that hand every prompt over lose against those that hand none over."""
    whole = [name for name in NAMES if name not in (*DISAGGREGATED, AUTO)]
    rows: list[list[object]] = []
    lost = []
    for load in loads:
        by_name = runs[load.name]
        figure = FIGURES["good requests/s" if load.kind == "rate" else "tokens/s"]
        apart, together = best(by_name, DISAGGREGATED, figure), best(by_name, whole, figure)
        found = ratios(by_name[apart], by_name[together], figure)
        if median(found) < 1.0 - AHEAD:
            lost.append(load.name)
        rows.append([
            load.name,
            "good requests/s" if load.kind == "rate" else "tokens/s",
            apart,
            together,
            ranged(found, ".2f"),
            ranged(ratios(by_name[apart], by_name[together], lambda run: run.ttft_ms(0.5)), ".2f"),
            ranged(ratios(by_name[apart], by_name[together], lambda run: run.tpot_ms(0.95)), ".2f"),
        ])  # fmt: skip
    where = f"by more than {AHEAD:.0%} at: {', '.join(lost)}" if lost else f"nowhere by more than {AHEAD:.0%}"
    return [
        "## Where P/D loses",
        "",
        f"The better of the two systems that hand every prompt over, beside the best that hands none over: it loses {where}.",
        "",
        *table("load | figure | best P/D | best without | P/D / without | TTFT p50 | TPOT p95", rows),
    ]


# ---- pictures


def draw(runs: Runs, loads: Sequence[Load], page: Path) -> list[str]:
    """Beside the page; their names."""
    plt = pyplot()
    made = {"loads": draw_loads(plt, runs, [load for load in loads if load.kind != "rate"])}
    made["rates"] = draw_rates(plt, runs, [load for load in loads if load.kind == "rate"])
    names = []
    for name, figure in made.items():
        names.append(f"{page.stem}-{name}.png")
        figure.savefig(page.with_name(names[-1]), dpi=90)
        plt.close(figure)
    return names


def draw_loads(plt: Any, runs: Runs, loads: Sequence[Load]) -> Any:
    """A panel for each load: tokens per second of each system, and what of it was within the SLO."""
    figure, axes = plt.subplots(1, len(loads), figsize=(4.2 * len(loads), 3.4), sharey=True, layout="constrained")
    for axis, load in zip(axes, loads, strict=True):
        for place, name in enumerate(NAMES):
            values = [run.tokens_per_s for run in runs[load.name][name]]
            good = median(run.tokens_per_s * run.good_share for run in runs[load.name][name])
            axis.barh(place, median(values), color=COLORS[name], alpha=0.35)
            axis.barh(place, good, color=COLORS[name])
            axis.plot([min(values), max(values)], [place, place], color="black", linewidth=1)
        axis.set_title(load.name)
        axis.set_xlabel("tokens/s (solid: within the SLO)")
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(NAMES)), NAMES, fontsize="small")
    axes[0].invert_yaxis()
    return figure


def draw_rates(plt: Any, runs: Runs, loads: Sequence[Load]) -> Any:
    """By the requests that come each second: what of them is good, and TTFT."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    rates = [load.run.per_s for load in loads if hasattr(load.run, "per_s")]
    panels: tuple[tuple[str, Figure], ...] = (
        ("within the SLO, %", lambda run: run.good_share * 100),
        ("TTFT p95, ms", lambda run: run.ttft_ms(0.95)),
    )
    for axis, (title, value) in zip(axes, panels, strict=True):
        for name in NAMES:
            found = [median(map(value, runs[load.name][name])) for load in loads]
            style = "-" if name in BATONS else "--"
            axis.plot(rates, found, style, marker="o", markersize=3, color=COLORS[name], label=name)
        axis.set_title(title)
        axis.set_xlabel("requests/s")
        axis.grid(alpha=0.3)
    axes[1].set_yscale("log")
    axes[0].legend(fontsize="x-small")
    return figure
