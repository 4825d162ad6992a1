"""`baton verdict`: asks the metrics collector whether prefill and decode apart are worth it, and draws its answer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from services.launcher.views.fleet import open_bus
from shared.bus.port import AskTimedOut, NoResponders
from shared.contracts.channels import DISAGGREGATION_REPORT
from shared.contracts.disaggregation_report import AskDisaggregationReport, DisaggregationReport, ReportBucket
from shared.text.quantities import counted, duration

ASK_S_MAX = 10.0
OPEN_ENDED = 1 << 30
"""A range that ends beyond that has no end."""
STYLES = {"yes": "bold green", "no": "bold red", "unsure": "yellow"}
CLEARLY = 1.1
"""Times as long: from there on the shorter one stands out."""
LATENCIES = (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("whole", "e2e_s"))


class NoReport(Exception):
    """Nobody judges; the words say what to do."""


async def ask_report(nats_url: str, model: str) -> DisaggregationReport:
    """Raises NoReport, and BusError when NATS does not answer."""
    async with open_bus(nats_url) as bus:
        try:
            return await bus.ask(DISAGGREGATION_REPORT, AskDisaggregationReport(model=model), timeout_s=ASK_S_MAX)
        except (NoResponders, AskTimedOut) as error:
            raise NoReport(f"No metrics collector answers at {nats_url}: it is what measures. Start one.") from error


def draw(told: DisaggregationReport, console: Console) -> None:
    """A table for each model, and why below."""
    for section in _sections(told):
        console.print(section, highlight=False)


def _sections(told: DisaggregationReport) -> Iterator[RenderableType]:
    yield Text(told.words, "bold")
    if not told.buckets:
        yield Text(f"Nothing was told of in the last {told.seconds / 60:.0f} minutes: send requests, and ask again.")
        return
    yield Text(f"From the last {told.seconds / 60:.0f} minutes; medians.", "dim")
    for model, of_model in groupby(told.buckets, attrgetter("model")):
        buckets = list(of_model)
        yield Text(f"\n{model or 'any model'}", "bold", overflow="fold")
        yield Padding(_table(buckets), (0, 0, 0, 2))
        yield Text("")
        for bucket in buckets:
            why = Text.assemble((f"{_range(bucket)}: ", "dim"), (bucket.worth, STYLES.get(bucket.worth, "")))
            yield Padding(Text.assemble(why, f", {bucket.why}." if bucket.why else "."), (0, 0, 0, 2))


def _table(buckets: list[ReportBucket]) -> Table:
    """Two lines for each range of lengths: how it is, and how it would be."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("prompt tokens", no_wrap=True)
    table.add_column("served", no_wrap=True)
    for heading in ("requests", *(name for name, _field in LATENCIES)):
        table.add_column(heading, no_wrap=True, justify="right")
    table.add_column("worth it", no_wrap=True)
    for bucket in buckets:
        mine = [_cell(bucket, field) for _name, field in LATENCIES]
        others = [_cell(bucket, field, other=True) for _name, field in LATENCIES]
        known = "measured" if bucket.measured else "estimated" if bucket.other_e2e_s else "not known"
        worth = Text(bucket.worth, STYLES.get(bucket.worth, ""))
        table.add_row(_range(bucket), "apart", counted(bucket.disaggregated), *mine, worth)
        table.add_row("", Text.assemble("by one ", (known, "dim")), counted(bucket.aggregated), *others)
    return table


def _cell(bucket: ReportBucket, field: str, *, other: bool = False) -> Text:
    mine_s, other_s = getattr(bucket, field), getattr(bucket, f"other_{field}")
    own_s, against_s = (other_s, mine_s) if other else (mine_s, other_s)
    if not own_s:
        return Text("-", "dim")
    return Text(duration(own_s), "green" if own_s * CLEARLY < against_s else "")


def _range(bucket: ReportBucket) -> str:
    if bucket.tokens_max >= OPEN_ENDED:
        return f"{counted(bucket.tokens_min)} and more"
    return f"{counted(bucket.tokens_min)} to {counted(bucket.tokens_max)}"
