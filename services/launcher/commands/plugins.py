"""Commands that others bring: what stands above the services adds its own to ``baton`` by an entry point.

The one that is called is loaded; of the others only the names are told, so that the command starts quickly.
"""

from __future__ import annotations

from importlib.metadata import entry_points

import typer

GROUP = "baton.commands"


def mount(app: typer.Typer, arguments: list[str]) -> None:
    """Add them to ``app``, which is about to be run with ``arguments``."""
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        if arguments[:1] == [entry.name]:
            app.add_typer(entry.load(), name=entry.name)
        else:
            app.command(name=entry.name, help=f"See: baton {entry.name} --help")(_not_called)


def _not_called() -> None:
    """Stands for a command that the arguments do not name."""
