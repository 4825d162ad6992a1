"""A plan as a picture: what each split carries, how the best ones fail, and what limits the best one.

The only module of the package that imports matplotlib, which may be missing.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from replay.capacity.plan import Plan, SplitResult
from replay.capacity.trial import LETTERS, Split
from replay.results import MISSING, NoPlots

FORMATS = (".png", ".svg", ".pdf")
SHOWN_MAX = 8
CURVES_MAX = 4
FAR_BEYOND = 1.6
"""Beyond so many times the limit nothing is drawn."""
ROLE_COLORS = {"prefill": "#d1693b", "decode": "#3b75af", "both": "#6a9a58"}
CURVE_COLORS = ("#222222", "#d1693b", "#3b75af", "#6a9a58")
OTHERS = "#8a8a8a"
BACKGROUND = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}


def pyplot() -> Any:
    """Raises NoPlots."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise NoPlots(MISSING) from error
    return plt


def save(plan: Plan, path: Path) -> None:
    """Write the picture; the suffix of the path, one of ``FORMATS``, says how. Raises NoPlots and OSError."""
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
    gpus = plan.workers * plan.engine.gpus
    target = plan.target
    least = "" if math.isfinite(plan.best.limit.fails) else "at least "
    outcome = f"{plan.best.split} carry {least}{plan.headroom:.2f}x this load"
    return (
        f"{gpus} GPUs ({plan.engine.name}), {plan.workload}, {plan.searched.requests_per_s:.3g} requests/s: {outcome}\n"
        f"targets: {target.share:.0%} of the requests with the first token within {target.ttft_s:g} s "
        f"and {target.itl_s * 1e3:g} ms between tokens"
    )


def _carried(axis: Any, plan: Plan) -> None:
    """A bar for each split, coloured by its roles."""
    shown = plan.splits[:SHOWN_MAX]
    for row, result in enumerate(shown):
        beaten, load = result.limit.beaten, _end(result)
        left = 0.0
        for role, color in ROLE_COLORS.items():
            width = load * getattr(result.split, role) / plan.workers
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
    for trial in plan.trials:
        if trial.split.workers == plan.workers:
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
