"""``baton token`` makes the text with which a host joins; ``baton join`` runs the host's workers with it."""

from __future__ import annotations

import asyncio
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from services.launcher.commands.options import EngineRole, StateDir, fail, state_folder
from services.launcher.system import state_file
from services.launcher.system.options import ModelOptions
from services.launcher.system.process_plan import PlanRefused
from shared.contracts.ids import is_subject_token

if TYPE_CHECKING:
    from services.launcher.fleet.fleet_file import HostPart
    from services.launcher.fleet.joining import Token
    from services.launcher.system.state_file import RunningSystem


WORKERS_MAX = 64
EPILOG = """[bold]Examples[/]

[cyan]baton token --role decode --out host.token[/]   a decode worker of the running system's model

[cyan]baton token --config fleet.toml --name gpu-2 --out gpu-2.token[/]   the workers that the file gives to gpu-2

[cyan]baton token --name gpu-2 --revoke[/]   the keys of gpu-2's workers stop working

A token holds a key for each worker of one host, and no other key. It is as secret as these keys, and valid until
they are revoked; the same command prints it again. It contains variables of the fleet file, such as HF_TOKEN."""
JOIN_EPILOG = """[bold]Examples[/]

[cyan]baton join gpu-2.token[/]   a file with the token

[cyan]ssh head baton token --role decode | baton join -[/]   from standard input

[cyan]baton join[/]   again, with the token that this host has joined with

The token itself may be the argument too, but then users of this machine can read it in the list of processes."""


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Run a system", epilog=JOIN_EPILOG)(join)
    app.command(rich_help_panel="Secure it", epilog=EPILOG)(token)


def token(  # noqa: PLR0913, PLR0917  # one parameter per option is how the command line is declared
    role: Annotated[EngineRole | None, typer.Option(help="Role of the host's workers; or use --config.")] = None,
    count: Annotated[int, typer.Option(min=1, max=WORKERS_MAX, help="Number of workers.", metavar="N")] = 1,
    model: Annotated[str, typer.Option(help="Their model.", metavar="ID", show_default="the running one")] = "",
    config: Annotated[Path | None, typer.Option(help="A fleet file, which names the workers.")] = None,
    name: Annotated[str, typer.Option(help="Name of the host that joins.", show_default="a new one")] = "",
    address: Annotated[
        str, typer.Option(help="Where other hosts reach the head host.", show_default="that of the file")
    ] = "",
    revoke: Annotated[bool, typer.Option("--revoke", help="Revoke the keys of the host instead.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the token to this file, which only you may read.", show_default="standard output"),
    ] = None,
    state_dir: StateDir = None,
) -> None:
    """Make a token with which another host joins. Run this on the host with NATS."""
    folder = state_folder(state_dir)
    if name and not is_subject_token(name):
        fail(f"--name {name}: write letters, digits, '-' and '_'.")
    if revoke:
        revoke_host(folder, name)
        return
    if (config is None) == (role is None):
        fail("Name either --role, or a fleet file with --config and a host in it with --name.")
    if address and not config:
        fail("--address replaces an address in a fleet file: name the file with --config.")
    running = state_file.find(folder)
    if config:
        nats_url, part = _from_file(config, name, address)
    else:
        nats_url, part = part_from_running(running, name or f"host-{secrets.token_hex(2)}", str(role), count, model)
    from services.launcher.cluster.files import write_private

    text = _made(folder, running, nats_url, part)
    if out is None:
        print(text)
        return
    try:
        write_private(out, f"{text}\n".encode())
    except OSError as error:
        fail(f"{out}: {error.strerror}. Name another file with --out.")
    print(f"The token is in {out}. Bring it to the host, and run `baton join {out.name}` there.", file=sys.stderr)


def _from_file(config: Path, name: str, head_address: str) -> tuple[str, HostPart]:
    from services.launcher.commands.fleet import fleet_of, part_named
    from services.launcher.fleet.head import nats_url_of

    found = fleet_of(config, head_address)
    part = part_named(config, found, name)
    if part.name == found.head.name:
        fail(f"{part.name} is the head host: it needs no token. Name another host with --name.")
    return nats_url_of(found), part


def part_from_running(
    running: RunningSystem | None, name: str, role: str, count: int, model: str
) -> tuple[str, HostPart]:
    """NATS's URL for other hosts, and workers of a model of the running system; exits if there is none."""
    from services.launcher.fleet.fleet_file import HostPart
    from services.launcher.fleet.head import nats_url_for_others
    from services.launcher.system.launch import named

    if running is None:
        fail("No system runs with this state directory: start one, or name a fleet file with --config.")
    try:
        wanted = msgspec.convert({"model": model, role: count}, ModelOptions)
        part = {"name": name, "models": [named(wanted, running.models)], "engine": running.engine}
        return nats_url_for_others(running), msgspec.convert(part, HostPart)
    except PlanRefused as refused:
        fail(str(refused))


def _made(state_dir: Path, running: RunningSystem | None, nats_url: str, part: HostPart) -> str:
    """The token. If NATS runs, it knows the keys in it afterwards."""
    from services.launcher.cluster.folder import FOLDER, CannotCreate
    from services.launcher.fleet import head
    from services.launcher.fleet.joining import write_token

    keys = Path(running.keys_dir) if running and running.keys_dir else state_dir / FOLDER
    try:
        made = head.make_token(keys, nats_url, part)
    except (PlanRefused, CannotCreate, *head.KEY_ERRORS) as error:
        fail(f"{keys}: {error}")
    runs = head.reload_nats(keys) or running
    if runs and (why := asyncio.run(head.refused_keys(nats_url, keys, [*made.seeds]))):
        fail(f"NATS does not accept the new keys; nats-server reads them after SIGHUP. {why}")
    return write_token(made)


def revoke_host(state_dir: Path, name: str) -> None:
    """Delete the keys of a host, and have NATS forget them."""
    from services.launcher.cluster.folder import FOLDER, CannotCreate
    from services.launcher.fleet import head

    if not name:
        fail("--revoke needs the host: --name.")
    running = state_file.find(state_dir)
    keys = Path(running.keys_dir) if running and running.keys_dir else state_dir / FOLDER
    try:
        gone = head.revoke(keys, name)
    except (CannotCreate, *head.KEY_ERRORS) as error:
        fail(f"{keys}: {error}")
    if not gone:
        fail(f"No worker of {name} has a key in {keys}.")
    print(
        f"Revoked: {', '.join(gone)}." + ("" if head.reload_nats(keys) else " Send SIGHUP to nats-server if it runs.")
    )


def join(
    given: Annotated[
        str, typer.Argument(metavar="[TOKEN]", help="A file with the token, - for standard input, or the token.")
    ] = "",
    keep_trying: Annotated[
        bool, typer.Option("--keep-trying", help="Start a worker that fails again, while the others serve.")
    ] = False,
    state_dir: StateDir = None,
) -> None:
    """Run this host's workers for a system on another host, until Ctrl-C."""
    from services.launcher.fleet import joining

    folder = state_folder(state_dir)
    found = token_in(given) if given else stored(folder, only_host(folder))
    try:
        if given:
            joining.store(folder, found)
    except OSError as error:
        fail(f"{error.filename or folder}: {error.strerror}")
    sys.exit(run_joined(folder, found, found.part, keep_trying=keep_trying))


def only_host(state_dir: Path) -> str:
    """The host that has joined with this state directory; exits with the reason unless there is exactly one."""
    from services.launcher.fleet import joining

    names = joining.stored_names(state_dir)
    if len(names) != 1:
        have = f"several hosts ({', '.join(names)}) have" if names else "no host has"
        fail(f"Name a token: {have} joined with the state directory {state_dir}. `baton token` makes one.")
    return names[0]


def token_in(given: str) -> Token:
    """The token in a file, on standard input, or in the text itself; exits with the reason if there is none."""
    from services.launcher.fleet.joining import WrongToken, looks_like_token, read_token

    try:
        if given == "-":
            text = sys.stdin.read()
        else:
            text = given if looks_like_token(given) else Path(given).expanduser().read_text(encoding="utf-8")
        return read_token(text)
    except OSError as error:
        fail(f"{given}: {error.strerror}. Name a token of `baton token`, or a file with one.")
    except UnicodeDecodeError:
        fail(f"{given}: it is not text")
    except WrongToken as error:
        fail(f"The token: {error}.")


def stored(state_dir: Path, host_name: str) -> Token:
    """The token that the host has joined with; exits with the reason if it cannot be read."""
    from services.launcher.fleet import joining
    from services.launcher.fleet.joining import WrongToken

    try:
        return joining.stored_token(state_dir, host_name)
    except (OSError, WrongToken) as error:
        fail(f"The token in {joining.joined_folder(state_dir, host_name)}: {error}.")


def run_joined(state_dir: Path, found: Token, part: HostPart, *, keep_trying: bool) -> int:
    """Run the part with the keys of the token; returns the exit code."""
    from services.launcher.fleet import joining
    from services.launcher.fleet.joining import WrongToken
    from services.launcher.system.launch import join_with_token

    try:
        options = joining.joined_options(state_dir, found, part)
        return asyncio.run(join_with_token(msgspec.structs.replace(options, keep_trying=keep_trying)))
    except WrongToken as error:
        fail(f"The token: {error}.")
    except PlanRefused as refused:
        fail(str(refused))
