"""Commands of other packages: they add a command to ``baton`` with the entry point group ``baton.commands``.

Only the command that is called is imported. The help lists the others by name, so that ``baton`` starts quickly.
"""

from __future__ import annotations

from importlib.metadata import entry_points

import typer

GROUP = "baton.commands"


def mount(app: typer.Typer, arguments: list[str]) -> None:
    """Add them to ``app``, which is about to run with ``arguments``."""
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        if arguments[:1] == [entry.name]:
            app.add_typer(entry.load(), name=entry.name)
        else:
            app.command(name=entry.name, help=f"See: baton {entry.name} --help")(_not_called)


def _not_called() -> None:
    """Placeholder for a command that is listed but not called."""
