"""A host that joins: keeps its token and keys in the state directory, and runs its workers with them."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from services.launcher.cluster.files import write_private
from services.launcher.cluster.folder import NKEY, TRUSTED, folder_of, variables
from services.launcher.fleet.host_part import HostPart
from services.launcher.fleet.token import Token, WrongToken, read_token, write_token
from services.launcher.system.options import UpOptions
from services.launcher.system.process_plan import PlanRefused
from services.launcher.system.worker_plan import worker_names
from shared.bus.nats_credentials import Seed
from shared.contracts.channels import Party
from shared.contracts.permissions import owner_of

JOINED = "joined"
"""In the state directory: a folder for each host that has joined from here."""
TOKEN = "token"  # noqa: S105  # the name of a file
CONNECT_S_MAX = 5.0
NATS_PORT = 4222


def store(state_dir: Path, token: Token) -> Path:
    """The token and its keys as files for their owner only; returns their folder. Raises OSError."""
    folder = joined_folder(state_dir, token.part.name)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for worker_id, text in token.seeds.items():
        own = folder / folder_of(owner_of(Party.WORKER, worker_id))
        write_private(own / NKEY, Seed(owner=owner_of(Party.WORKER, worker_id), text=text).file_text.encode())
        write_private(own / TRUSTED, token.ca.encode())
    write_private(folder / TOKEN, write_token(token).encode())
    return folder


def joined_folder(state_dir: Path, host_name: str) -> Path:
    """Where the files of a host that has joined are."""
    return state_dir / JOINED / host_name


def stored_names(state_dir: Path) -> list[str]:
    """Hosts that have joined from this state directory."""
    return sorted(file.parent.name for file in (state_dir / JOINED).glob(f"*/{TOKEN}"))


def stored_token(state_dir: Path, host_name: str) -> Token:
    """The token that this host has joined with. Raises WrongToken, OSError."""
    return read_token((joined_folder(state_dir, host_name) / TOKEN).read_text(encoding="ascii"))


def joined_options(state_dir: Path, token: Token, part: HostPart) -> UpOptions:
    """How to run the part with the stored keys, of which the first one becomes the launcher's own. ``part`` is the
    token's or what a newer fleet file says. Raises PlanRefused, WrongToken.
    """
    folder = str(joined_folder(state_dir, part.name))
    names = [*worker_names(part.models, part.name)]
    if missing := [name for name in names if name not in token.seeds]:
        raise WrongToken(f"it has no key for {missing[0]}: make a new token on the head host, and join with it")
    os.environ.update(variables(folder, owner_of(Party.WORKER, names[0])))
    url, address = reachable(token.nats_urls)
    apply_variables(part, part.address or address)
    return UpOptions(
        models=part.models,
        engine=part.engine,
        nats_url=url,
        keys_dir=folder,
        own_keys=True,
        state_dir=str(state_dir),
        join=True,
        host_name=part.name,
        cores=part.cores,
        gpus=part.gpus,
    )


def apply_variables(part: HostPart, address: str) -> None:
    """Set what processes of this host inherit, unless the environment sets it."""
    for name, value in {"WORKER_KV_HOST": address, **part.env}.items():
        if not os.environ.get(name):
            os.environ[name] = value


def reachable(urls: tuple[str, ...]) -> tuple[str, str]:
    """The first URL that accepts a connection, and this host's own address there. Raises PlanRefused."""
    reasons = []
    for url in urls:
        where = urlsplit(url)
        try:
            with socket.create_connection((where.hostname, where.port or NATS_PORT), CONNECT_S_MAX) as connection:
                return url, str(connection.getsockname()[0])
        except OSError as error:
            reasons.append(f"{url} ({error.strerror or error})")
    raise PlanRefused(
        f"NATS does not respond at {', '.join(reasons)}. Check that the head host runs and can be reached from here."
    )
