"""``baton usage``: what each API key has used of each model."""

from __future__ import annotations

import sys
from datetime import date
from typing import Annotated, Literal

import typer

from services.launcher.commands.options import NatsUrl, StateDir, fail, find_nats, reply_of, show

Format = Literal["table", "csv", "jsonl"]
By = Literal["day", "month", "total"]
EPILOG = """[bold]Examples[/]

[cyan]baton usage[/]   this month, per key and model

[cyan]baton usage --since 2026-11-01 --until 2026-11-15 --by day --key ci[/]

[cyan]baton usage --since 2026-01 --by month --format csv > usage.csv[/]   from January on, for a spreadsheet

[bold]Columns[/]

[cyan]failed[/]   answered with an error; CSV and JSON lines also count those that their client cancelled

[cyan]prompt, cached, output[/]   prompt tokens, the share of them that was cached, generated tokens

[cyan]engine[/]   engine time, on GPUs GPU time, of prompts and completions: an estimate from learned speeds

A key is shown by its name in the key file, or the beginning of its digest. Requests count on the day when they
end, a few seconds later. Budgets per month: docs/keys.md."""


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Observe it", epilog=EPILOG)(usage)


def usage(  # noqa: PLR0913, PLR0917  # one parameter per option is how the command line is declared
    since: Annotated[str, typer.Option(help="First day, 2026-11-01, or month, 2026-11. Default: this month.")] = "",
    until: Annotated[str, typer.Option(help="Last day or month, included. Default: today.")] = "",
    by: Annotated[By, typer.Option(help="Sum up by day, by month, or all together.")] = "total",
    key: Annotated[str, typer.Option(help="Only this key; '(no key)': requests without one.")] = "",
    tenant: Annotated[str, typer.Option(help="Only keys of this tenant.")] = "",
    model: Annotated[str, typer.Option(help="Only this model.")] = "",
    form: Annotated[Format, typer.Option("--format", help="table, csv, or jsonl: one JSON object a line.")] = "table",
    nats_url: NatsUrl = "",
    state_dir: StateDir = None,
) -> None:
    """Show what each API key has used of each model: requests, tokens, engine time, budgets."""
    from services.launcher.views.usage import UsageQuery, draw, read_ledger, summed, to_csv, to_jsonl, today

    now = today()
    first = _day(since, "--since", last=False) if since else now.replace(day=1)
    last = _day(until, "--until", last=True) if until else now
    if first > last:
        fail(f"--since {first} is after --until {last}.")
    query = UsageQuery(since=first, until=last, by=by, key=key, tenant=tenant, model=model)
    url = find_nats(nats_url, state_dir)
    found = summed(reply_of(read_ledger(url, query.months()), url), query, now)
    if form == "table":
        show(found, draw, json=False)
    else:
        sys.stdout.write(to_csv(found) if form == "csv" else to_jsonl(found))


def _day(text: str, option: str, *, last: bool) -> date:
    from services.launcher.views.usage import parse_day

    try:
        return parse_day(text, last=last)
    except ValueError:
        fail(f"{option}: {text!r} is no date. Write a day, such as 2026-11-01, or a month, such as 2026-11.")
