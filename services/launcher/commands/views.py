"""Commands that show the running system: `baton workers`, `explain`, `report`, `plan`, `health`, `usage`."""

from __future__ import annotations

import contextlib
import sys
from datetime import date
from typing import Annotated, Literal

import typer

from services.launcher.commands.options import (
    Json,
    NatsUrl,
    StateDir,
    fail,
    find_nats,
    print_json,
    reply_of,
    router_url,
    show,
    state_folder,
    wide_console,
)
from services.launcher.system import state_file
from services.launcher.terminal import Console, harmless
from shared.contracts.control import ServicePhase

HEALTH_S = 5.0
OBSERVE = "Observe it"
EPILOGS = {
    "workers": """[bold]Columns[/]

[cyan]phase[/]   starting (loading its model), probing (testing KV exchange), ready, draining, gone, lost

[cyan]running, waiting[/]   requests in the engine's batch, and in its queue

[cyan]KV used[/]   used share of the engine's KV cache""",
    "explain": """[bold]Examples[/]

[cyan]baton explain[/]   the newest decision of the running system

[cyan]baton explain router-3f2a91bc-d17[/]   the decision that the response header x-baton-decision names

[cyan]baton explain --request my-request --url http://gpu-host:8000 --json[/]   another system, as JSON

Where API keys are needed, BATON_API_KEY has one: a tenant's shows its own decisions, one with the permission
view or admin shows all.""",
    "report": """[bold]Examples[/]

[cyan]baton report[/]   all models of the running system

[cyan]baton report --model my-model --json[/]   one model, as JSON

Aggregated latencies are measured when at least 20 requests of a length were served aggregated, for
example with the header x-baton-mode: aggregated. Otherwise they are estimated from engine step times.""",
    "plan": """[bold]Examples[/]

[cyan]baton plan[/]   the plan of the running system

[cyan]ORCHESTRATOR_PLANNER=act baton up --prefill 2 --decode 2[/]   let the planner change roles

[cyan]baton up --workers-max 4[/]   let it also start and drain workers

ORCHESTRATOR_PLANNER_TTFT_S and ORCHESTRATOR_PLANNER_ITL_S set the targets. The planner requests
workers from `baton up --workers-max`, from the webhook at ORCHESTRATOR_SCALER_URL, or from Kubernetes
(ORCHESTRATOR_STATEFUL_SETS).""",
    "health": """[bold]Example[/]

[cyan]baton health router[/]   in a container's HEALTHCHECK: prints healthy or unhealthy""",
    "usage": """[bold]Examples[/]

[cyan]baton usage[/]   this month, per key and model

[cyan]baton usage --since 2026-11-01 --until 2026-11-15 --by day --key ci[/]

[cyan]baton usage --since 2026-01 --by month --format csv > usage.csv[/]   from January on, for a spreadsheet

[bold]Columns[/]

[cyan]failed[/]   answered with an error; CSV and JSON lines also count those that their client cancelled

[cyan]prompt, cached, output[/]   prompt tokens, the share of them that was cached, generated tokens

[cyan]engine[/]   engine time, on GPUs GPU time, of prompts and completions: an estimate from learned speeds

A key is shown by its name in the key file, or the beginning of its digest. Requests count on the day when they
end, a few seconds later. Budgets per month: docs/keys.md.""",
}


def add_to(app: typer.Typer) -> None:
    """Add the commands. Their implementations are imported when they run, so that ``baton --help`` is quick."""
    for command in (workers, explain, report, plan, health, usage):
        app.command(rich_help_panel=OBSERVE, epilog=EPILOGS[command.__name__])(command)


def workers(
    watch: Annotated[bool, typer.Option("--watch", help="Refresh the table every second, until Ctrl-C.")] = False,
    nats_url: NatsUrl = "",
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """List all workers with role, phase and load."""
    from services.launcher.bus_client import read_fleet
    from services.launcher.views.workers import fleet_table, watch_fleet

    if watch and (json or not Console().is_terminal):
        fail("--watch draws on a terminal: leave out --json, and do not redirect the output.")
    url = find_nats(nats_url, state_dir)
    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            reply_of(watch_fleet(url, Console()), url, state_dir)
        return
    fleet = reply_of(read_fleet(url), url, state_dir)
    if json:
        print_json(fleet.state)
        return
    console = wide_console()
    console.print(fleet_table(fleet, console.width))
    running = state_file.find(state_folder(state_dir))
    if running is not None and running.nats_url == url:
        for name, address in running.routers.items():
            console.print(f"{name} {address}", style="dim", highlight=False, soft_wrap=True)


def explain(
    decision: Annotated[str, typer.Argument(help="A decision id, a request id, or latest.")] = "latest",
    request: Annotated[str, typer.Option(help="Show the last decision for this request id.")] = "",
    json: Json = False,
    url: Annotated[str, typer.Option(help="URL of a router; each router can look up the others' decisions.")] = "",
    nats_url: Annotated[str, typer.Option(help="Ask over this NATS instead of HTTP.")] = "",
    state_dir: StateDir = None,
) -> None:
    """Explain a placement: the chosen workers, the other candidates, predicted and measured times."""
    from services.launcher.views.explain import ask_over_nats, ask_router, draw, query_of

    query = query_of(decision, request)
    if nats_url and not url:
        asking = ask_over_nats(find_nats(nats_url, state_dir), query)
    else:
        asking = ask_router(router_url(url, state_dir), query)
    show(reply_of(asking, nats_url, state_dir), draw, json=json)


def report(
    model: Annotated[str, typer.Option(help="Report on this model only.")] = "",
    nats_url: NatsUrl = "",
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Report whether disaggregated serving is faster than aggregated serving, by prompt length."""
    from services.launcher.views.reports import ask_report, draw_report

    url = find_nats(nats_url, state_dir)
    show(reply_of(ask_report(url, model), url, state_dir), draw_report, json=json)


def plan(
    count: Annotated[int, typer.Option(min=1, help="Number of decisions to show, newest first.")] = 20,
    nats_url: NatsUrl = "",
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Size a fleet for a workload (--trace, --rate), or show what the running planner changed and why."""
    from services.launcher.views.reports import ask_plans, draw_plans

    url = find_nats(nats_url, state_dir)
    show(reply_of(ask_plans(url, count), url, state_dir), draw_plans, json=json, wide=True)


def health(
    service: Annotated[str, typer.Argument(help="router, orchestrator, collector or worker.")],
    instance: Annotated[str, typer.Argument(help="Its instance name or worker id. Default: any instance.")] = "",
    nats_url: NatsUrl = "",
    state_dir: StateDir = None,
    within_s: Annotated[float, typer.Option(help="Seconds to wait for the service's status.")] = HEALTH_S,
) -> None:
    """Check one service: exit with 0 if it is ready, else with 1. For container health checks."""
    from services.launcher.bus_client import next_status

    url = find_nats(nats_url, state_dir)
    status = reply_of(next_status(url, service, instance, within_s), url, state_dir)
    if status is None:
        fail(f"unhealthy: no status of {f'{service} {instance}'.rstrip()} within {within_s:g} s")
    is_ready = status.phase is ServicePhase.READY
    detail = f": {harmless(status.detail)}" if status.detail else ""
    print(
        f"{'healthy' if is_ready else 'unhealthy'}: {status.service} {status.instance} is {status.phase.value}{detail}"
    )
    sys.exit(0 if is_ready else 1)


Format = Literal["table", "csv", "jsonl"]
By = Literal["day", "month", "total"]


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
    found = summed(reply_of(read_ledger(url, query.months()), url, state_dir), query, now)
    if form == "table":
        show(found, draw, json=False)
    else:
        sys.stdout.write(harmless(to_csv(found)) if form == "csv" else to_jsonl(found))


def _day(text: str, option: str, *, last: bool) -> date:
    from services.launcher.views.usage import parse_day

    try:
        return parse_day(text, last=last)
    except ValueError:
        fail(f"{option}: {text!r} is no date. Write a day, such as 2026-11-01, or a month, such as 2026-11.")
