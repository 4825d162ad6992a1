"""``baton keys``: API keys of clients. The routers' key file has only their digests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from services.launcher.cluster.api_keys import TENANT, CannotAdd, add_entry, entry_text, salt_text
from services.launcher.commands.options import fail
from shared.contracts.api_keys import Key, Permission, digest_of, new_key, new_salt

keys = typer.Typer(no_args_is_help=True, help="Create API keys for clients, with permissions and rate limits.")


def add_to(app: typer.Typer) -> None:
    app.add_typer(keys, name="keys", rich_help_panel="Secure it")


@keys.callback()
def _group() -> None:
    """Without a callback typer would merge the only subcommand ``new`` into ``keys``."""


@keys.command(
    epilog="""[bold]Examples[/]

[cyan]baton keys new --tenant acme --file keys.toml[/]   prints the key once; the file gets its digest

[cyan]baton keys new --tenant ops --permissions infer,admin,force-placement --file keys.toml[/]

[cyan]baton keys new --tenant trial --requests-per-minute 60 --tokens-per-minute 100000 --priority 10[/]

[cyan]baton keys new --tenant acme --name ci --monthly-tokens 50000000 --file keys.toml[/]   a budget; see baton usage

Use the file: [cyan]ROUTER_KEYS_FILE=keys.toml baton up --host 0.0.0.0[/]
[cyan]baton keys new --tenant prometheus --permissions view --file keys.toml[/]   reads metrics and the console

Routers reload it when it changes; delete an entry to revoke its key: its running requests end.
Clients send Authorization: Bearer KEY."""
)
def new(  # noqa: PLR0913, PLR0917  # one parameter per option is how the command line is declared
    tenant: Annotated[str, typer.Option(help="Owner: letters, digits, underscores, hyphens.")],
    name: Annotated[str, typer.Option(help="Its name in `baton usage`; default: the beginning of its digest.")] = "",
    permissions: Annotated[str, typer.Option(help="Comma-separated: infer, view, admin, force-placement.")] = "infer",
    priority: Annotated[
        int | None, typer.Option(min=-1000, max=1000, help="Priority of its requests; lower is more urgent.")
    ] = None,
    requests_per_minute: Annotated[int, typer.Option(min=0, help="Limit at each router; 0: none.")] = 0,
    tokens_per_minute: Annotated[int, typer.Option(min=0, help="Limit of prompt and completion tokens; 0: none.")] = 0,
    monthly_tokens: Annotated[int, typer.Option(min=0, help="Budget for each calendar month; 0: none.")] = 0,
    sequences_max: Annotated[int, typer.Option(min=0, help="Completions and batch inputs at once; 0: no limit.")] = 0,
    model: Annotated[list[str] | None, typer.Option(help="Allow only this model; repeatable.")] = None,
    public_cache: Annotated[
        bool, typer.Option("--public-cache", help="Share cached prefixes with all other keys of this kind.")
    ] = False,
    note: Annotated[str, typer.Option(help="A comment in the file.")] = "",
    file: Annotated[Path | None, typer.Option(help="Add it to this file, or create the file.")] = None,
) -> None:
    """Create an API key and print it. The key is shown only once and stored nowhere."""
    if not TENANT.fullmatch(tenant):
        raise typer.BadParameter("up to 128 letters, digits, underscores and hyphens", param_hint="--tenant")
    if name and not TENANT.fullmatch(name):
        raise typer.BadParameter("up to 128 letters, digits, underscores and hyphens", param_hint="--name")
    key = new_key()
    entry = Key(
        tenant=tenant,
        sha256=digest_of(key),
        name=name,
        note=note,
        permissions=_permissions(permissions),
        priority=priority,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        monthly_tokens=monthly_tokens,
        sequences_max=sequences_max,
        public_cache=public_cache,
    )
    if model:  # An empty list would be written, and read as none where it means all.
        entry = msgspec.structs.replace(entry, models=frozenset(model))
    _store(file, entry)
    print(key)


def _store(file: Path | None, entry: Key) -> None:
    """Into the file, or onto the screen; exits with a message if it cannot."""
    try:
        if file is None:
            print(f"{salt_text(new_salt())}\n{entry_text(entry)}", file=sys.stderr)
            print("Add the lines above to the routers' key file, but keep an existing salt. The key:", file=sys.stderr)
        else:
            add_entry(file, entry)
            print(f"Added its digest to {file}. The key, shown only once:", file=sys.stderr)
    except CannotAdd as error:
        fail(f"{file or '--note or --model'}: {error}.")
    except OSError as error:
        fail(f"{file}: {error.strerror}")


def _permissions(text: str) -> frozenset[Permission]:
    try:
        return frozenset(Permission(name.strip()) for name in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"some of {', '.join(Permission)}", param_hint="--permissions") from error
