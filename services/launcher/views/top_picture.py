"""Draws a frame of `baton top`. It uses the terminal's own colours, so that it suits any theme."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from services.launcher.views.watch import WINDOW_S, Event, Traffic, Watch
from services.launcher.views.workers import PHASE_STYLES, Drawing, bar, rates, shortened, worker_table
from shared.contracts.inference import RequestFinished
from shared.contracts.planning import PlanDecision
from shared.contracts.workers import WorkerPhase
from shared.text.quantities import counted, duration, in_bytes

SPARKS = "▁▂▃▄▅▆▇█"
LETTERS = str.maketrans("→…●━╸─" + SPARKS, ">.*#--" + "._-=+*%#")
"""Replacements for terminals that show only ASCII."""
SPARK_S = 30
WIDE = 140
"""From this width two tables are drawn side by side."""
BELOW_MIN = 9
"""Lines that the worker table leaves for the tables below it."""
FLOW_BAR = 12
HEALTH_STYLES = {"healthy": "bold green", "degraded": "bold yellow", "unhealthy": "bold red"}
FLOWS_MAX = 16
LISTENED_S = 2.5
"""After this time every process has published something."""
TRAFFIC_LINES_MAX = 6
"""Including one line for each model with a plan."""


@dataclass(frozen=True, slots=True)
class State:
    """What a frame needs beside the watch."""

    now: float
    clock: str
    """Local wall-clock time."""
    connected: bool = True
    first_worker: int = 0
    """Number of workers scrolled out at the top."""


def frame(watch: Watch, state: State, drawing: Drawing) -> RenderableType:
    """A frame of at most ``drawing.lines`` lines and ``drawing.columns`` columns."""
    traffic = watch.traffic(state.now)
    head = [*_head(watch, state, drawing), *_traffic(watch, traffic, state, drawing), Text("")]
    lines_free = drawing.lines - len(head) - 1
    workers = worker_table(watch, state.now, drawing, lines_free - min(BELOW_MIN, lines_free // 2), state.first_worker)
    lines = [*head, *workers]
    below = drawing.lines - len(lines) - 2
    if below >= 3:
        lines += [Text(""), *_below(watch, traffic, state, drawing, below)]
    lines = lines[: drawing.lines - 1]
    if drawing.fills:
        lines += [Text("")] * (drawing.lines - 1 - len(lines))
        lines.append(_foot(watch))
    for line in lines:
        line.truncate(drawing.columns, overflow="ellipsis")
        if drawing.letters:
            line.plain = line.plain.translate(LETTERS)
    return Group(*lines)


def _head(watch: Watch, state: State, drawing: Drawing) -> list[Text]:
    line = Text.assemble(("Baton", "bold"), "  ", no_wrap=True)
    listening = state.now - watch.begun < LISTENED_S
    if not listening:
        health = watch.health(connected=state.connected)
        line.append_text(Text.assemble((health, HEALTH_STYLES[health]), "  "))
    counts = watch.counts()
    for role, ready, live in counts:
        style = "green" if ready == live else "yellow"
        line.append_text(Text.assemble((f"{ready}" if ready == live else f"{ready}/{live}", style), f" {role}  "))
    if not counts:
        line.append("listening  " if listening else "no workers  ", "dim" if listening else "yellow")
    routers = sum(service == "router" for service, _instance in watch.services)
    right = Text.assemble(f"{routers} router{'s' if routers != 1 else ''}  ")
    if watch.leader:
        right.append(f"leader {shortened(watch.leader, 20)}  ")
    elif not listening:
        right.append("no leader  ", "yellow")
    right.append(state.clock)
    if not state.connected:
        right = Text("NATS does not respond, reconnecting", "bold red")
    gap = drawing.columns - line.cell_len - right.cell_len
    if gap < 1:
        return [line, right]
    return [Text.assemble(line, " " * gap, right)]


def _traffic(watch: Watch, traffic: Traffic, state: State, drawing: Drawing) -> list[Text]:
    known = traffic.count > 0
    first = Text.assemble(("requests ", "dim"), f"{traffic.per_s:.1f}/s ", no_wrap=True)
    first.append(_sparks(watch.each_second(state.now, min(SPARK_S, drawing.columns // 6))), "cyan")
    first.append_text(Text.assemble(("   prefill ", "dim"), rates(traffic.prompt_tokens_per_s), (" tok/s", "dim")))
    first.append_text(Text.assemble(("   decode ", "dim"), rates(traffic.completion_tokens_per_s), (" tok/s", "dim")))
    second = Text(no_wrap=True)
    for name, (half, most) in (("TTFT", traffic.ttft_s), ("ITL", traffic.itl_s)):
        spread = f"{duration(half)}, p95 {duration(most)}" if half >= 0 else "-"
        second.append_text(Text.assemble((f"{name} ", "dim"), spread, "   "))
    for mode, count in traffic.modes.most_common(3):
        share = Text.assemble(f"{count / max(1, traffic.count):.0%} ", (f"{mode.replace('_', ' ')}  ", "dim"))
        if second.cell_len + share.cell_len <= drawing.columns:
            second.append_text(share)
    failed = sum(traffic.failed.values())
    third = Text(f"no requests in the last {WINDOW_S} s", "dim", no_wrap=True) if not known else Text()
    if failed:
        why = ", ".join(f"{count} {reason}" for reason, count in traffic.failed.most_common(3))
        third = Text(f"{failed} failed in the last {WINDOW_S} s: {printable(why)}", "red", no_wrap=True)
    lines = [first, second if known else third, *([third] if failed and known else [])]
    return [*lines, *(_plan(plan) for plan in watch.plans.values() if plan.roles)][:TRAFFIC_LINES_MAX]


def _plan(plan: PlanDecision) -> Text:
    """Present and wanted workers of a model; green where they agree."""
    line = Text.assemble(("planner ", "dim"), no_wrap=True)
    for one in plan.roles:
        enough = one.now == one.wanted
        wanted = f"{one.now}" if enough else f"{one.now}, wants {one.wanted}"
        line.append_text(Text.assemble(f"{one.role.value} ", (wanted, "green" if enough else "yellow")))
        line.append(f" at {one.load:.0%}   ", "dim")
    line.append(printable(plan.why), "dim")
    return line


def _below(watch: Watch, traffic: Traffic, state: State, drawing: Drawing, lines: int) -> list[Text]:
    """Flows and requests, then events."""
    newest = list(watch.events)[::-1]
    events = min(len(newest) + 1, max(3, lines // 2)) if newest else 0
    tables = lines - (events + 1 if events else 0)
    made: list[Text] = []
    if traffic.count and tables >= 3:
        if drawing.columns >= WIDE:
            left = _flows(watch, drawing.columns // 2 - 6, tables)
            right = _requests(watch, state, drawing.columns - drawing.columns // 2 + 3, tables)
            made += _beside(left, right, drawing.columns // 2 - 3)
        else:
            flows = _flows(watch, drawing.columns, max(3, tables // 2))
            made += flows
            rest = tables - len(flows) - 1
            made += [Text(""), *_requests(watch, state, drawing.columns, rest)] if rest >= 2 else []
        made.append(Text(""))
    if events:
        made += [Text("events", "bold"), *(_event(one, state) for one in newest[: events - 1])]
    return made[:lines]


def _flows(watch: Watch, columns: int, lines: int) -> list[Text]:
    flows = watch.flows()[: max(0, min(FLOWS_MAX, lines - 1))]
    most = max((many for _prefill, _decode, many, _size in flows), default=1)
    names = [f"{prefill} → {decode}" if prefill else f"{decode} alone" for prefill, decode, _many, _size in flows]
    wide = max(10, min(max(map(len, names), default=10), columns - FLOW_BAR - 20))
    made = [Text(f"KV flows, last {WINDOW_S} s", "bold", no_wrap=True)]
    for name, (_prefill, _decode, many, size) in zip(names, flows, strict=True):
        kv = f"{in_bytes(size)} KV" if size else ""
        line = Text.assemble(f"{shortened(name, wide):<{wide}} ", bar(many / most, FLOW_BAR, "cyan"))
        made.append(Text.assemble(line, f" {counted(many):>6} ", (f"{kv:>13}", "dim"), no_wrap=True))
    return made


def _requests(watch: Watch, state: State, columns: int, lines: int) -> list[Text]:
    made = [Text("recent requests", "bold", no_wrap=True)]
    for at, request in list(watch.requests)[::-1][: max(0, lines - 1)]:
        line = _request(request, f"{state.now - at:3.0f} s ")
        line.truncate(columns, overflow="ellipsis")
        made.append(line)
    return made


def _request(request: RequestFinished, ago: str) -> Text:
    workers = request.decode_worker or "not placed"
    workers = f"{request.prefill_worker} → {workers}" if request.prefill_worker else workers
    line = Text.assemble((ago, "dim"), f"{shortened(workers, 30):<24} ", no_wrap=True)
    if request.reason or request.status >= 400:
        line.append(f"{request.status} {printable(request.reason)}", "red" if request.status >= 500 else "yellow")
        return line
    cached = f", {request.cached_tokens / request.prompt_tokens:.0%} cached" if request.cached_tokens > 0 else ""
    prompt = f"{counted(max(0, request.prompt_tokens))} tok{cached}"
    line.append(f"{prompt:<21} ")
    line.append(f"TTFT {duration(request.ttft_s)}" if request.ttft_s >= 0 else "", "")
    line.append(f"  ITL {duration(request.itl_s)}" if request.itl_s >= 0 else "", "dim")
    if request.resumes:
        line.append(f"  resumed {request.resumes}x", "yellow")
    return line


def _event(one: Event, state: State) -> Text:
    ago = f"{_ago(state.now - one.at):>5}  "
    style = "red" if one.bad else ""
    return Text.assemble(
        (ago, "dim"), (f"{printable(one.subject)} ", "bold"), (printable(one.text), style), no_wrap=True
    )


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} m"


def _foot(watch: Watch) -> Text:
    unready = [one for one in watch.ordered() if one.phase in (WorkerPhase.STARTING, WorkerPhase.PROBING)]
    line = Text.assemble(("q", "bold"), (" quit   ", "dim"), ("j k", "bold"), (" scroll workers", "dim"), no_wrap=True)
    if unready and unready[0].record.note:
        note = f"   {unready[0].record.worker_id}: {unready[0].record.note}"
        line.append(printable(note), PHASE_STYLES[unready[0].phase])
    return line


def _beside(left: Sequence[Text], right: Sequence[Text], columns: int) -> list[Text]:
    made = []
    for number in range(max(len(left), len(right))):
        one = left[number] if number < len(left) else Text("")
        one.truncate(columns, overflow="ellipsis", pad=True)
        made.append(Text.assemble(one, right[number] if number < len(right) else "", no_wrap=True))
    return made


def _sparks(counts: Sequence[int]) -> str:
    """A bar of blocks; a space for zero."""
    most = max(counts, default=0)
    return "".join(SPARKS[one * len(SPARKS) // (most + 1)] if one else " " for one in counts)


def printable(text: str) -> str:
    """Without control characters: some text comes from clients."""
    return text if text.isprintable() else ascii(text)
