"""A plan as text for the terminal, and as a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from replay.capacity.fleet_file import fleet_toml
from replay.capacity.plan import Engine, Plan, SplitResult
from replay.capacity.search import SIZE_MAX
from replay.capacity.trial import Trial
from replay.capacity.workload import Summary
from replay.split import LETTERS, Split
from shared.text.formats import duration, in_bytes

SHOWN_MAX = 10
BAR = 12
"""Columns of the longest bar."""
EIGHTHS = " ▏▎▍▌▋▊▉"
LABEL = 12
"""Columns of the labels."""
DOCS = "docs/planning.md"
ADVICE = {
    "prefill compute": "faster prefill, more workers that prefill, or more cache hits",
    "decode speed": "faster decoding, more workers that decode, or a longer time between tokens",
    "KV memory": "a larger KV cache: more memory, fp8 KV, or more workers that decode",
    "KV transfer": "a faster network between the workers, or workers for both",
}


def draw(plan: Plan, console: Console) -> None:
    """The outcome first, then the splits, the limit, the smallest fleet and what to know about the inputs."""
    for label, text in (("workload", workload(plan)), ("targets", targets(plan)), ("engine", engine(plan))):
        _line(console, label, text)
    console.print()
    console.print(outcome(plan))
    console.print()
    console.print(splits(plan, console.width))
    console.print()
    for label, text in conclusions(plan):
        _line(console, label, text)
    if rows := fleet_toml(chosen(plan), {role: one.layout for role, one in plan.engines.items()}):
        _line(console, "fleet.toml", rows.rstrip())
    for note in plan.notes:
        _line(console, "note", note, "yellow")
    error = math.sqrt(plan.target.share * (1 - plan.target.share) / plan.searched.requests)
    chance = f"A simulation of {plan.searched.requests:,} requests: ±{2 * error:.1%} of them in time by chance."
    _line(console, "accuracy", f"{chance} Its errors against live runs: {DOCS}", "dim")


def _line(console: Console, label: str, text: str, style: str = "") -> None:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=LABEL - 2, no_wrap=True, style="dim")
    grid.add_column(overflow="fold", style=style)
    grid.add_row(label, Text(text))
    console.print(grid, highlight=False)


def workload(plan: Plan) -> str:
    """Its name, rate and sizes."""
    text = f"{plan.workload}: {_sizes(plan.size)}"
    if plan.searched.requests < plan.size.requests:
        text += f"\nsearched with its busiest part: {_sizes(plan.searched)}"
    return text


def _sizes(size: Summary) -> str:
    minutes = f"{size.seconds / 60:.0f} min" if size.seconds >= 600 else f"{size.seconds:.0f} s"
    return (
        f"{size.requests:,} requests in {minutes}, {size.requests_per_s:.3g}/s, {size.prompt_tokens:,.0f} prompt "
        f"tokens ({size.shared:.0%} seen before) and {size.output_tokens:,.0f} output tokens on average"
    )


def targets(plan: Plan) -> str:
    """In one sentence."""
    target = plan.target
    return (
        f"{_percent(target.share)} of the requests: first token within {target.ttft_s:g} s, "
        f"then at most {target.itl_s * 1e3:g} ms between tokens on average"
    )


def engine(plan: Plan) -> str:
    """Where its speeds are from, and what it is in each layout."""
    one = next(iter(plan.engines.values()))
    source = "speeds measured by its workers" if one.measured else "speeds from first principles, not measured"
    roles: dict[Engine, list[str]] = {}
    for role, each in plan.engines.items():
        roles.setdefault(each, []).append(role)
    if len(roles) == 1:
        return f"{one.name} ({source}), {_engine(one)}"
    lines = (f"{', '.join(names)}: {each.layout}, {_engine(each)}" for each, names in roles.items())
    return "\n".join([f"{one.name} ({source})", *lines])


def _engine(one: Engine) -> str:
    of = f"group of {one.layout.data} ranks" if one.layout.data > 1 else "worker"
    mean = f"the mean prompt alone takes {duration(one.prompt_s)}"
    states = f" (the states of a running request take the room of {one.state_tokens:,})" if one.state_tokens else ""
    handoff = f"its handoff reads {in_bytes(one.handoff_bytes)}"
    return f"{_gpus(one.gpus)} per {of}, {one.kv_tokens:,} tokens of KV{states}; {mean}, {handoff}"


def outcome(plan: Plan) -> Text:
    """Whether the fleet is enough, and for how much."""
    best = plan.best.split
    fleet = f"{_gpus(plan.gpus_of(best))} as {best}"
    if plan.enough:
        known = math.isfinite(plan.best.limit.fails)
        limit = f"up to {plan.headroom:.2f} times this load" if known else "at every load that was tried"
        return Text.assemble(("✓ Enough. ", "bold green"), f"{fleet} keep the targets {limit}.")
    if plan.headroom:
        text = (
            f"{fleet}, the best split that was tried, keep the targets up to {plan.headroom:.2f} times this load only."
        )
    else:
        text = f"{fleet}, the best split that was tried, keep the targets at no load."
    return Text.assemble(("✗ Not enough. ", "bold red"), text)


def _gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def splits(plan: Plan, width: int) -> Table:
    """One row for each split, the best ones only."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    for role in LETTERS.values():
        table.add_column(role, no_wrap=True, justify="right")
    for heading in ("in time", "TTFT p50", "p95", "ITL p95", "refused"):
        table.add_column(heading, no_wrap=True, justify="right")
    table.add_column("busy", no_wrap=True)
    table.add_column("carries", no_wrap=True)
    most = max((_carries(result) for result in plan.splits), default=1.0) or 1.0
    bar = BAR if width >= 100 else 0
    for result in plan.splits[:SHOWN_MAX]:
        table.add_row(*_row(result, plan, most, bar), style="bold" if result is plan.best else "")
    hidden = len(plan.splits) - SHOWN_MAX
    if hidden > 0:
        table.add_row("", Text(f"and {hidden} more", "dim"))
    return table


def _row(result: SplitResult, plan: Plan, most: float, bar: int) -> Iterator[Text]:
    trial, split = result.at_load, result.split
    yield Text("➜" if result is plan.best else " ", "green")
    for role in LETTERS.values():
        yield Text(str(getattr(split, role) or "·"), "" if getattr(split, role) else "dim")
    in_time = f"{'<' if trial.stopped else ''}{trial.in_time:.1%}"
    yield Text(in_time, "green" if trial.keeps(plan.target.share) else "red")
    for value in (trial.ttft.p50, trial.ttft.p95):
        yield Text("·" if trial.stopped else _seconds(value), "dim" if trial.stopped else "")
    yield Text("·" if trial.stopped else _seconds(trial.itl.p95), "dim" if trial.stopped else "")
    yield Text("·" if trial.stopped else f"{trial.refused / trial.requests:.1%}", "dim" if trial.stopped else "")
    yield Text(busy(trial))
    drawn = _bar(_carries(result) / most, bar)
    style = "bright_black" if result.limit.beaten else "cyan"
    yield Text.assemble((drawn.replace("█", "░") if result.limit.beaten else drawn, style), f"{_limit(result):>7}")


def busy(trial: Trial) -> str:
    """Busy share of each role's workers."""
    return " ".join(f"{role[0].upper()} {share:.0%}" for role, share in trial.busy.items())


def _carries(result: SplitResult) -> float:
    limit = result.limit
    return limit.fails if limit.beaten else limit.keeps


def _limit(result: SplitResult) -> str:
    limit = result.limit
    if limit.beaten:
        return f"<{limit.fails:.2f}x"
    if not limit.keeps:
        return "nothing"
    return f"{'' if math.isfinite(limit.fails) else '>'}{limit.keeps:.2f}x"


def _bar(share: float, columns: int) -> str:
    if not columns:
        return ""
    eighths = round(max(0.0, min(1.0, share)) * columns * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(columns) + " "


def _seconds(value: float) -> str:
    return "refused" if math.isinf(value) else duration(value)


def conclusions(plan: Plan) -> Iterator[tuple[str, str]]:
    """What limits the best split, the smallest fleet, the whole workload, and how to start it."""
    yield "limit", limit(plan)
    yield "smallest", smallest(plan)
    if plan.whole is not None:
        trial = plan.whole
        times = (
            f"TTFT p50 {_seconds(trial.ttft.p50)}, p95 {_seconds(trial.ttft.p95)}, ITL p95 {_seconds(trial.itl.p95)}"
        )
        shares = f"{trial.in_time:.1%} in time, {trial.refused / trial.requests:.1%} refused"
        yield "whole load", f"all {plan.size.requests:,} requests: {shares}, {times}"
    yield "start it", start(plan, chosen(plan))


def chosen(plan: Plan) -> Split:
    """The split to start: one that carries this load, if there is any."""
    return plan.best.split if plan.enough or plan.smallest is None else plan.smallest.split


def limit(plan: Plan) -> str:
    """What happens just beyond the limit."""
    found = plan.bottleneck
    if found is None:
        tried = "every load" if plan.headroom else "no load"
        return f"not found: the fleet keeps the targets at {tried} that was tried"
    effects = ", ".join(f"{resource} {share:.1%}" for resource, share in found.with_twice.items())
    text = f"at {found.load:.2f} times the load {found.in_time:.1%} are in time; with twice as much of {effects}"
    if not found.resource:
        return f"no single resource: {text}"
    return f"{found.resource}: {text}.\nWhat helps: {ADVICE[found.resource]}"


def smallest(plan: Plan) -> str:
    """The smallest fleet for this load."""
    if plan.smallest is None:
        return f"no fleet up to {SIZE_MAX} workers keeps the targets at this load"
    split = plan.smallest.split
    return f"{_gpus(plan.gpus_of(split))} as {split} carry this load: {plan.smallest.in_time:.1%} in time"


def start(plan: Plan, split: Split) -> str:
    """The command for one host, with the targets that the router needs to know."""
    slos = json.dumps({"default": {"ttft_s": plan.target.ttft_s, "itl_s": plan.target.itl_s}})
    roles = [role for role in LETTERS.values() if getattr(split, role)]
    workers = "".join(f" --{role} {getattr(split, role)}" for role in roles)
    return f"ROUTER_SLOS='{slos}' baton up --model MODEL{workers}{_layout_options(plan, roles)}"


OPTIONS = {
    "--gpus-per-worker": ("--gpus-per-prefill", "--gpus-per-decode"),
    "--pipeline": ("--pipeline-prefill", "--pipeline-decode"),
    "--data-parallel": ("--data-parallel-prefill", "--data-parallel-decode"),
}
"""Options of `baton up`: for all workers, for prefill and for decode workers."""


def _layout_options(plan: Plan, roles: list[str]) -> str:
    layouts = {role: plan.engines[role].layout for role in roles}
    sizes = {role: (one.tensor * one.pipeline, one.pipeline, one.data) for role, one in layouts.items()}
    written = ""
    for at, (for_all, by_role) in enumerate(OPTIONS.items()):
        common = sizes["both" if "both" in sizes else roles[0]][at]
        written += f" {for_all} {common}" if common > 1 else ""
        for role, option in zip(("prefill", "decode"), by_role, strict=True):
            if role in sizes and sizes[role][at] != common:
                written += f" {option} {sizes[role][at]}"
    return written + (
        " --engine-args=--enable-expert-parallel" if any(one.data > 1 for one in layouts.values()) else ""
    )


def _percent(share: float) -> str:
    return f"{share * 100:.4g} %"


FORMATS = (".png", ".svg", ".pdf")
PICTURED_MAX = 8
CURVES_MAX = 4
FAR_BEYOND = 1.6
"""Multiple of the limit up to which loads are drawn."""
ROLE_COLORS = {"prefill": "#d1693b", "decode": "#3b75af", "both": "#6a9a58"}
CURVE_COLORS = ("#222222", "#d1693b", "#3b75af", "#6a9a58")
OTHERS = "#8a8a8a"
BACKGROUND = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}


def pyplot() -> Any:
    """matplotlib, which takes a second to import, without a screen."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def save(plan: Plan, path: Path) -> None:
    """Write the picture; the suffix of the path, one of ``FORMATS``, says how. Raises OSError."""
    plt = pyplot()
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(13.2, 4.4), layout="constrained", gridspec_kw={"width_ratios": (1.15, 1.2, 0.8)}
    )
    _carried(left, plan)
    _curves(middle, plan)
    _limits(right, plan)
    for axis in (left, middle, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_title(plan), fontsize=11, x=0.01, ha="left")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _title(plan: Plan) -> str:
    gpus, name = plan.gpus_of(plan.best.split), next(iter(plan.engines.values())).name
    target = plan.target
    least = "" if math.isfinite(plan.best.limit.fails) else "at least "
    outcome = f"{plan.best.split} carry {least}{plan.headroom:.2f}x this load"
    return (
        f"{gpus} GPUs ({name}), {plan.workload}, {plan.searched.requests_per_s:.3g} requests/s: {outcome}\n"
        f"targets: {target.share:.0%} of the requests with the first token within {target.ttft_s:g} s "
        f"and {target.itl_s * 1e3:g} ms between tokens"
    )


def _carried(axis: Any, plan: Plan) -> None:
    """A bar for each split, coloured by its roles."""
    shown = plan.splits[:PICTURED_MAX]
    for row, result in enumerate(shown):
        beaten, load = result.limit.beaten, _end(result)
        left = 0.0
        for role, color in ROLE_COLORS.items():
            width = load * getattr(result.split, role) / result.split.workers
            axis.barh(row, width, left=left, color=color, alpha=0.3 if beaten else 1.0, height=0.66)
            left += width
        text, weight = f"{'<' if beaten else ''}{load:.2f}x", "bold" if result is plan.best else "normal"
        place = {"xytext": (4, 0), "textcoords": "offset points", "bbox": BACKGROUND}
        axis.annotate(text, (load, row), va="center", fontsize=9, fontweight=weight, **place)
    axis.axvline(1.0, color="black", linewidth=1, linestyle=":", zorder=0)
    axis.text(1.0, 1.01, "this load", transform=axis.get_xaxis_transform(), fontsize=8, ha="center", va="bottom")
    axis.set_yticks(range(len(shown)), [label(result.split) for result in shown], fontsize=9)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.22 * max(1.0, *(_end(result) for result in shown)))
    axis.set_xlabel("load within the targets; pale: not more than this")
    axis.set_title("splits", fontsize=10, loc="left")
    handles = [_patch(axis, color) for color in ROLE_COLORS.values()]
    legend = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 3}
    axis.legend(handles, ROLE_COLORS, fontsize=8, frameon=False, **legend)


def _patch(axis: Any, color: str) -> Any:
    return axis.bar(0, 0, color=color)


def _end(result: SplitResult) -> float:
    return result.limit.fails if result.limit.beaten else result.limit.keeps


def label(split: Split) -> str:
    """Such as 3 P + 1 D."""
    return " + ".join(f"{getattr(split, role)} {letter}" for letter, role in LETTERS.items() if getattr(split, role))


def _curves(axis: Any, plan: Plan) -> None:
    """Requests in time by load, for the splits with the most simulations."""
    points: dict[Split, dict[float, tuple[float, bool]]] = {}
    compared = {result.split for result in plan.splits}
    for trial in plan.trials:
        if trial.split in compared:
            points.setdefault(trial.split, {})[trial.load] = (trial.in_time, trial.stopped)
    chosen = [plan.best.split, *(one.split for one in plan.splits[1:] if len(points.get(one.split, ())) > 1)][
        :CURVES_MAX
    ]
    most = max(1.0, FAR_BEYOND * plan.headroom)
    for split, color in zip(chosen, CURVE_COLORS, strict=False):
        loads = sorted(load for load in points.get(split, ()) if load <= most)
        shares = [points[split][load][0] * 100 for load in loads]
        stopped = [points[split][load][1] for load in loads]
        width = 2.2 if split == plan.best.split else 1.2
        axis.plot(loads, shares, color=color, linewidth=width, label=label(split))
        for load, share, ended in zip(loads, shares, stopped, strict=True):
            axis.plot(load, share, color=color, marker="v" if ended else "o", markersize=4)
    axis.axhline(plan.target.share * 100, color="black", linewidth=1, linestyle="--")
    axis.axvline(1.0, color="black", linewidth=1, linestyle=":", zorder=0)
    axis.annotate(
        "target", (0.01, plan.target.share * 100), xycoords=("axes fraction", "data"), fontsize=8, va="bottom"
    )
    loads = [load for split in chosen for load in points.get(split, ()) if load <= most]
    if max(loads) / min(loads) > 6:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda value, _position: f"{value:g}")
    axis.set_ylim(top=101)
    axis.set_xlabel("times this load")
    axis.set_ylabel("requests in time (%)")
    axis.set_title("how they fail", fontsize=10, loc="left")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, frameon=False, loc="lower left")


def _limits(axis: Any, plan: Plan) -> None:
    """Requests in time just beyond the limit, as it is and with twice as much of each resource."""
    found = plan.bottleneck
    axis.set_title("what limits the best", fontsize=10, loc="left")
    if found is None:
        axis.text(0.5, 0.5, "its limit was not found", ha="center", va="center", transform=axis.transAxes)
        axis.set_axis_off()
        return
    bars = [("as it is", found.in_time), *((f"2x {name}", share) for name, share in found.with_twice.items())]
    for row, (name, share) in enumerate(bars):
        limits = name.removeprefix("2x ") == found.resource
        axis.barh(row, share * 100, color="#b03030" if limits else OTHERS, height=0.66)
        axis.text(share * 100, row, f"{share:.1%} ", va="center", ha="right", fontsize=9, color="white")
    axis.axvline(plan.target.share * 100, color="black", linewidth=1, linestyle="--")
    axis.set_yticks(range(len(bars)), [name for name, _share in bars], fontsize=9)
    axis.invert_yaxis()
    low = min(share for _name, share in bars) * 100
    start = max(0.0, math.floor((low - 10) / 10) * 10)
    axis.set_xlim(start, 101)
    axis.set_xlabel(f"in time at {found.load:.2f}x (%)")
