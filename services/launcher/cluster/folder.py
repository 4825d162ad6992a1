"""The layout of a cluster's key folder, which files are missing, and nats-server's access configuration.

Each party has its own folder with everything its processes need: its key, and the CA certificate that verifies NATS.
The CA's private key is needed only to sign certificates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shared.contracts.channels import Party
from shared.contracts.permissions import owner_of, permission_block

FOLDER = "cluster"
"""Default name of the whole folder, inside the state directory."""
AUTHORITY, AUTHORITY_KEY = "ca/ca.pem", "ca/ca-key.pem"
SERVER, SERVER_KEY, SECURE = "nats/server.pem", "nats/server-key.pem", "nats/secure.conf"
NKEY, TRUSTED = "nkey", "ca.pem"
"""Files in each party's folder."""
API_KEYS = "router/keys.toml"
HOSTS = ("nats", "localhost", "127.0.0.1", "::1")
"""Names that the server's certificate always contains."""
ENDS_SOON_DAYS = 30
TLS_S_MAX = 5
"""Deadline of a TLS handshake, on a busy machine."""


class CannotCreate(Exception):
    """A required file is missing; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class InitRequest:
    """The options of `baton init`."""

    hosts: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    """Ids of workers that get their own keys."""
    api_key: bool = True
    renew: bool = False
    """Create a new certificate for the server."""
    force: bool = False
    """Replace existing files too."""


@dataclass(frozen=True, kw_only=True)
class ExistingFiles:
    """What the folder has already."""

    files: frozenset[str] = frozenset()
    """Paths relative to the folder."""
    names: tuple[str, ...] = ()
    """Names in the server's certificate."""
    allowed: tuple[str, ...] = ()
    """Names that the CA may sign for; none: all."""
    ends_soon: bool = False
    """Less than a third of the life of the server's certificate is left."""


@dataclass(frozen=True, kw_only=True)
class InitPlan:
    """What has to be created."""

    authority: bool
    widens: bool = False
    """The CA keeps its key and gets a certificate for more names."""
    server: bool
    hosts: tuple[str, ...]
    """Names for the server's certificate."""
    nkeys: tuple[str, ...]
    """Owners that get a new key."""
    api_key: bool


def folder_of(owner: str) -> str:
    """The folder of a party, or of a worker with its own key."""
    return owner.replace(".", "-", 1)


def owners(found: ExistingFiles, request: InitRequest) -> list[str]:
    """Owners of existing and requested keys: all parties, then single workers by id."""
    prefix, suffix = f"{Party.WORKER.value}-", f"/{NKEY}"
    named = {
        file[len(prefix) : -len(suffix)] for file in found.files if file.startswith(prefix) and file.endswith(suffix)
    }
    return [*map(owner_of, Party), *(owner_of(Party.WORKER, name) for name in sorted(named | set(request.workers)))]


def plan_files(request: InitRequest, found: ExistingFiles) -> InitPlan:
    """Existing files are kept unless the request says otherwise. Raises CannotCreate."""
    missing = {file for file in (AUTHORITY, AUTHORITY_KEY, SERVER, SERVER_KEY, API_KEYS) if file not in found.files}
    authority = request.force or {AUTHORITY, AUTHORITY_KEY} <= missing
    can_renew = not missing & {AUTHORITY, AUTHORITY_KEY}
    server = authority or request.renew or bool(missing & {SERVER, SERVER_KEY}) or (found.ends_soon and can_renew)
    lacking = sorted(missing & {AUTHORITY, AUTHORITY_KEY})
    if server and not authority and lacking:
        raise CannotCreate(
            f"{lacking[0]} is missing, and a certificate cannot be signed without it. Restore it, or replace all "
            "with --force; then every process needs its new files."
        )
    hosts = tuple(dict.fromkeys([*HOSTS, *request.hosts, *([] if request.force else found.names)]))
    return InitPlan(
        authority=authority,
        widens=server and not authority and bool(found.allowed) and not {*hosts} <= {*found.allowed},
        server=server,
        hosts=hosts,
        nkeys=tuple(o for o in owners(found, request) if request.force or f"{folder_of(o)}/{NKEY}" not in found.files),
        api_key=request.api_key and (request.force or API_KEYS in missing),
    )


def secure_conf(folder: str, public_keys: Mapping[str, str]) -> str:
    """nats-server's TLS, users and permissions, as a file that its main configuration includes."""
    users = "".join(_user(owner, key) for owner, key in public_keys.items())
    return (
        "# Written by `baton init`; repeat it after an upgrade to renew the permissions. This file has no secrets.\n"
        f'tls {{\n  cert_file: "{folder}/{SERVER}"\n  key_file: "{folder}/{SERVER_KEY}"\n  timeout: {TLS_S_MAX}\n}}\n'
        f"authorization {{\n  timeout: {TLS_S_MAX}\n  users: [\n{users}  ]\n}}\n"
    )


def variables(folder: str, owner: str) -> dict[str, str]:
    """Environment variables of a process of this owner."""
    own = f"{folder}/{folder_of(owner)}"
    return {"BATON_NATS_NKEY_FILE": f"{own}/{NKEY}", "BATON_NATS_CA_FILE": f"{own}/{TRUSTED}"}


def _user(owner: str, public_key: str) -> str:
    party, _, worker_id = owner.partition(".")
    block = _indented(permission_block(Party(party), worker_id).splitlines())
    return f"    # {owner}\n    {{ nkey: {public_key}, permissions: {block} }}\n"


def _indented(lines: Iterable[str]) -> str:
    return "\n    ".join(lines)
