"""`baton report`: requests the disaggregation report from the metrics collector and draws it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from services.launcher.bus_client import ask_service
from shared.contracts.channels import DISAGGREGATION_REPORT
from shared.contracts.planning import AskDisaggregationReport, DisaggregationReport, ReportBucket
from shared.text.quantities import counted, duration

ASK_S_MAX = 10.0
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
    return await ask_service(nats_url, DISAGGREGATION_REPORT, ask, s_max=ASK_S_MAX, missing=missing)


def draw(report: DisaggregationReport, console: Console) -> None:
    """For each model a table, and below it the reasons."""
    for section in _sections(report):
        console.print(section, highlight=False)


def _sections(report: DisaggregationReport) -> Iterator[RenderableType]:
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
