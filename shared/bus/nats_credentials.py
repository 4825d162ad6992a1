"""Credentials for NATS: an nkey's seed, which authenticates the process, and a CA, which authenticates the server.

A seed is the private half of an Ed25519 key. NATS knows the public half, lets each connection sign a nonce, and grants
the permissions of the key's owner. The key file also names the owner: each owner's replies arrive below an inbox prefix
of its own.
"""

from __future__ import annotations

import base64
import secrets
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shared.addresses import servers_of
from shared.bus.port import BusDown
from shared.contracts.ids import is_subject_token
from shared.contracts.permissions import inbox_prefix

OWNER = "# owner: "
SEED_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class Access:
    """The settings of a process for NATS; all empty for a NATS without authentication."""

    party: str = ""
    """The owner of the key, if its file does not name one."""
    nkey_file: str = ""
    ca_file: str = ""


OPEN = Access()


@dataclass(frozen=True, kw_only=True)
class Seed:
    owner: str = ""
    """A party, or one worker as ``worker.NAME``. Empty if `baton init` did not make the key."""
    text: str = field(repr=False)

    @property
    def public_key(self) -> str:
        """What nats-server is configured with."""
        import nkeys  # imported late: processes without a key need not load it

        return str(nkeys.from_seed(bytearray(self.text.encode())).public_key.decode())

    @property
    def file_text(self) -> str:
        """The content of a key file. nats-server's own tools read it too."""
        return f"# A key for NATS. Its holder has the permissions of its owner.\n{OWNER}{self.owner}\n{self.text}\n"


def new_seed(owner: str) -> Seed:
    import nkeys

    header = bytes([nkeys.PREFIX_BYTE_SEED | nkeys.PREFIX_BYTE_USER >> 5, (nkeys.PREFIX_BYTE_USER & 31) << 3])
    raw = header + secrets.token_bytes(SEED_BYTES)
    checked = raw + int(nkeys.crc16(raw)).to_bytes(2, "little")
    return Seed(owner=owner, text=base64.b32encode(checked).decode().rstrip("="))


def read_seed(file: str | Path) -> Seed:
    """The key in a file. Raises BusDown with the correction."""
    lines = [line.strip() for line in _text(file, "the key for NATS").splitlines()]
    owners = [line.removeprefix(OWNER).strip() for line in lines if line.startswith(OWNER)]
    seeds = [line for line in lines if line and not line.startswith("#")]
    seed = Seed(owner=owners[0] if owners else "", text=seeds[0] if len(seeds) == 1 else "")
    if not _is_user_seed(seed):
        raise BusDown(f"{file} holds no nkey seed of a user: one line that begins with SU. `baton init` makes them.")
    return seed


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """An ``Access`` as options of nats-py."""

    inboxes: str
    """Prefix of the reply subjects; no other owner may subscribe below it."""
    options: dict[str, Any]


def credentials(url: str, access: Access) -> Credentials:
    """Read the files. Raises BusDown with the correction."""
    options: dict[str, Any] = {}
    first = urlsplit(servers_of(url)[0])
    owner = first.username or ""
    if access.nkey_file:
        seed = read_seed(access.nkey_file)
        options["nkeys_seed_str"] = seed.text
        owner = seed.owner or access.party
    if access.ca_file or first.scheme == "tls":
        options["tls"] = _tls_context(access.ca_file)
    is_known = all(is_subject_token(token) for token in owner.split("."))
    return Credentials(inboxes=inbox_prefix(owner) if is_known else "_INBOX", options=options)


def _tls_context(ca_file: str) -> ssl.SSLContext:
    """Trusts the CA in ``ca_file``, or the CAs of the system if it is empty."""
    if ca_file:
        _text(ca_file, "the CA of NATS")
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
    except ssl.SSLError as error:
        raise BusDown(f"{ca_file} holds no CA certificate: name the ca.pem that `baton init` made.") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _text(file: str | Path, what: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise BusDown(f"{what} cannot be read from {file}: {why}. `baton init` makes it.") from error


def _is_user_seed(seed: Seed) -> bool:
    import nkeys

    try:
        return seed.text.startswith("SU") and bool(seed.public_key)
    except (nkeys.NkeysError, ValueError):
        return False
