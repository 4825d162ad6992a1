"""Creates a cluster's keys and certificates on disk, readable by their owner only."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from services.launcher.cluster.api_keys import add_entry
from services.launcher.cluster.certificates import (
    CertificateFacts,
    KeyPair,
    NoCertificate,
    facts_of,
    is_signed_by,
    new_authority,
    new_server,
)
from services.launcher.cluster.folder import (
    API_KEYS,
    AUTHORITY,
    AUTHORITY_KEY,
    NKEY,
    SECURE,
    SERVER,
    SERVER_KEY,
    TRUSTED,
    CannotCreate,
    ExistingFiles,
    InitPlan,
    InitRequest,
    folder_of,
    owners,
    plan_files,
    secure_conf,
)
from shared.bus.nats_credentials import new_seed, read_seed
from shared.contracts.api_keys import Key, Permission, digest_of, new_key

OWNER_ONLY = 0o600
FOLDER_MODE = 0o700
ADMIN = "admin"
"""Tenant of the first API key."""


@dataclass(kw_only=True)
class InitResult:
    """What `baton init` created."""

    plan: InitPlan
    owners: list[str]
    server: CertificateFacts
    authority: CertificateFacts
    is_trusted: bool
    """Whether the cluster's CA signed the server's certificate."""
    api_key: str = field(default="", repr=False)
    """A new key, which is shown once and stored nowhere."""


def existing_files(folder: Path, now: datetime) -> ExistingFiles:
    """Raises NoCertificate."""
    files = frozenset(str(file.relative_to(folder)) for file in folder.glob("*/*") if file.is_file())
    server, authority = (_facts(folder, file) if file in files else None for file in (SERVER, AUTHORITY))
    return ExistingFiles(
        files=files,
        names=server.names if server else (),
        allowed=authority.allowed if authority else (),
        ends_soon=server is not None and server.ends_at - now < (server.ends_at - server.begins_at) / 3,
    )


def _facts(folder: Path, file: str) -> CertificateFacts:
    try:
        return facts_of((folder / file).read_bytes())
    except NoCertificate as error:
        raise NoCertificate(f"{file}: {error}") from error


def create(folder: Path, request: InitRequest, now: datetime) -> InitResult:
    """Create missing files. Raises CannotCreate, NoCertificate, BusDown for a key that cannot be read, OSError."""
    found = existing_files(folder, now)
    plan = plan_files(request, found)
    # By default the parent is the state folder, which has logs and NATS's storage, too.
    folder.parent.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
    folder.mkdir(exist_ok=True, mode=FOLDER_MODE)
    if plan.authority or plan.widens:
        _create_authority(folder, plan, found, now)
    if plan.server:
        _create_server(folder, plan, now)
    for owner in plan.nkeys:
        write_private(folder / folder_of(owner) / NKEY, new_seed(owner).file_text.encode())
    everyone = owners(found, request)
    authority = (folder / AUTHORITY).read_bytes()
    public_keys = {owner: read_seed(folder / folder_of(owner) / NKEY).public_key for owner in everyone}
    for owner in everyone:
        write_private(folder / folder_of(owner) / TRUSTED, authority)
    write_private(folder / SECURE, secure_conf(str(folder), public_keys).encode())
    server = (folder / SERVER).read_bytes()
    return InitResult(
        plan=plan,
        owners=everyone,
        server=facts_of(server),
        authority=facts_of(authority),
        is_trusted=is_signed_by(server, authority),
        api_key=_create_api_key(folder) if plan.api_key else "",
    )


def create_for(folder: Path, host: str, request: InitRequest, now: datetime) -> InitResult:
    """As ``create``; NATS's certificate names ``host`` afterwards, and is renewed if it did not."""
    found = existing_files(folder, now)
    renews = SERVER in found.files and host not in found.names
    return create(folder, replace(request, hosts=(*request.hosts, host), renew=request.renew or renews), now)


def _create_server(folder: Path, plan: InitPlan, now: datetime) -> None:
    authority = KeyPair(certificate=(folder / AUTHORITY).read_bytes(), key=(folder / AUTHORITY_KEY).read_bytes())
    try:
        made = new_server(authority, plan.hosts, now)
    except ValueError as error:
        raise _unnamable(plan, error) from error
    _write_pair(folder, (SERVER, SERVER_KEY), made)


def _create_authority(folder: Path, plan: InitPlan, found: ExistingFiles, now: datetime) -> None:
    key = (folder / AUTHORITY_KEY).read_bytes() if plan.widens else b""
    hosts = list(dict.fromkeys([*(found.allowed if plan.widens else ()), *plan.hosts]))
    try:
        made = new_authority(hosts, now, key)
    except ValueError as error:
        raise _unnamable(plan, error) from error
    _write_pair(folder, (AUTHORITY, AUTHORITY_KEY), made)


def _unnamable(plan: InitPlan, error: ValueError) -> CannotCreate:
    return CannotCreate(f"{', '.join(plan.hosts)}: a certificate cannot name one of these: {error}")


def _create_api_key(folder: Path) -> str:
    file = folder / API_KEYS
    file.unlink(missing_ok=True)
    key = new_key()
    permissions = frozenset({Permission.ADMIN, Permission.FORCE_PLACEMENT, Permission.INFER})
    file.parent.mkdir(exist_ok=True, mode=FOLDER_MODE)
    add_entry(file, Key(tenant=ADMIN, sha256=digest_of(key), note="baton init", permissions=permissions))
    return key


def _write_pair(folder: Path, files: tuple[str, str], pair: KeyPair) -> None:
    """The key first: if the second write fails, no certificate without a key is left."""
    certificate, key = files
    write_private(folder / key, pair.key)
    write_private(folder / certificate, pair.certificate)


def write_private(file: Path, data: bytes) -> None:
    """Atomic, and never readable by other users, not even for a moment."""
    file.parent.mkdir(exist_ok=True, mode=FOLDER_MODE)
    draft = file.with_suffix(f"{file.suffix}.new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY), "wb") as opened:
        opened.write(data)
    draft.replace(file)
