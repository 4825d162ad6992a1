"""``baton fleet check``, and what `baton up --config` does: the hosts of a fleet file."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import msgspec
import typer
from rich.markup import escape

from services.launcher.commands.options import fail
from services.launcher.fleet.fleet_file import Fleet, HostTable, WrongFleetFile, part_of, read_fleet_file
from services.launcher.system.machine import KEYS_VARIABLE
from services.launcher.system.plan import worker_names
from services.launcher.terminal import Console
from shared.addresses import host_port

if TYPE_CHECKING:
    from services.launcher.fleet.fleet_file import HostPart
    from services.launcher.fleet.joining import Token
    from services.launcher.system.options import UpOptions

fleet = typer.Typer(no_args_is_help=True, help="Read a fleet file: hosts, and the workers of each.")
DEFAULT_MODEL = "baton-tiny"
SERVICES = "NATS, routers, orchestrator, collector"


def add_to(app: typer.Typer) -> None:
    app.add_typer(fleet, name="fleet", rich_help_panel="Run a system")


@fleet.callback()
def _group() -> None:
    """Without a callback typer would merge the only subcommand into ``fleet``."""


@fleet.command()
def check(config: Annotated[Path, typer.Argument(metavar="FLEET.TOML", help="A fleet file.")]) -> None:
    """Check a fleet file, and show what each host would run."""
    show_fleet(Console(highlight=False, soft_wrap=True), fleet_of(config))


def fleet_of(config: Path, head_address: str = "") -> Fleet:
    """The fleet of that file; exits with the reason if there is none."""
    try:
        return read_fleet_file(config.expanduser().read_text(encoding="utf-8"), head_address)
    except OSError as error:
        fail(f"{config}: {error.strerror}")
    except UnicodeDecodeError:
        fail(f"{config}: it is not UTF-8 text")
    except WrongFleetFile as error:
        fail(f"{config}: {error}")


def part_named(config: Path, of: Fleet, name: str) -> HostPart:
    """What the host of that name, or of this machine's, runs; exits with the list of hosts if there is none."""
    try:
        return part_of(of, name or socket.gethostname())
    except WrongFleetFile as error:
        fail(f"{config}: {error}")


def show_fleet(console: Console, found: Fleet) -> None:
    """One paragraph for each host."""
    for host in found.host:
        console.print(f"[bold]{escape(host.name)}[/]{f'  {escape(host.address)}' if host.address else ''}")
        if host is found.head:
            console.print(f"  {SERVICES}")
            console.print(f"  API at {host_port(found.router.host or host.address or '127.0.0.1', found.router.port)}")
        show_workers(console, found, host)


def show_workers(console: Console, found: Fleet, host: HostTable) -> None:
    """The ids of a host's workers, by model."""
    part = part_of(found, host.name)
    devices = f"GPUs {','.join(part.gpus)}" if part.gpus else ""
    devices = f"cores {','.join(map(str, part.cores))}" if part.cores else devices
    if devices:
        console.print(f"  {devices}")
    names = worker_names(part.models, part.name)
    rows = [(each, "") for each in part.models for _ in each.roles]
    rows += [(each, "") for each in part.models for _ in range(each.store)]
    rows += [(each, f" at {server}") for each in part.models for server in each.attach]
    for model, where in rows:
        console.print(f"  {next(names)}  {escape(f'{model.model or DEFAULT_MODEL}{where}')}")
    if not part.models:
        console.print("  no workers")


def run_host(config: Path, name: str, head_address: str, state_dir: Path, *, keep_trying: bool) -> int:
    """Run the host of that name; returns the exit code."""
    found = fleet_of(config, head_address)
    part = part_named(config, found, name)
    if part.name == found.head.name:
        from services.launcher.system.launch import run_up

        options = head_of(found, part, state_dir, sys.stdout)
        return asyncio.run(run_up(msgspec.structs.replace(options, keep_trying=keep_trying)))
    from services.launcher.commands.tokens import run_joined

    return run_joined(state_dir, token_of(config, found, part, state_dir), part, keep_trying=keep_trying)


def token_of(config: Path, found: Fleet, part: HostPart, state_dir: Path) -> Token:
    """The token that this host has joined with; exits with the commands to do so if it has not."""
    from services.launcher.commands.tokens import stored
    from services.launcher.fleet import joining

    if part.name not in joining.stored_names(state_dir):
        fail(
            f"{part.name} has not joined yet. On {found.head.name} run `baton token --config {config} "
            f"--name {part.name}`, then here `baton join TOKEN`."
        )
    return stored(state_dir, part.name)


def head_of(found: Fleet, part: HostPart, state_dir: Path, output: TextIO) -> UpOptions:
    """The options of the head host, with its keys made and its variables set. Writes a first API key, once."""
    from services.launcher.cluster.folder import API_KEYS, FOLDER, CannotCreate
    from services.launcher.commands.up import ACCESS_VARIABLES
    from services.launcher.fleet import head, joining

    keys = state_dir / FOLDER
    try:
        made = head.create_fleet_keys(keys, found, datetime.now(UTC))
    except (CannotCreate, *head.KEY_ERRORS) as error:
        fail(f"The keys in {keys}: {error}")
    joining.apply_variables(part, part.address or "127.0.0.1")
    if not any(os.environ.get(each) for each in ACCESS_VARIABLES):
        os.environ[KEYS_VARIABLE] = str(keys / API_KEYS)
    if made.api_key:
        print(
            f"The first API key, with all permissions. It is shown only once:\n{made.api_key}", file=output, flush=True
        )
    return head.head_options(found, part, state_dir, keys)
