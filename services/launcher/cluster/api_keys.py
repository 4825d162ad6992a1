"""Entries of the routers' API key file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from shared.contracts.api_keys import Key, new_salt

OWNER_ONLY = 0o600

TENANT = re.compile(r"[A-Za-z0-9_-]{1,128}")


class CannotAdd(Exception):
    """The key was not added, and the file is unchanged; the message says what to do."""


def entry_text(entry: Key) -> str:
    """The entry as TOML. Raises CannotAdd for text that no file can hold."""
    try:
        return f"[[key]]\n{msgspec.toml.encode(entry, order='deterministic').decode()}"
    except UnicodeEncodeError as error:
        raise CannotAdd(f"{error.object!r} is not valid Unicode text, so it cannot be stored: leave it out") from error


def salt_text(salt: str) -> str:
    """The first lines of a key file."""
    return (
        f'# The tenants\' cache salts derive from this value: it must be the same for all routers.\nsalt = "{salt}"\n'
    )


def add_entry(file: Path, entry: Key) -> None:
    """Add an entry and keep all others, with the operator's comments. The file is replaced atomically, so that a reader
    sees the old keys or the new ones; a new file is for its owner only. Raises CannotAdd, OSError.
    """
    file = file.resolve()  # A link stays a link.
    if file.exists() and not file.is_file():  # Replacing /dev/null, as root, would take it from the whole machine.
        raise CannotAdd("it is no regular file")
    with _locked(file.parent):
        _replace(file, _with_entry(_text_of(file), entry))


def _replace(file: Path, text: str) -> None:
    draft = file.with_name(f"{file.name}.new")
    draft.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY), "wb") as opened:
            _copy_access(file, opened.fileno())
            opened.write(text.encode())
            opened.flush()
            os.fsync(opened.fileno())
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


def _with_entry(before: str, entry: Key) -> str:
    """The file's new text, read back: it holds exactly the old keys and the new one. Raises CannotAdd."""
    old = _parsed(before, "it is not valid TOML, so routers cannot read it either: correct it first")
    if entry.name and entry.name in {key.get("name") for key in old.get("key", []) if isinstance(key, dict)}:
        raise CannotAdd(f"another key in it has the name {entry.name}: choose another one, or delete that key first")
    top = before if before.strip() else salt_text(new_salt())
    text = f"{top.rstrip()}\n\n{entry_text(entry)}"
    new = _parsed(text, "an entry cannot be appended to it: write its keys as [[key]] tables")
    expected = {
        **old,
        "key": [*old.get("key", []), msgspec.json.decode(msgspec.json.encode(entry, order="deterministic"))],
    }
    if {**new, "salt": ""} != {**expected, "salt": ""} or ("salt" in old and new["salt"] != old["salt"]):
        raise CannotAdd("the file with the new key reads back differently, so it was not written")
    return text


def _parsed(text: str, wrong: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CannotAdd(f"{wrong} ({error})") from error


def _text_of(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        raise CannotAdd("it is not UTF-8 text, so routers cannot read it either: correct it first") from error


def _copy_access(file: Path, descriptor: int) -> None:
    """Who could read the old file can read the new one: routers may run as another user. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        found = file.stat()
        os.fchown(descriptor, found.st_uid, found.st_gid)
        os.fchmod(descriptor, found.st_mode & 0o777)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One writer at a time: of two commands, the later would drop the earlier one's key. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
