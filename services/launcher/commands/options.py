"""What commands of ``baton`` share: how they find the running system, and how they say what went wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from services.launcher.cluster.access import use_keys
from services.launcher.system import state_file
from services.launcher.system.machine import inherited_environment
from shared.bus.nats_errors import without_password
from shared.runtime.settings import CommonSettings, SettingsError, load_common

WIDTH_OF_FILES = 200
"""Columns of a table that goes into a file or a pipe."""

StateDir = Annotated[
    Path | None, typer.Option(help="Where logs and NATS storage lie.", show_default="~/.local/state/baton")
]
NatsUrl = Annotated[str, typer.Option(help="A NATS that runs already; otherwise one is started.", show_default=False)]


def common_settings() -> CommonSettings:
    """BATON_* settings, less those that are only `make`'s and ours."""
    try:
        return load_common(inherited_environment())
    except SettingsError as error:
        fail(str(error))


def find_nats(nats_url: str, state_dir: Path | None) -> str:
    """Where the running system's NATS is; its key is ours from here on."""
    common = common_settings()
    running = state_file.find(state_dir or Path(common.state_dir))
    if running and running.keys_dir and nats_url in {"", running.nats_url}:
        use_keys(running.keys_dir)
    return nats_url or (running.nats_url if running else common.nats_url)


def no_nats(url: str, error: BaseException) -> NoReturn:
    """Say why nobody can be asked, and exit with 1."""
    shown = without_password(url)
    words = str(error)
    if words.startswith(f"NATS at {shown} "):  # it answers, and will not have us
        fail(f"{words} `baton doctor` tells more.")
    fail(
        f"NATS at {shown} does not answer. `baton up` starts a system here; `baton doctor` says what is wrong with one."
    )


def fail(message: str) -> NoReturn:
    """Say why and exit with 1."""
    Console(stderr=True, highlight=False).print(f"[bold red]✗[/] {escape(message)}", soft_wrap=True)
    sys.exit(1)
