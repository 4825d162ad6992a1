"""The ``baton`` command."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import time
from importlib.metadata import entry_points
from typing import Annotated

import typer

from services.launcher.commands import batch as batch_commands
from services.launcher.commands import doctor as doctor_command
from services.launcher.commands import fleet as fleet_commands
from services.launcher.commands import init as init_command
from services.launcher.commands import keys as key_commands
from services.launcher.commands import lora as lora_commands
from services.launcher.commands import orders as order_commands
from services.launcher.commands import prefetch as prefetch_command
from services.launcher.commands import profile as profile_commands
from services.launcher.commands import service as service_commands
from services.launcher.commands import tokens as token_commands
from services.launcher.commands import up as up_command
from services.launcher.commands import views as view_commands
from services.launcher.commands import weights as weight_commands
from services.launcher.commands.options import StateDir, fail, state_folder
from services.launcher.system import state_file
from services.launcher.version import version_line

DOWN_S_MAX = 120.0

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serve large language models with prefill and decode on separate vLLM engines.\n\n"
    "[cyan]baton up[/] starts a whole system on this machine: NATS, an OpenAI-compatible router, an orchestrator, "
    "a metrics collector with a web console, and workers with engines. The other commands show and operate it.",
    epilog="Start with [cyan]baton up[/] (or [cyan]baton up --engine simulated[/] without vLLM), then open a second "
    "terminal for [cyan]baton workers --watch[/]. [cyan]baton doctor[/] finds problems.",
)


def show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(version_line())
        raise typer.Exit


@app.callback()
def before_commands(
    _version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Version and commit, and exit.")
    ] = False,
) -> None:
    pass


up_command.add_to(app)
GROUP = "baton.commands"


@app.command(rich_help_panel="Run a system")
def down(state_dir: StateDir = None) -> None:
    """Stop the system that `baton up` runs in another terminal. Running requests may finish."""
    folder = state_folder(state_dir)
    running = state_file.find(folder)
    if running is None:
        fail(f"No system runs with the state directory {folder}.")
    os.kill(running.pid, signal.SIGTERM)
    deadline = time.monotonic() + DOWN_S_MAX
    while state_file.is_held(folder):
        if time.monotonic() > deadline:
            fail(f"The launcher (pid {running.pid}) has not stopped within {DOWN_S_MAX:.0f} s.")
        time.sleep(0.1)
    print(f"The system at {running.endpoint} has stopped.")


token_commands.add_to(app)
fleet_commands.add_to(app)
service_commands.add_to(app)
batch_commands.add_to(app)
view_commands.add_to(app)
order_commands.add_to(app)
lora_commands.add_to(app)
prefetch_command.add_to(app)
profile_commands.add_to(app)
weight_commands.add_to(app)
doctor_command.add_to(app)
init_command.add_to(app)
key_commands.add_to(app)


def main() -> None:
    """Console script."""
    logging.disable(logging.WARNING)  # Commands report on the screen; log lines of libraries would repeat it.
    try:
        mount(app, sys.argv[1:])
        app()
    except KeyboardInterrupt:  # before the command listens for it
        sys.exit(130)
    except OSError as error:  # A file that the user named, or a full disk; others are defects and keep their traceback.
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        fail(f"{error.filename}: {error.strerror}" if error.filename else f"{error.strerror}.")


def mount(app: typer.Typer, arguments: list[str]) -> None:
    """Let the command of another package that ``arguments`` call take the place of the one of its name in ``app``.

    Only that one is imported: it may need packages that take long to load.
    """
    for entry in entry_points(group=GROUP):
        if arguments[:1] == [entry.name]:
            others = (each for each in app.registered_commands if getattr(each.callback, "__name__", "") != entry.name)
            app.registered_commands = [*others, *entry.load().registered_commands]


if __name__ == "__main__":
    main()
