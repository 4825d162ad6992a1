"""`baton report` and `baton plan`: request the disaggregation report and the decisions of the planner; draw them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from services.launcher.bus_client import ask_service
from services.launcher.terminal import Console
from shared.contracts.channels import DISAGGREGATION_REPORT, PLANS
from shared.contracts.planning import (
    AskDisaggregationReport,
    AskPlans,
    Demand,
    DisaggregationReport,
    PlanAction,
    PlanDecision,
    Plans,
    ReportBucket,
)
from shared.text.fleet_text import plan_text
from shared.text.formats import counted, duration

REPORT_S_MAX = 10.0
OPEN_ENDED = 1 << 30
"""A range with a higher upper bound is open-ended."""
STYLES = {"yes": "bold green", "no": "bold red", "unsure": "yellow"}
HIGHLIGHT_RATIO = 1.1
"""A latency that is lower by this factor is highlighted."""
LATENCIES = (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("E2E", "e2e_s"))


async def ask_report(nats_url: str, model: str) -> DisaggregationReport:
    """Raises CommandFailed, and BusError when NATS does not respond."""
    ask = AskDisaggregationReport(model=model)
    missing = f"No metrics collector responds on {nats_url}. Start one: it measures the requests for this report."
    return await ask_service(nats_url, DISAGGREGATION_REPORT, ask, s_max=REPORT_S_MAX, missing=missing)


def draw_report(report: DisaggregationReport, console: Console) -> None:
    """For each model a table, and below it the reasons."""
    for section in _report_sections(report):
        console.print(section, highlight=False)


def _report_sections(report: DisaggregationReport) -> Iterator[RenderableType]:
    yield Text(report.summary, "bold")
    if not report.buckets:
        yield Text(f"No requests were measured in the last {report.seconds / 60:.0f} minutes. Send some and try again.")
        return
    yield Text(f"Medians of the last {report.seconds / 60:.0f} minutes.", "dim")
    for model, of_model in groupby(report.buckets, attrgetter("model")):
        buckets = list(of_model)
        yield Text(f"\n{model or 'any model'}", "bold", overflow="fold")
        yield Padding(_table(buckets), (0, 0, 0, 2))
        yield Text("")
        for bucket in buckets:
            result = Text.assemble((f"{_range(bucket)}: ", "dim"), (bucket.worth, STYLES.get(bucket.worth, "")))
            yield Padding(Text.assemble(result, f", {bucket.reason}." if bucket.reason else "."), (0, 0, 0, 2))


def _table(buckets: list[ReportBucket]) -> Table:
    """Two lines for each range of lengths: disaggregated and aggregated."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")  # fits into 80 columns
    table.add_column("prompt tokens", no_wrap=True)
    table.add_column("mode", no_wrap=True)
    for heading in ("requests", *(name for name, _field in LATENCIES)):
        table.add_column(heading, no_wrap=True, justify="right")
    table.add_column("pays off", no_wrap=True)
    for bucket in buckets:
        mine = [_cell(bucket, field) for _name, field in LATENCIES]
        others = [_cell(bucket, field, other=True) for _name, field in LATENCIES]
        source = "measured" if bucket.measured else "estimated" if bucket.other_e2e_s else "unknown"
        worth = Text(bucket.worth, STYLES.get(bucket.worth, ""))
        table.add_row(_range(bucket), "disaggregated", counted(bucket.disaggregated), *mine, worth)
        table.add_row("", Text.assemble("aggregated, ", (source, "dim")), counted(bucket.aggregated), *others)
    return table


def _cell(bucket: ReportBucket, field: str, *, other: bool = False) -> Text:
    mine_s, other_s = getattr(bucket, field), getattr(bucket, f"other_{field}")
    own_s, against_s = (other_s, mine_s) if other else (mine_s, other_s)
    if not own_s:
        return Text("-", "dim")
    return Text(duration(own_s), "green" if own_s * HIGHLIGHT_RATIO < against_s else "")


def _range(bucket: ReportBucket) -> str:
    if bucket.tokens_max >= OPEN_ENDED:
        return f"{counted(bucket.tokens_min)} or more"
    return f"{counted(bucket.tokens_min)} to {counted(bucket.tokens_max)}"


PLANS_S_MAX = 3.0
LOAD_FULL = 0.85
"""A load that is higher is highlighted."""
INDENT = (0, 0, 0, 2)
MODES = {
    "off": "The planner is off. ORCHESTRATOR_PLANNER=advise or act turns it on.",
    "advise": "The planner only advises. With ORCHESTRATOR_PLANNER=act it also changes the fleet.",
    "act": "The planner changes roles and requests workers.",
}


async def ask_plans(nats_url: str, count_max: int) -> Plans:
    """Raises CommandFailed, and BusError when NATS does not respond."""
    missing = f"No orchestrator leads on {nats_url}. Start one: it runs the planner."
    return await ask_service(nats_url, PLANS, AskPlans(count_max=count_max), s_max=PLANS_S_MAX, missing=missing)


def draw_plans(plans: Plans, console: Console) -> None:
    """The state of each fingerprint's workers, then the changes, newest first."""
    console.print(MODES.get(plans.mode, plans.mode), style="bold", highlight=False)
    for section in _plan_sections(plans, time.time()):
        console.print(section, highlight=False)


def _plan_sections(plans: Plans, now_unix_s: float) -> Iterator[RenderableType]:
    latest: dict[tuple[str, str], PlanDecision] = {}
    for decision in plans.decisions:
        latest.setdefault((decision.model, decision.fingerprint), decision)
    for decision in latest.values():
        yield Text(f"\n{decision.model}", "bold", overflow="fold")
        yield Padding(Text(_demand(decision.demand), "dim"), INDENT, expand=False)
        if decision.roles:
            yield Padding(_roles(decision), INDENT, expand=False)
        yield Padding(Text(_sentence(decision.why)), INDENT, expand=False)
    changes = [decision for decision in plans.decisions if decision.action is not PlanAction.NOTHING]
    if changes:
        yield Text("\nChanges", "bold")
        yield Padding(_changes(changes, now_unix_s), INDENT, expand=False)
    elif plans.mode != "off":
        yield Text("\nNo changes yet.")


def _demand(demand: Demand) -> str:
    if not demand.requests_per_s:
        return "No recent requests."
    itl = f"ITL p95 {duration(demand.itl_s_p95)}, " if demand.itl_s_p95 else ""  # Not known without streams.
    return (
        f"{demand.requests_per_s:.1f} requests/s of {demand.prompt_tokens:.0f} prompt tokens "
        f"({demand.uncached_tokens:.0f} to compute) and {demand.completion_tokens:.0f} completion tokens; "
        f"queue {duration(demand.queue_s)}, TTFT p95 {duration(demand.ttft_s_p95)}, {itl}over {demand.seconds:.0f} s"
    )


def _roles(decision: PlanDecision) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("role", no_wrap=True)
    for heading in ("now", "wanted", "load"):
        table.add_column(heading, no_wrap=True, justify="right")
    for each in decision.roles:
        wanted = Text(str(each.wanted), "" if each.wanted == each.now else "bold yellow")
        load = Text(f"{each.load:.0%}", "bold red" if each.load > LOAD_FULL else "")
        table.add_row(each.role.value, str(each.now), wanted, load)
    return table


def _changes(changes: list[PlanDecision], now_unix_s: float) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for _column in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for each in changes:
        ago = f"{duration(max(0.0, now_unix_s - each.at_ms / 1000))} ago"
        why = Text.assemble(each.why, ("\n" + (each.outcome or "in progress"), "dim"))
        table.add_row(Text(ago, "dim"), Text(plan_text(each), "cyan"), why)
    return table


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""
