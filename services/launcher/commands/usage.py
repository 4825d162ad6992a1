"""``baton usage``: what each API key has used of each model."""

from __future__ import annotations

import sys
from datetime import date
from typing import Annotated, Literal, assert_never

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
    app.command(
        rich_help_panel="Observe it",
        epilog=EPILOG,
    )(usage)


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
    query = UsageQuery(
        since=_day(since, "--since", last=False) if since else now.replace(day=1),
        until=_day(until, "--until", last=True) if until else now,
        by=by,
        key=key,
        tenant=tenant,
        model=model,
    )
    if query.since > query.until:
        fail(f"--since {query.since} is after --until {query.until}.")
    url = find_nats(nats_url, state_dir)
    found = summed(reply_of(read_ledger(url, query.months()), url), query, now)
    match form:
        case "table":
            show(found, draw, json=False)
        case "csv":
            sys.stdout.write(to_csv(found))
        case "jsonl":
            sys.stdout.write(to_jsonl(found))
        case _:
            assert_never(form)


def _day(text: str, option: str, *, last: bool) -> date:
    from services.launcher.views.usage import parse_day

    try:
        return parse_day(text, last=last)
    except ValueError:
        fail(f"{option}: {text!r} is no date. Write a day, such as 2026-11-01, or a month, such as 2026-11.")
