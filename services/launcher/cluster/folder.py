"""What the folder of a cluster's keys holds, what of it is still to be made, and what nats-server is told.

Each party has a folder of its own, which is all that its processes need to see: its key, and the CA by which they know
NATS. The CA's own key is needed only to make certificates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shared.contracts.channels import Party
from shared.contracts.permissions import owner_of, permission_block

AUTHORITY, AUTHORITY_KEY = "ca/ca.pem", "ca/ca-key.pem"
SERVER, SERVER_KEY, SECURE = "nats/server.pem", "nats/server-key.pem", "nats/secure.conf"
NKEY, TRUSTED = "nkey", "ca.pem"
"""In each party's folder."""
API_KEYS = "router/keys.toml"
HOSTS = ("nats", "localhost", "127.0.0.1", "::1")
"""Names that the server's certificate always has."""
ENDS_SOON_DAYS = 30
TLS_S_MAX = 5
"""For a handshake, on a machine that is busy."""


class CannotMake(Exception):
    """Something that is needed for it is not there; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What `baton init` was asked for."""

    hosts: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    """Workers that get keys of their own."""
    api_key: bool = True
    renew: bool = False
    """A new certificate for the server."""
    force: bool = False
    """Everything anew, also what is there."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What is there already."""

    files: frozenset[str] = frozenset()
    """Their paths in the folder."""
    names: tuple[str, ...] = ()
    """That the server's certificate is for."""


@dataclass(frozen=True, kw_only=True)
class Making:
    """What is to be made."""

    authority: bool
    server: bool
    hosts: tuple[str, ...]
    """For the server's certificate."""
    nkeys: tuple[str, ...]
    """Owners that get one."""
    api_key: bool


def folder_of(owner: str) -> str:
    """The folder of a party, or of one worker that has its own."""
    return owner.replace(".", "-", 1)


def owners(found: Found, wish: Wish) -> list[str]:
    """Everyone who has a key or is to have one: all parties, then single workers by name."""
    prefix, suffix = f"{Party.WORKER.value}-", f"/{NKEY}"
    named = {
        file[len(prefix) : -len(suffix)] for file in found.files if file.startswith(prefix) and file.endswith(suffix)
    }
    return [*map(owner_of, Party), *(owner_of(Party.WORKER, name) for name in sorted(named | set(wish.workers)))]


def to_make(wish: Wish, found: Found) -> Making:
    """Nothing that is there is made again unless that was asked for. Raises CannotMake."""
    missing = {file for file in (AUTHORITY, AUTHORITY_KEY, SERVER, SERVER_KEY, API_KEYS) if file not in found.files}
    authority = wish.force or {AUTHORITY, AUTHORITY_KEY} <= missing
    server = authority or wish.renew or bool(missing & {SERVER, SERVER_KEY})
    lacking = sorted(missing & {AUTHORITY, AUTHORITY_KEY})
    if server and not authority and lacking:
        raise CannotMake(
            f"{lacking[0]} is not there, and a certificate cannot be made without it. Put it back, or make everything "
            "anew with --force: then every process needs its new files."
        )
    return Making(
        authority=authority,
        server=server,
        hosts=tuple(dict.fromkeys([*HOSTS, *wish.hosts, *([] if wish.force else found.names)])),
        nkeys=tuple(o for o in owners(found, wish) if wish.force or f"{folder_of(o)}/{NKEY}" not in found.files),
        api_key=wish.api_key and (wish.force or API_KEYS in missing),
    )


def secure_conf(folder: str, public_keys: Mapping[str, str]) -> str:
    """The part of nats-server's configuration that says who gets in, and what they may: to be included by the rest."""
    users = "".join(_user(owner, key) for owner, key in public_keys.items())
    return (
        "# Made by `baton init`, anew each time: it holds the permissions of that version. No secret is in here.\n"
        f'tls {{\n  cert_file: "{folder}/{SERVER}"\n  key_file: "{folder}/{SERVER_KEY}"\n  timeout: {TLS_S_MAX}\n}}\n'
        f"authorization {{\n  timeout: {TLS_S_MAX}\n  users: [\n{users}  ]\n}}\n"
    )


def variables(folder: str, owner: str) -> dict[str, str]:
    """What a process of this owner is given."""
    own = f"{folder}/{folder_of(owner)}"
    return {"BATON_NATS_NKEY_FILE": f"{own}/{NKEY}", "BATON_NATS_CA_FILE": f"{own}/{TRUSTED}"}


def _user(owner: str, public_key: str) -> str:
    party, _, worker_id = owner.partition(".")
    block = _indented(permission_block(Party(party), worker_id).splitlines())
    return f"    # {owner}\n    {{ nkey: {public_key}, permissions: {block} }}\n"


def _indented(lines: Iterable[str]) -> str:
    return "\n    ".join(lines)
