"""``baton init``: keys and certificates with which processes authenticate to NATS, or a chart for Kubernetes."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from services.launcher.cluster.folder import (
    API_KEYS,
    AUTHORITY_KEY,
    ENDS_SOON_DAYS,
    SECURE,
    CannotCreate,
    InitRequest,
    folder_of,
    variables,
)
from services.launcher.commands.options import fail, keys_folder
from services.launcher.terminal import Console
from shared.bus.port import BusDown
from shared.contracts.ids import is_subject_token

if TYPE_CHECKING:
    from services.launcher.cluster.files import InitResult
EPILOG = """[bold]Examples[/]

[cyan]baton init /etc/baton --host nats.example.org[/]   keys for all services; clients reach NATS by that name

[cyan]baton init /etc/baton --worker gpu-1 --worker gpu-2[/]   each of these workers gets its own key

[cyan]baton init /etc/baton --renew[/]   a new certificate for NATS; all keys stay valid (SIGHUP makes
nats-server read it)

[cyan]baton init chart --kubernetes fleet.toml[/]   a Helm chart for this fleet, which makes its keys itself

Existing files are kept, so the command can be repeated at any time; a certificate of which less than a third
of its life is left is renewed. Repeat it after an upgrade: it rewrites nats-server's permissions for the new
version. Clients accept the CA's certificates for the given names only; a new --host changes ca.pem."""


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Secure it", epilog=EPILOG)(init)


def init(  # noqa: PLR0913, PLR0917  # one parameter per option is how the command line is declared
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Folder of the files.", show_default="~/.local/state/baton/cluster"),
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address of NATS for its certificate; repeatable.")
    ] = None,
    worker: Annotated[list[str] | None, typer.Option(help="A worker id that gets its own key; repeatable.")] = None,
    renew: Annotated[bool, typer.Option("--renew", help="Create a new certificate for NATS.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace everything: keys in use stop working.")] = False,
    no_api_key: Annotated[bool, typer.Option("--no-api-key", help="Create no API key file for the routers.")] = False,
    secrets: Annotated[
        bool, typer.Option("--secrets", help="In a pod of Kubernetes: keep the files as Secrets of its namespace.")
    ] = False,
    kubernetes: Annotated[
        Path | None, typer.Option(help="Write a Helm chart for this fleet into DIR instead.", metavar="FLEET.TOML")
    ] = None,
) -> None:
    """Create keys, permissions and TLS certificates for NATS, or a Helm chart that does it."""
    if kubernetes:
        if not folder or any((host, worker, renew, force, no_api_key, secrets)):
            fail("--kubernetes FLEET.TOML takes a folder for the chart, and no other option.")
        write_kubernetes(Console(highlight=False, soft_wrap=True), folder.expanduser(), kubernetes)
        return
    named = folder.expanduser().absolute() if folder else Path(keys_folder(None))
    if wrong := [name for name in worker or () if not is_subject_token(name)]:
        fail(f"{wrong[0]!r} is not a worker id: those consist of letters, digits, '-' and '_'.")
    request = InitRequest(
        hosts=tuple(host or ()), workers=tuple(worker or ()), api_key=not no_api_key, renew=renew, force=force
    )
    console = Console(highlight=False, soft_wrap=True)
    if secrets:
        keep_as_secrets(console, named, request)
    else:
        show_result(console, named, request, created(named, request))


def keep_as_secrets(console: Console, folder: Path, request: InitRequest) -> None:
    """Take up the Secrets that are there, create what is missing, and write what has changed."""
    from services.launcher.cluster.kubernetes import ADMIN_SECRET, Secrets

    try:
        secrets = Secrets(request.workers)
        secrets.restore(folder)
        made = created(folder, request)
        changed = secrets.store(folder, made.api_key)
    except CannotCreate as error:
        fail(str(error))
    console.print("Written: " + (", ".join(changed) or "nothing; all Secrets are there") + ".")
    if made.api_key:
        console.print(
            "The first API key, with all permissions: "
            f"kubectl get secret {ADMIN_SECRET} -o jsonpath='{{.data.key}}' | base64 -d"
        )


def write_kubernetes(console: Console, folder: Path, config: Path) -> None:
    """The chart, and what to do with it; exits with the reason if there can be none."""
    from services.launcher.commands.fleet import fleet_of
    from services.launcher.fleet.fleet_file import WrongFleetFile
    from services.launcher.service_files.files import CannotWriteService
    from services.launcher.service_files.kubernetes import VALUES, still_to_do, values_of, write_chart

    fleet = fleet_of(config, head_address="127.0.0.1")  # Pods find NATS by its name.
    try:
        values = values_of(fleet)
        write_chart(folder, values, config.name)
    except WrongFleetFile as error:
        fail(f"{config}: {error}")
    except CannotWriteService as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or folder}: {error.strerror}")
    console.print(
        f"Written: the chart {escape(str(folder))}, with the fleet in {VALUES}. To start it, or after changes:"
    )
    for line in still_to_do(fleet):
        console.print(f"  {escape(line)}")
    chart = f"{escape(str(folder))} -f {escape(str(folder / VALUES))}"
    console.print(f"  helm upgrade --install baton {chart} -n baton --create-namespace")


def created(folder: Path, request: InitRequest) -> InitResult:
    """The files, made; exits with a message if they cannot be."""
    from services.launcher.cluster.certificates import NoCertificate
    from services.launcher.cluster.files import create

    try:
        return create(folder, request, datetime.now(UTC))
    except (CannotCreate, NoCertificate, BusDown) as error:
        fail(f"{folder}: {error}")
    except OSError as error:
        fail(f"{error.filename or folder}: {error.strerror}")


def show_result(console: Console, folder: Path, request: InitRequest, made: InitResult) -> None:
    """List the files, and how to use them."""
    plan = made.plan
    console.print(f"[bold]{folder}[/]")
    _line(
        console,
        plan.authority or plan.widens,
        "ca/",
        f"the cluster's own CA, valid until {made.authority.ends_at:%Y-%m-%d}",
    )
    names = ", ".join(made.server.names)
    _line(console, plan.server, "nats/", f"NATS's certificate for {names}, valid until {made.server.ends_at:%Y-%m-%d}")
    for owner in made.owners:
        _line(console, owner in plan.nkeys, f"{folder_of(owner)}/", f"key of {_owner(owner)}, and the CA certificate")
    if made.api_key:
        _line(console, True, API_KEYS, "API keys that routers accept; the first one is below")
    _line(console, True, SECURE, "NATS permissions of each service; rewritten each time")
    _warn(console, request, made)
    console.print("\n[bold]How to use the files[/]")
    console.print(f"  nats-server -c {folder / SECURE} --jetstream --store_dir FOLDER")
    console.print("    or include that file in your own configuration, and send SIGHUP to a running nats-server")
    console.print("  Each service gets the files of its own folder. For a router:")
    for name, value in {"BATON_NATS_URL": "tls://HOST:4222", **variables(str(folder), "router")}.items():
        console.print(f"    {name}={value}")
    console.print(f"  {folder / AUTHORITY_KEY} only signs certificates; you can store it elsewhere.")
    if made.api_key:
        console.print(f"  Routers:  ROUTER_KEYS_FILE={folder / API_KEYS}")
        console.print("\nThe first API key, with all permissions. It is shown only once:")
        console.print(made.api_key, style="bold")


def _warn(console: Console, request: InitRequest, made: InitResult) -> None:
    if made.plan.widens:
        console.print(
            "[yellow]![/] The CA's certificate names more hosts now; its key is the same. Give every process its new "
            "ca.pem before nats-server reads its new certificate."
        )
    days = (made.server.ends_at - datetime.now(UTC)).days
    if days < ENDS_SOON_DAYS:
        expiry = "has expired" if days < 0 else f"expires in {days} days"
        console.print(f"[yellow]![/] NATS's certificate {expiry}: run this again with --renew.")
    if lacking := [name for name in request.hosts if name not in made.server.names]:
        console.print(
            f"[yellow]![/] NATS's certificate does not name {', '.join(lacking)}: run this again with --renew."
        )
    if not made.is_trusted:
        console.print("[yellow]![/] The CA did not sign NATS's certificate: run this again with --renew.")


def _line(console: Console, is_new: bool, what: str, meaning: str) -> None:
    mark = "[green]✓ created[/]" if is_new else "[dim]= kept   [/]"
    console.print(f"  {mark}  {what:<18} {meaning}")


def _owner(owner: str) -> str:
    party, _, name = owner.partition(".")
    if name:
        return f"worker {name} only"
    return {"launcher": "the baton command"}.get(party, f"every {party}")
