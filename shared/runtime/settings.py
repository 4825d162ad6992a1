"""Settings are read once, at start; a wrong or misspelled variable stops the process.

``load(Settings, "ROUTER_")`` fills the field ``port`` from ``ROUTER_PORT``. An empty variable counts as not set:
compose files pass unset variables on as empty ones. Only a ``FollowedFile`` may change while the process runs.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, Literal, TypeVar

import msgspec

from shared.bus.nats_credentials import Access
from shared.text.formats import choices_of

S = TypeVar("S", bound=msgspec.Struct)

COMMON_PREFIX = "BATON_"


class SettingsError(Exception):
    """A variable is wrong; the message names it and the correction."""


def _xdg(variable: str, fallback: str) -> str:
    return str(Path(os.environ.get(variable) or Path.home() / fallback) / "baton")


class CommonSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of every process, from BATON_* variables."""

    # NATS
    nats_url: str = "nats://127.0.0.1:4222"
    """URL of nats-server, or of several servers of one cluster with commas; ``tls://`` insists on TLS. Change it when
    NATS runs on another host or port.
    """
    nats_nkey_file: str = ""
    """The nkey of this process, made by `baton init`. Empty: NATS requires none. Change it when NATS requires keys."""
    nats_ca_file: str = ""
    """The CA that signed NATS's certificate; the process then insists on TLS. Empty: TLS only if NATS requires it.
    Change it when NATS has a certificate of the cluster's own CA.
    """

    # Folders
    state_dir: str = msgspec.field(default_factory=lambda: _xdg("XDG_STATE_HOME", ".local/state"))
    """Folder that survives a restart: NATS storage, files of a store, roles that workers changed to at run time, logs.
    Change it when several systems run on one machine, or the disk is another.
    """
    cache_dir: str = msgspec.field(default_factory=lambda: _xdg("XDG_CACHE_HOME", ".cache"))
    """Folder that can be deleted at any time: models, tokenizers. Change it when models lie on another disk."""

    # Media
    media_domains: str = ""
    """Hosts from which engines may fetch images, audio and video that a request names by URL, with commas:
    ``cdn.example,img.example``. Exact names, no redirects. Empty: none, media arrive in the body as ``data:`` URLs.
    Equal for routers and workers. Change it when clients name media by URL, and these hosts are trusted.
    """

    # Logs and traces
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lines of this level and above are logged. Change it when you look for a cause (debug), or lines are too many
    (warning).
    """
    log_format: Literal["json", "text"] = "text"
    """Form of the log lines: text for people, json for collectors of logs. Change it when another program reads them.
    """
    otlp_endpoint: str = ""
    """Base URL of an OTLP/HTTP receiver, such as ``http://127.0.0.1:4318``. Empty: no tracing. Change it when you have
    a receiver of traces or metrics.
    """
    trace_sample_ratio: float = 0.01
    """The share of requests that are traced, 0.0 to 1.0, unless the client's trace context decides. At a low request
    rate all are traced; slow, failed and resumed requests always are. Change it when traces are too many, or too few to
    find a rare cause.
    """

    # Debugging
    compiled: bool = True
    """Whether the router's request path runs compiled where `make setup` has compiled it; false: as Python. Change it
    when a debugger or profiler is to see it.
    """

    def nats_access(self, party: str) -> Access:
        """For a process of ``party``, if its key does not name its owner."""
        return Access(party=party, nkey_file=self.nats_nkey_file, ca_file=self.nats_ca_file)

    @property
    def media_hosts(self) -> frozenset[str]:
        """``media_domains``, each in lower case."""
        return frozenset(host.strip().lower() for host in self.media_domains.split(",") if host.strip())


def why_unusable(error: Exception) -> str:
    """For a file that a setting names. A container's process is another user than the one who wrote the file."""
    if isinstance(error, PermissionError):
        return f"user id {os.getuid()} may not read it; make it the owner (`chown {os.getuid()} FILE`)"
    return str(error)


def load(settings_type: type[S], prefix: str, environ: Mapping[str, str] | None = None) -> S:
    """The settings from variables that begin with ``prefix``. Raises SettingsError."""
    variables = os.environ if environ is None else environ
    given = {
        name[len(prefix) :].lower(): value for name, value in variables.items() if name.startswith(prefix) and value
    }
    known = [field.name for field in msgspec.structs.fields(settings_type)]
    for name in given:
        if name not in known:
            raise SettingsError(_unknown(name, known, prefix))
    try:
        return msgspec.convert(given, settings_type, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(_explain(str(error), given, prefix, settings_type)) from error


def load_common(environ: Mapping[str, str] | None = None) -> CommonSettings:
    """The settings that all processes share. Raises SettingsError."""
    return load(CommonSettings, COMMON_PREFIX, environ)


def _unknown(name: str, known: list[str], prefix: str) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    advice = f"did you mean {prefix}{close[0].upper()}?" if close else f"known: {_variables(known, prefix)}"
    return f"{prefix}{name.upper()} is not a setting; {advice}"


def _explain(error: str, given: Mapping[str, str], prefix: str, kind: type) -> str:
    if missing := re.search(r"missing required field `(\w+)`", error):
        return f"{prefix}{missing[1].upper()} is not set and has no default; set it"
    if wrong := re.search(r"(.*) - at `\$\.(\w+)", error):
        todo = "correct it"
        if wrong[1].startswith("Invalid enum value") and (choices := choices_of(kind, wrong[2])):
            todo = f"write {', '.join(choices)},"
        return f"{prefix}{wrong[2].upper()}={given.get(wrong[2], '')!r}: {wrong[1]}; {todo} or unset it"
    return f"{prefix}*: {error}"


def _variables(known: list[str], prefix: str) -> str:
    return ", ".join(f"{prefix}{name.upper()}" for name in known)


T = TypeVar("T")

CHECK_S = 2.0
"""Interval at which the file is looked at."""
REMIND_S = 60.0
"""Interval of log lines about the same failure."""

FileState = tuple[int, ...]


class FollowedFile(Generic[T]):
    """The last valid content of a file. A replaced file, a folder that was mounted anew and a file that became readable
    are seen at the next look, because what could not be read is tried again at each.
    """

    def __init__(self, path: str, read: Callable[[], T], *, what: str, log: logging.Logger) -> None:
        """``read`` reads and checks the file and raises SettingsError; ``what`` is in it, for log lines. Raises
        SettingsError when the file is invalid now.
        """
        self._path = path
        self._read = read
        self._what = what
        self._log = log
        self._seen = state_of(path)
        self.value = read()
        self.failure = ""
        """Why the file cannot be used now; empty while it can. ``value`` is the last valid content then."""

    async def follow(self, on_value: Callable[[T], None], check_s: float = CHECK_S) -> None:
        """Look until cancelled. ``on_value`` gets each new content."""
        unlogged_s = 0.0
        while True:
            await asyncio.sleep(check_s)
            unlogged_s += check_s
            state = await asyncio.to_thread(state_of, self._path)
            if state == self._seen and not self.failure:
                continue
            self._seen = state
            try:
                self.value = await asyncio.to_thread(self._read)
            except SettingsError as error:
                if str(error) != self.failure or unlogged_s >= REMIND_S:
                    self._log.error("%s are unchanged, because their file cannot be used: %s", self._what, error)
                    unlogged_s = 0.0
                self.failure = str(error)
                continue
            self.failure = ""
            self._log.info("read %s again", self._what)
            on_value(self.value)


def state_of(path: str) -> FileState:
    """Differs when the file was written, replaced, or given other permissions. Empty: it cannot be found."""
    try:
        found = Path(path).stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev
