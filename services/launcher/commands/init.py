"""``baton init``: the keys and certificates by which the processes of a cluster know each other on NATS."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from services.launcher.cluster.folder import (
    API_KEYS,
    AUTHORITY_KEY,
    ENDS_SOON_DAYS,
    SECURE,
    CannotMake,
    Wish,
    folder_of,
    variables,
)
from services.launcher.commands.options import common_settings, fail
from shared.bus.port import BusDown
from shared.contracts.ids import is_subject_token
from shared.runtime.settings import CommonSettings

if TYPE_CHECKING:
    from services.launcher.cluster.files import Made

FOLDER = "cluster"
"""In the state folder, when none is named."""


def add_to(app: typer.Typer) -> None:
    """The command."""
    app.command(
        epilog="""[bold]Examples[/]

[cyan]baton init /etc/baton --host nats.example.org[/]   keys for all parties; NATS is reached by that name

[cyan]baton init /etc/baton --worker gpu-1 --worker gpu-2[/]   these two may speak for themselves only

[cyan]baton init /etc/baton --renew[/]   a new certificate for NATS; all keys stay

What is there stays as it is, so it can be run again at any time, and should be after an upgrade:
nats-server's permissions are those of the version that wrote them."""
    )(init)


def init(  # one parameter per option is how the command line is declared
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Where they lie.", show_default="~/.local/state/baton/cluster"),
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address by which NATS is reached; several times for several.")
    ] = None,
    worker: Annotated[
        list[str] | None, typer.Option(help="The id of a worker that gets a key of its own, for itself alone.")
    ] = None,
    renew: Annotated[bool, typer.Option("--renew", help="Make a new certificate for NATS.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Make everything anew: what is in use stops working.")] = False,
    no_api_key: Annotated[bool, typer.Option("--no-api-key", help="Make no file of API keys for the routers.")] = False,
) -> None:
    """Make the keys and certificates of a cluster: who may do what on NATS, and TLS."""
    from services.launcher.cluster.certificates import NoCertificate
    from services.launcher.cluster.files import make

    named = folder.expanduser().absolute() if folder else Path(keys_folder(None, common_settings()))
    if wrong := [name for name in worker or () if not is_subject_token(name)]:
        fail(f"{wrong[0]!r} is no worker's id: those have letters, digits, '-' and '_' only.")
    wish = Wish(hosts=tuple(host or ()), workers=tuple(worker or ()), api_key=not no_api_key, renew=renew, force=force)
    try:
        made = make(named, wish, datetime.now(UTC))
    except (CannotMake, NoCertificate, BusDown) as error:
        fail(f"{named}: {error}")
    except OSError as error:
        fail(f"{error.filename or named}: {error.strerror}")
    tell(Console(highlight=False, soft_wrap=True), named, wish, made)


def keys_folder(state_dir: Path | None, common: CommonSettings) -> str:
    """Where the keys are when nobody says where."""
    return str(((state_dir or Path(common.state_dir)) / FOLDER).expanduser().absolute())


def tell(console: Console, folder: Path, wish: Wish, made: Made) -> None:
    """What was made, and what to do with it."""
    making = made.making
    console.print(f"[bold]{folder}[/]")
    _line(console, making.authority, "ca/", f"the cluster's own CA, until {made.authority.ends_at:%Y-%m-%d}")
    names = ", ".join(made.server.names)
    _line(console, making.server, "nats/", f"NATS's certificate for {names}, until {made.server.ends_at:%Y-%m-%d}")
    for owner in made.owners:
        _line(console, owner in making.nkeys, f"{folder_of(owner)}/", f"the key of {_owner(owner)}, and the CA")
    if made.api_key:
        _line(console, True, API_KEYS, "the API keys that routers let in; the first one is below")
    _line(console, True, SECURE, "who may do what on NATS: written each time")
    _warn(console, wish, made)
    console.print("\n[bold]What to do with it[/]")
    console.print(f"  nats-server -c {folder / SECURE} --jetstream --store_dir FOLDER")
    console.print("    or, in a configuration of your own, include that file by its path from there; SIGHUP if it runs")
    console.print("  every process, with its own party's folder, such as a router's:")
    for name, value in {"BATON_NATS_URL": "tls://HOST:4222", **variables(str(folder), "router")}.items():
        console.print(f"    {name}={value}")
    console.print(f"  {folder / AUTHORITY_KEY} makes certificates and nothing else: it may be kept elsewhere.")
    if made.api_key:
        console.print(f"  routers:  ROUTER_KEYS_FILE={folder / API_KEYS}")
        console.print("\nThe first API key, for everything; it is shown this once:")
        console.print(made.api_key, style="bold")


def _warn(console: Console, wish: Wish, made: Made) -> None:
    days = (made.server.ends_at - datetime.now(UTC)).days
    if days < ENDS_SOON_DAYS:
        over = "has ended" if days < 0 else f"ends in {days} days"
        console.print(f"[yellow]![/] NATS's certificate {over}: run this again with --renew.")
    if lacking := [name for name in wish.hosts if name not in made.server.names]:
        console.print(f"[yellow]![/] NATS's certificate is not for {', '.join(lacking)}: run this again with --renew.")
    if not made.is_trusted:
        console.print("[yellow]![/] The CA did not sign NATS's certificate: run this again with --renew.")


def _line(console: Console, is_new: bool, what: str, meaning: str) -> None:
    mark = "[green]✓ made[/]" if is_new else "[dim]= kept[/]"
    console.print(f"  {mark}  {what:<18} {meaning}")


def _owner(owner: str) -> str:
    party, _, name = owner.partition(".")
    if name:
        return f"the worker {name} alone"
    return {"launcher": "the baton command"}.get(party, f"every {party}")
