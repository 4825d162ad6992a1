"""What one handoff costs end to end: the CPU of each process, and the messages on NATS by kind; a part of the page of
``bench.bench_router``.

CPU and messages are taken in runs of their own, because nats-server sends each message once more to who counts them.
What an idle fleet uses and sends is taken off.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.bench_router import OTHER_CORE, Prompts, System, cpu_s_of, running, send, warm_up
from bench.handoffs import Moved
from bench.kv_bench_page import table
from bench.message_counts import BYTES, KINDS, OTHERS, MessageCounts
from replay.capacity.report import pyplot

IDLE_S = 3.0
PROCESSES = ("router", "prefill worker", "decode worker", "nats-server")
MESSAGES = (*KINDS, OTHERS)


@dataclass(frozen=True)
class Cost:
    """Of one handoff, on average."""

    label: str
    cpu_ms: Counter[str]
    """By process."""
    messages: Counter[str]
    """By kind, and ``BYTES`` of them all."""
    moved: Moved


def prompts_of(*, quick: bool) -> list[Prompts]:
    part = 4 if quick else 1
    return [
        Prompts(100, 64, 3200 // part),
        Prompts(100, 1, 800 // part),
        Prompts(2000, 64, 600 // part),
        Prompts(2000, 1, 300 // part),
    ]


def measure(page: Path, *, quick: bool) -> list[str]:
    """The part of the page; its picture is put beside the page. Raises RunFailed."""
    with running(1) as system:
        warm_up(system)
        costs = [cost_of(system, prompts) for prompts in prompts_of(quick=quick)]
    picture = f"{page.stem}-handoff.png"
    draw(costs, page.with_name(picture))
    return lines(costs, picture)


def cost_of(system: System, prompts: Prompts) -> Cost:
    """Raises RunFailed."""
    pids = dict(zip(PROCESSES, (system.router_pid, *system.worker_pids.values(), system.nats_pid), strict=True))
    cpu_ms, found = per_request(
        lambda: Counter({name: cpu_s_of(pid) * 1e3 for name, pid in pids.items()}),
        lambda: send(system, seed=f"cpu {prompts.label} {prompts.connections}", **prompts.options)[1],
    )
    with MessageCounts(system.nats_url, {int(OTHER_CORE)}) as counts:
        messages, again = per_request(
            counts.snapshot,
            lambda: send(system, seed=f"messages {prompts.label} {prompts.connections}", **prompts.options)[1],
        )
    label = f"{prompts.tokens:,} tokens, {prompts.connections} connection{'s' if prompts.connections > 1 else ''}"
    print(f"{label}: {cpu_ms.total():.2f} ms, {sum(messages[kind] for kind in MESSAGES):.1f} messages", file=sys.stderr)
    return Cost(label, cpu_ms, messages, found + again)


def per_request(read: Callable[[], Counter[str]], work: Callable[[], Moved]) -> tuple[Counter[str], Moved]:
    """What of ``read`` grows with each request of ``work``, without what grows while nothing is asked."""
    before = read()
    time.sleep(IDLE_S)
    idle = read()
    begun_at = time.monotonic()
    found = work()
    took_s, after = time.monotonic() - begun_at, read()
    return Counter({
        name: max(0.0, after[name] - idle[name] - (idle[name] - before[name]) / IDLE_S * took_s) / found.requests
        for name in after
    }), found  # fmt: skip


def lines(costs: Sequence[Cost], picture: str) -> list[str]:
    """The part of the page."""
    by_process: list[list[object]] = [
        [one.label, *(f"{one.cpu_ms[name]:.3f}" for name in PROCESSES), f"{one.cpu_ms.total():.2f}", one.moved.said]
        for one in costs
    ]
    by_kind: list[list[object]] = [
        [
            one.label,
            *(f"{one.messages[kind]:.2f}" for kind in MESSAGES),
            f"{sum(one.messages[kind] for kind in MESSAGES):.1f}",
            f"{one.messages[BYTES] / 1e3:.1f}",
        ]
        for one in costs
    ]
    return [
        "## One handoff, end to end",
        "",
        "1P+1D, answers of 16 tokens. CPU is user + system time of each process minus its idle share; a simulated engine runs",
        "in its worker's process, and makes up most of that. Messages are those published on NATS, each counted once, in runs",
        "of their own, without those of an idle fleet.",
        "",
        f"![CPU and messages of a handoff]({picture})",
        "",
        "CPU, ms per request:",
        "",
        *table(f"prompt | {' | '.join(PROCESSES)} | together | handoffs", by_process),
        "Messages on NATS per request:",
        "",
        *table(f"prompt | {' | '.join(MESSAGES)} | together | KB", by_kind),
    ]


def draw(costs: Sequence[Cost], path: Path) -> None:
    """A bar for each prompt: CPU by process, and messages by kind."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(12, 1.6 + 0.5 * len(costs)), sharey=True, layout="constrained")
    cpu, messages = [one.cpu_ms for one in costs], [one.messages for one in costs]
    panels = ((PROCESSES, cpu, "CPU, ms per request"), (MESSAGES, messages, "messages on NATS per request"))
    for axis, (names, values, title) in zip(axes, panels, strict=True):
        draw_bars(axis, names, values)
        axis.set_xlabel(title)
        axis.legend(fontsize="x-small", ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(costs)), [one.label for one in costs], fontsize="small")
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def draw_bars(axis: Any, names: Sequence[str], values: Sequence[Counter[str]]) -> None:
    """A bar for each of ``values``, of parts one after the other."""
    ends = [0.0] * len(values)
    for name in names:
        parts = [one[name] for one in values]
        axis.barh(range(len(values)), parts, left=ends, label=name)
        ends = [end + part for end, part in zip(ends, parts, strict=True)]
