"""How a process shows NATS who it is, and how it knows that NATS is NATS: an nkey's seed and a CA, each in a file.

A seed is the private half of an Ed25519 key. NATS knows the public half, has each connection sign a number that it made
up, and grants the permissions of that key's owner. Who the owner is stands in the file too, for answers arrive below a
prefix of the owner's own.
"""

from __future__ import annotations

import base64
import secrets
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shared.bus.port import BusDown
from shared.contracts.ids import is_subject_token
from shared.contracts.permissions import inbox_prefix

OWNER = "# owner: "
SEED_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class Access:
    """What a process was given for NATS; nothing where NATS asks for nothing, as on one machine."""

    party: str = ""
    """Who it is, if its key does not say that itself."""
    nkey_file: str = ""
    ca_file: str = ""


OPEN = Access()


@dataclass(frozen=True, kw_only=True)
class Seed:
    """An nkey."""

    owner: str = ""
    """A party, or one worker as ``worker.NAME``; empty for a key that was not made by `baton init`."""
    text: str = field(repr=False)

    @property
    def public_key(self) -> str:
        """What nats-server knows it by."""
        import nkeys  # here and below, so that nobody pays for it who has no key

        return str(nkeys.from_seed(bytearray(self.text.encode())).public_key.decode())

    @property
    def file_text(self) -> str:
        """As it is kept. nats-server's own tools read such files too."""
        return f"# A key for NATS. Who has it may do what its owner may.\n{OWNER}{self.owner}\n{self.text}\n"


def new_seed(owner: str) -> Seed:
    """A key that nobody has yet."""
    import nkeys

    header = bytes([nkeys.PREFIX_BYTE_SEED | nkeys.PREFIX_BYTE_USER >> 5, (nkeys.PREFIX_BYTE_USER & 31) << 3])
    raw = header + secrets.token_bytes(SEED_BYTES)
    checked = raw + int(nkeys.crc16(raw)).to_bytes(2, "little")
    return Seed(owner=owner, text=base64.b32encode(checked).decode().rstrip("="))


def read_seed(file: str | Path) -> Seed:
    """The key in a file. Raises BusDown with what to do."""
    lines = [line.strip() for line in _text(file, "the key for NATS").splitlines()]
    owners = [line.removeprefix(OWNER).strip() for line in lines if line.startswith(OWNER)]
    seeds = [line for line in lines if line and not line.startswith("#")]
    seed = Seed(owner=owners[0] if owners else "", text=seeds[0] if len(seeds) == 1 else "")
    if not _is_user_seed(seed):
        raise BusDown(f"{file} holds no nkey seed of a user: one line that begins with SU. `baton init` makes them.")
    return seed


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """An ``Access`` as nats-py takes it."""

    inboxes: str
    """Below which answers arrive: each owner has a prefix of its own, which no other may listen to."""
    options: dict[str, Any]


def credentials(url: str, access: Access) -> Credentials:
    """Read what there is to read. Raises BusDown with what to do."""
    options: dict[str, Any] = {}
    owner = urlsplit(url).username or ""
    if access.nkey_file:
        seed = read_seed(access.nkey_file)
        options["nkeys_seed_str"] = seed.text
        owner = seed.owner or access.party
    if access.ca_file or urlsplit(url).scheme == "tls":
        options["tls"] = _trusting(access.ca_file)
    is_known = all(is_subject_token(token) for token in owner.split("."))
    return Credentials(inboxes=inbox_prefix(owner) if is_known else "_INBOX", options=options)


def _trusting(ca_file: str) -> ssl.SSLContext:
    """TLS with a server whose certificate that CA signed; none is named: one of the system's CAs."""
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
