"""``baton keys``: API keys for the routers' file, of which only digests are kept."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from services.launcher.cluster.key_entry import TENANT, KeyEntry, Permission, entry_text, salt_text
from services.launcher.commands.options import fail
from shared.runtime.keys import digest_of, new_key, new_salt

OWNER_ONLY = 0o600

keys = typer.Typer(no_args_is_help=True, help="Make API keys: who may have requests served, and how many.")


def add_to(app: typer.Typer) -> None:
    """The group of commands."""
    app.add_typer(keys, name="keys")


@keys.callback()
def _group() -> None:
    """Keeps ``new`` a command of its own while it is the only one."""


@keys.command(
    epilog="""[bold]Examples[/]

[cyan]baton keys new --tenant acme --file keys.toml[/]   prints the key, once; the file has its digest

[cyan]baton keys new --tenant ops --permissions infer,admin,force-placement --file keys.toml[/]

[cyan]baton keys new --tenant trial --requests-per-minute 60 --tokens-per-minute 100000 --priority 10[/]

Routers read the file again when it changes: [cyan]ROUTER_KEYS_FILE=keys.toml baton up --host 0.0.0.0[/]
Clients send it as [cyan]Authorization: Bearer KEY[/]. To take a key back, delete its lines."""
)
def new(  # noqa: PLR0913, PLR0917  # one parameter per option is how the command line is declared
    tenant: Annotated[str, typer.Option(help="Whose it is: letters, digits, underscores, hyphens.")],
    permissions: Annotated[str, typer.Option(help="Of infer, admin, force-placement; with commas.")] = "infer",
    priority: Annotated[
        int | None, typer.Option(min=-1000, max=1000, help="Of its requests; lower is more urgent.")
    ] = None,
    requests_per_minute: Annotated[int, typer.Option(min=0, help="At each router; 0: no limit.")] = 0,
    tokens_per_minute: Annotated[int, typer.Option(min=0, help="Prompts and completions together; 0: no limit.")] = 0,
    model: Annotated[
        list[str] | None, typer.Option(help="It may use only this one; several times for several.")
    ] = None,
    public_cache: Annotated[
        bool, typer.Option("--public-cache", help="Its prompts are no secret: cached for all such keys together.")
    ] = False,
    note: Annotated[str, typer.Option(help="For your own eyes.")] = "",
    file: Annotated[Path | None, typer.Option(help="Add it to this file, which is made if need be.")] = None,
) -> None:
    """Make a key and print it: it is shown this once and kept nowhere."""
    if not TENANT.fullmatch(tenant):
        raise typer.BadParameter("up to 128 letters, digits, underscores and hyphens", param_hint="--tenant")
    key = new_key()
    entry = KeyEntry(
        tenant=tenant,
        sha256=digest_of(key),
        note=note,
        permissions=_permissions(permissions),
        priority=priority,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        models=tuple(model or ()),
        public_cache=public_cache,
    )
    if file is None:
        print(f"{salt_text(new_salt())}\n{entry_text(entry)}", file=sys.stderr)
        print(
            "The lines above belong into the routers' file of keys; leave the salt that is there. The key:",
            file=sys.stderr,
        )
    else:
        try:
            add_entry(file, entry)
        except OSError as error:
            fail(f"{file}: {error.strerror}")
        print(f"Added to {file}, as a digest. The key, which is shown this once:", file=sys.stderr)
    print(key)


def add_entry(file: Path, entry: KeyEntry) -> None:
    """Into the file that is there, so that whoever has it mounted sees it; or into a new one, for its owner only.
    Raises OSError.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, OWNER_ONLY)
    with os.fdopen(descriptor, "a", encoding="utf-8") as opened:
        top = salt_text(new_salt()) if opened.tell() == 0 else ""
        opened.write(f"{top}\n{entry_text(entry)}")


def _permissions(text: str) -> tuple[Permission, ...]:
    try:
        return tuple(sorted({Permission(name.strip()) for name in text.split(",")}))
    except ValueError as error:
        raise typer.BadParameter(f"some of {', '.join(Permission)}", param_hint="--permissions") from error
