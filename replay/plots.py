"""Plots of a comparison, one line per policy. The only module that imports matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from replay.policies.names import BATON, BATON_STRICT, BATON_WAITING, ORACLE
from replay.results import Result

MISSING = "matplotlib is not installed: no pictures. Install it with: pip install 'baton-serve[bench]'"
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


class NoPlots(Exception):
    """matplotlib is not installed."""


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """One file for each picture. Raises NoPlots."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise NoPlots(MISSING) from error
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
