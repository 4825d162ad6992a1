"""A host that joins: keeps its token and keys in the state directory, and runs its workers with them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import socket
import zlib
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from services.launcher.cluster.files import write_private
from services.launcher.cluster.folder import NKEY, TRUSTED, folder_of, variables
from services.launcher.fleet.fleet_file import HostPart, unusable_variable
from services.launcher.system.options import UpOptions
from services.launcher.system.plan import worker_names
from services.launcher.system.process_plan import PlanRefused
from shared.bus.nats_credentials import Seed
from shared.contracts.channels import Party
from shared.contracts.ids import is_subject_token
from shared.contracts.permissions import owner_of

# The text with which a host joins a fleet: where NATS is, its CA, what the host runs, and a key for each worker.
#
# ``baton1.PAYLOAD.CHECK``: base64url of compressed JSON, and the first digits of its SHA-256. The check finds what was
# cut off or mistyped; it is no signature, and the text is as secret as the keys in it.

VERSION = 1
PREFIX = "baton"
CHECK_CHARS = 12
BYTES_MAX = 1 << 20
"""Longest JSON; more is refused before it is unpacked."""
FORM = re.compile(rf"{PREFIX}(\d+)\.([A-Za-z0-9_-]+)\.([0-9a-f]+)")


class WrongToken(Exception):
    """The text is no token that this version can use; the message says what is wrong with it."""


class Token(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a token carries."""

    nats_urls: tuple[str, ...]
    """Addresses of one NATS by which other hosts may reach it."""
    ca: str
    """PEM of the CA that signed NATS's certificate."""
    seeds: Mapping[str, str]
    """An nkey seed for each worker id. Such a key permits what one worker does, and nothing else."""
    part: HostPart

    def __repr__(self) -> str:
        return f"Token(part={self.part!r}, nats_urls={self.nats_urls!r})"


def write_token(token: Token) -> str:
    """The text."""
    payload = base64.urlsafe_b64encode(zlib.compress(msgspec.json.encode(token), 9)).decode().rstrip("=")
    return f"{PREFIX}{VERSION}.{payload}.{_check_of(payload)}"


def looks_like_token(text: str) -> bool:
    """Whether it is meant as a token, and not as the name of a file."""
    return re.match(rf"{PREFIX}\d+\.", text) is not None


def read_token(text: str) -> Token:
    """The token. Line breaks that a terminal or a mail added do not matter. Raises WrongToken."""
    joined = "".join(text.split())
    if not looks_like_token(joined):
        raise WrongToken(f"it does not begin with {PREFIX}{VERSION}. as tokens of `baton token` do")
    version = int(joined.removeprefix(PREFIX).partition(".")[0])
    if version != VERSION:
        raise WrongToken(f"it has version {version}, and this Baton reads {VERSION}: use one version on all hosts")
    found = FORM.fullmatch(joined)
    if not found or found[3] != _check_of(found[2]):
        raise WrongToken(f"it was cut off or changed ({len(joined)} characters): copy the whole text")
    try:
        token = msgspec.json.decode(_unpacked(found[2]), type=Token)
    except (binascii.Error, zlib.error, msgspec.DecodeError) as error:
        raise WrongToken(f"its content cannot be read: {error}") from error
    _check(token)
    return token


def _check(token: Token) -> None:
    """What a token must not do, whoever wrote it. Raises WrongToken."""
    ids = [*worker_names(token.part.models, token.part.name)]
    if not all(is_subject_token(name) for name in (token.part.name, *token.seeds)):
        raise WrongToken("a name in it has other characters than letters, digits, '-' and '_'")
    if not ids or not token.nats_urls or not all(url.startswith("tls://") for url in token.nats_urls):
        raise WrongToken("it names no worker, or no NATS with TLS")
    if missing := [name for name in ids if name not in token.seeds]:
        raise WrongToken(f"it has no key for {missing[0]}")
    for name in token.part.env:
        if why := unusable_variable(name):
            raise WrongToken(f"{name}: {why}")


def _unpacked(payload: str) -> bytes:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)), BYTES_MAX)
    if unpacker.unconsumed_tail:
        raise WrongToken(f"it is larger than {BYTES_MAX} bytes")
    return data


def _check_of(payload: str) -> str:
    return hashlib.sha256(payload.encode()).hexdigest()[:CHECK_CHARS]


JOINED = "joined"
"""Folder in the state directory with a folder for each host that has joined from here."""
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
        nats_url=",".join([url, *(each for each in token.nats_urls if each != url)]),
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
