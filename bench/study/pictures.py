"""Pictures of the study: differences to the best rival, goodput by load, TTFT at the knee."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.study.code_digest import is_own
from bench.study.plan import LOADS
from bench.study.rows import Data, Group, value_of
from replay.capacity.report import pyplot

PANELS_ACROSS = 3
OWN_COLORS = ("black", "crimson", "darkorange")
OTHER_COLORS = ("tab:blue", "tab:green", "tab:purple", "tab:cyan", "tab:olive", "tab:brown", "tab:pink", "tab:grey")
DIFFERENCES = {"good_share": "goodput", "good_tokens_share": "goodput by tokens", "ttft_p95": "TTFT p95"}
SLOWEST_SHOWN = 4.0
"""Times the quickest p95 of a panel: beyond that is the edge, with the p95 as a number."""
SHOWN_MAX = 1.0
"""Differences beyond that are drawn at the edge, as arrows: 1 is 100 %, also where too many were refused."""


def draw(data: Data, folder: Path) -> list[str]:
    """Write ``replay-NAME.png``; returns the names."""
    plt = pyplot()
    main = [group for group in data.groups if group.section in ("targets", "default")]
    made = {
        "differences": draw_differences(plt, [group for group in data.groups if group.section != "factorial"]),
        "goodput": draw_goodput(plt, [group for group in main if group.section == "targets"]),
        "ttft": draw_ttft(plt, [group for group in main if group.label == "knee"]),
    }
    for name, figure in made.items():
        if figure is not None:
            figure.savefig(folder / f"replay-{name}.png", dpi=90)
            plt.close(figure)
    return [name for name, figure in made.items() if figure is not None]


def draw_differences(plt: Any, groups: Sequence[Group]) -> Any:
    """A row for each workload, fleet and load; Baton's first policy of the group."""
    rows = [(group, group.versus[0]) for group in groups if group.versus and group.versus[0].differences]
    if not rows:
        return None
    figure, axes = plt.subplots(
        1, len(DIFFERENCES), figsize=(13, 1.2 + 0.24 * len(rows)), sharey=True, layout="constrained"
    )
    names = [f"{group.section}: {group.workload}, {group.fleet}, {group.label}" for group, _versus in rows]
    for axis, (measure, title) in zip(axes, DIFFERENCES.items(), strict=True):
        better = -1.0 if measure == "ttft_p95" else 1.0
        for at, (_group, versus) in enumerate(rows):
            value, low, high = (shown(value_of(each)) for each in versus.differences[measure])
            sure = better * low > 0.0 and better * high > 0.0
            worse = better * low < 0.0 and better * high < 0.0
            color = "tab:green" if sure else "tab:red" if worse else "tab:grey"
            axis.plot([low * 100, high * 100], [at, at], color=color, linewidth=2)
            marker = "o" if abs(value) < SHOWN_MAX else ">" if value > 0 else "<"
            axis.plot([value * 100], [at], marker=marker, color=color, markersize=4)
        axis.axvline(0.0, color="black", linewidth=0.8)
        axis.set_title(title)
        axis.set_xlabel("% of the best rival" + (" (less is better)" if better < 0 else ""))
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(rows)), names, fontsize="small")
    axes[0].invert_yaxis()
    return figure


def draw_goodput(plt: Any, groups: Sequence[Group]) -> Any:
    """A panel for each workload and fleet; the share that kept the targets, by load."""
    panels = sorted({(group.workload, group.fleet) for group in groups})
    if not panels:
        return None
    figure, axes = grid(plt, len(panels))
    styles = styles_of(groups)
    for axis, (workload, fleet) in zip(axes, panels, strict=False):
        here = sorted(
            (group for group in groups if (group.workload, group.fleet) == (workload, fleet)),
            key=lambda group: group.load,
        )
        at = [LOADS.get(group.label, group.load) for group in here]
        for policy, style in styles.items():
            points = [
                (x, row.good_share)
                for x, group in zip(at, here, strict=True)
                for row in group.rows
                if row.policy == policy
            ]
            if points:
                middle, low, high = zip(
                    *(tuple(value_of(each) * 100 for each in share) for _x, share in points), strict=True
                )
                xs = [x for x, _share in points]
                axis.plot(xs, middle, marker="o", markersize=3, label=policy, **style)
                axis.fill_between(xs, low, high, color=style["color"], alpha=0.12, linewidth=0)
        bounds = [min(100.0, group.bound_per_s / group.offered_per_s * 100) for group in here]
        axis.plot(at, bounds, color="black", linestyle="--", linewidth=1, label="bound")
        axis.set_title(f"{workload}, {fleet}", fontsize="medium")
        axis.set_xlabel("load (1: the knee)")
        axis.set_ylabel("% within both targets")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    legend(figure, axes)
    return figure


def draw_ttft(plt: Any, groups: Sequence[Group]) -> Any:
    """A panel for each group; a bar from p50 to p95 with the interval of the p95."""
    if not groups:
        return None
    figure, axes = grid(plt, len(groups), height=0.9 + 0.27 * max(len(group.rows) for group in groups))
    for axis, group in zip(axes, groups, strict=False):
        finite = [value_of(row.ttft_p95[0]) for row in group.rows if row.ttft_p95[0] is not None]
        edge = min(1.3 * max(finite, default=1.0), SLOWEST_SHOWN * min(finite, default=1.0))
        for at, row in enumerate(group.rows):
            p50, (p95, low, high) = value_of(row.ttft_p50[0]), (value_of(each) for each in row.ttft_p95)
            color = OWN_COLORS[0] if is_own(row.policy) else OTHER_COLORS[0]
            axis.barh(at, min(p95, edge), color=color, alpha=0.25)
            axis.barh(at, min(p50, edge), color=color, alpha=0.8)
            if p95 > edge:
                axis.text(edge, at, f"p95 {p95:.1f} s ", ha="right", va="center", fontsize="small")
            else:
                axis.plot([low, min(high, edge)], [at, at], color=color, linewidth=1.5)
        axis.set_yticks(range(len(group.rows)), [row.policy for row in group.rows], fontsize="small")
        axis.invert_yaxis()
        axis.set_xlim(0, edge)
        axis.set_title(f"{group.section}: {group.workload}", fontsize="medium")
        axis.set_xlabel("TTFT at the knee, s: p50 dark, p95 light")
        axis.grid(axis="x", alpha=0.3)
    return figure


def grid(plt: Any, panels: int, height: float = 3.4) -> tuple[Any, list[Any]]:
    """A figure with so many axes, and none that is empty."""
    across = min(PANELS_ACROSS, math.ceil(math.sqrt(panels)))
    down = math.ceil(panels / across)
    figure, axes = plt.subplots(
        down, across, figsize=(5.2 * across, height * down + 0.6), squeeze=False, layout="constrained"
    )
    flat = list(axes.flat)
    for unused in flat[panels:]:
        unused.set_axis_off()
    return figure, flat[:panels]


def legend(figure: Any, axes: Sequence[Any]) -> None:
    """One for all panels."""
    known = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(known.values(), known.keys(), fontsize="small", ncols=6, loc="outside lower center")


def styles_of(groups: Sequence[Group]) -> dict[str, dict[str, Any]]:
    """Baton's policies are thick."""
    policies = dict.fromkeys(row.policy for group in groups for row in group.rows)
    own, others = iter(OWN_COLORS * 9), iter(OTHER_COLORS * 9)
    return {
        policy: {"color": next(own), "linewidth": 2.4} if is_own(policy) else {"color": next(others), "linewidth": 1.2}
        for policy in policies
    }


def shown(value: float) -> float:
    """Within the picture."""
    return max(-SHOWN_MAX, min(SHOWN_MAX, value))
