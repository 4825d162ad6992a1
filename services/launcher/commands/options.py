"""Options and helpers that several commands share: finding the running system, JSON output, errors."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
import typer
from rich.markup import escape

from services.launcher.bus_client import CommandFailed, keys_for, use_keys
from services.launcher.cluster.folder import FOLDER
from services.launcher.fleet.joining import stored_names
from services.launcher.system import state_file
from services.launcher.system.machine import inherited_environment
from services.launcher.terminal import Console
from shared.bus.nats_client import without_password
from shared.bus.port import BusError
from shared.contracts.message import in_full
from shared.runtime.settings import CommonSettings, SettingsError, load_common

T = TypeVar("T")

WIDTH_OF_FILES = 200
"""Columns of a table that goes to a file or a pipe."""


class EngineRole(StrEnum):
    """Roles of a worker with an engine."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


StateDir = Annotated[
    Path | None, typer.Option(help="Directory of logs and NATS storage.", show_default="~/.local/state/baton")
]
NatsUrl = Annotated[
    str,
    typer.Option(
        help="URL of a running NATS; with commas, of the servers of a cluster.",
        show_default="that of the system started by baton up",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def common_settings() -> CommonSettings:
    """BATON_* settings, without the variables of `make` and of this command."""
    try:
        return load_common(inherited_environment())
    except SettingsError as error:
        fail(str(error))


def find_nats(nats_url: str, state_dir: Path | None) -> str:
    """The running system's NATS, or the one that is named. Also selects the key for it, if there is one."""
    running = state_file.find(state_folder(state_dir))
    url = nats_url or (running.nats_url if running else common_settings().nats_url)
    keys = running.keys_dir if running and running.nats_url == url else keys_for(url, keys_folder(state_dir))
    if keys:
        use_keys(keys)
    return url


def state_folder(state_dir: Path | None) -> Path:
    """The state directory of this option, or else of the settings."""
    return (state_dir or Path(common_settings().state_dir)).expanduser().absolute()


def keys_folder(state_dir: Path | None) -> str:
    """The default folder of the keys for NATS."""
    return str(state_folder(state_dir) / FOLDER)


def router_url(url: str, state_dir: Path | None) -> str:
    """The router that is named, or the running system's; exits when there is none."""
    running = None if url else state_file.find(state_folder(state_dir))
    where = url or (running.endpoint if running else "")
    if not where:
        whose = joined_as(state_dir) or f"No system runs with the state directory {state_folder(state_dir)}."
        fail(f"{whose} Name a router: --url http://HOST:8000")
    return where


def joined_as(state_dir: Path | None) -> str:
    """A sentence with the hosts that have joined from this machine; empty if there are none."""
    hosts = stored_names(state_folder(state_dir))
    return (
        f"This machine has joined as {', '.join(hosts)}: its workers belong to a system on another host."
        if hosts
        else ""
    )


def print_json(content: object) -> None:
    """Formatted, on stdout."""
    print(msgspec.json.format(msgspec.json.encode(content)).decode())


def reply_of(asking: Coroutine[Any, Any, T], url: str, state_dir: Path | None) -> T:
    """What the running system replies over the NATS at ``url``; without a reply, exit with 1 and the reason."""
    try:
        return asyncio.run(asking)
    except CommandFailed as error:
        fail(str(error))
    except BusError as error:
        no_nats(url, error, state_dir)


def show(found: T, draw: Callable[[T, Console], None], *, json: bool, wide: bool = False) -> None:
    """As JSON, or drawn; ``wide``: on ``wide_console``."""
    if json:
        print_json(in_full(found))
        return
    draw(found, wide_console() if wide else Console())


def wide_console() -> Console:
    """The terminal; for a file or pipe ``WIDTH_OF_FILES`` columns."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH_OF_FILES)


def no_nats(url: str, error: BaseException, state_dir: Path | None) -> NoReturn:
    """Exit with 1 because NATS does not respond or refuses the connection."""
    shown, text = without_password(url), str(error)
    if text.startswith(f"NATS at {shown} "):  # NATS responds, but refuses the connection.
        fail(f"{text} Run `baton doctor` for details.")
    if whose := joined_as(state_dir):
        fail(f"NATS at {shown} does not respond. {whose} Run the command on the head host, whose key it needs.")
    fail(f"NATS at {shown} does not respond. Start a system with `baton up`, or run `baton doctor` to find the cause.")


def fail(message: str) -> NoReturn:
    """Print the message and exit with 1."""
    Console(stderr=True, highlight=False).print(f"[bold red]✗[/] {escape(message)}", soft_wrap=True)
    sys.exit(1)
