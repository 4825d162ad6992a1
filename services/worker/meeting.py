"""The parts of one engine, or of one data parallel group, meet and hold a connection for as long as they live.

Part 0 listens until all others have come, so that one that starts again finds nothing that still ends. It checks that
all have the same settings, and says where their ranks meet. The end of a connection is the end of all parts: nothing
else would tell, since an idle rank waits for its next step for ever, and a step for a rank that is gone for minutes.

On one host the connection is a Unix socket, which only processes of the same user may use, and the kernel ends it with
its process. Between hosts it is TCP, neither encrypted nor authenticated, with probes that end it when the other host
is silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from services.worker.engines.port import EngineRefused
from services.worker.settings import Settings
from shared.contracts.workers import Role

log = logging.getLogger("baton.worker")

OF_ONE_PART = frozenset(
    {"asleep", "cpu_cores", "data_parallel_rank", "drain_s_max", "kv_host", "node", "role", "stay_drained", "worker_id"}
)
"""Settings that may differ. All nodes have the worker's role, which may change."""
HOSTS_S_MAX = 1800.0
"""Time for parts on other hosts to come."""
HELLO_S_MAX = 10.0
CONNECT_S_MAX = 5.0
RETRY_S, REFUSED_S = 0.2, 2.0
"""Pauses before a part tries again to reach part 0: while nothing listens, and after a refusal."""
SILENT_S, PROBE_S, PROBES = 2, 1, 4
"""A connection between hosts on which nothing comes is probed, and is broken when no probe is answered."""
LINE_BYTES_MAX = 1 << 16
DIGEST_BYTES = 8


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A further part has come."""

    number: int
    settings: dict[str, str]
    """What ``shared_settings`` returns there."""


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All parts have come, or this one is not welcome."""

    port: int = 0
    """The ranks meet here, at the address of part 0."""
    epoch: int = 0
    role: Role = Role.BOTH
    refusal: str = ""
    is_final: bool = False
    """Whether the refusal would be the same the next time."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One part's place among all."""

    number: int
    size: int
    address: str | tuple[str, int]
    """Name of a Unix socket without a file, or address and port."""
    part: str
    """What a part is: node or rank."""
    whole: str
    """What all are together, for operators."""
    settings: dict[str, str]

    def differing(self, theirs: dict[str, str]) -> list[str]:
        """Names of the settings that are not the same there."""
        own = self.settings
        return sorted(
            f"WORKER_{name.upper()}" for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name)
        )


def shared_settings(settings: Settings) -> dict[str, str]:
    """Digests of the settings that all parts must have in common: the connection may not be encrypted."""
    return {
        name: hashlib.blake2b(str(value).encode(), digest_size=DIGEST_BYTES).hexdigest()
        for name, value in msgspec.structs.asdict(settings).items()
        if name not in OF_ONE_PART
    }


def local_name(scope: str, name: str) -> str:
    """Name of a Unix socket without a file, which is gone with its process: one for each user, scope and name."""
    digest = hashlib.blake2b(f"{scope}\0{name}".encode(), digest_size=16).hexdigest()
    return f"\0baton-group-{os.getuid()}-{digest}"


@dataclass
class Connection:
    """To another part."""

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def has_ended(self) -> bool:
        """Whether it is known to have: nothing that was said is still to be read."""
        return self.reader.at_eof() or self.reader.exception() is not None

    def say(self, message: msgspec.Struct) -> None:
        if not self.writer.is_closing():
            self.writer.write(msgspec.json.encode(message) + b"\n")

    def close(self) -> None:
        self.writer.close()


class Gathering:
    """Part 0 waits for the others."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._here: dict[int, Connection] = {}
        self._changed = asyncio.Event()

    async def all(self, welcome: Welcome, report: Callable[[str], None]) -> list[Connection]:
        """Returns when all have come. ``report`` gets what it waits for. Raises EngineRefused."""
        server = await self._listen()
        try:
            while missing := self.missing():
                report(f"waiting for {self._place.whole}: {self._place.size - len(missing)} of {self._place.size} here")
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), HELLO_S_MAX)
        except BaseException:
            for connection in self._here.values():
                connection.close()
            raise
        finally:
            server.close()
        for connection in self._here.values():
            connection.say(welcome)
        return list(self._here.values())

    def missing(self) -> list[int]:
        """Numbers of the parts that have not come, or have ended again."""
        ended = [number for number, connection in self._here.items() if connection.has_ended]
        for number in ended:
            self._here.pop(number).close()
        return [number for number in range(1, self._place.size) if number not in self._here]

    async def _listen(self) -> asyncio.Server:
        address = self._place.address
        while True:
            try:
                if isinstance(address, str):
                    return await asyncio.start_unix_server(self._greet, address, limit=LINE_BYTES_MAX)
                return await asyncio.start_server(self._greet, *address, limit=LINE_BYTES_MAX)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    where = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
                    raise EngineRefused(f"WORKER_HEAD_ADDRESS={where}: cannot listen there: {error}") from error
            await asyncio.sleep(RETRY_S)  # A process of the same place has not ended yet.

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place = self._place
        try:
            if not _is_own(writer):
                raise PermissionError("it is another user's")
            _keep_alive(writer)
            async with asyncio.timeout(HELLO_S_MAX):
                hello = msgspec.json.decode(await reader.readline(), type=Hello)
        except (OSError, TimeoutError, ValueError, msgspec.MsgspecError) as error:
            log.warning("a connection for %s was no part of it: %s", place.whole, error or type(error).__name__)
            writer.close()
            return
        connection = Connection(hello.number, reader, writer)
        if refusal := self._refusal(hello):
            log.warning("%s %d may not take part: %s", place.part, hello.number, refusal.refusal)
            connection.say(refusal)
            connection.close()
            return
        log.info("%s %d of %s has come", place.part, hello.number, place.whole)
        self._here[hello.number] = connection
        self._changed.set()

    def _refusal(self, hello: Hello) -> Welcome | None:
        place = self._place
        if differing := ", ".join(place.differing(hello.settings)):
            why = f"{differing}: all parts of {place.whole} need the same, but {place.part} {hello.number} has another"
            # Another version of Baton has other settings. That host may be about to be upgraded.
            is_final = place.settings.keys() == hello.settings.keys()
            return Welcome(refusal=f"{why} than {place.part} 0", is_final=is_final)
        if not 1 <= hello.number < place.size:
            why = f"there is no {place.part} {hello.number}: write 1 to {place.size - 1}"
            return Welcome(refusal=why, is_final=True)
        if hello.number not in self.missing():
            return Welcome(refusal=f"{place.part} {hello.number} is here already")
        return None


async def reach(place: Place) -> tuple[Connection, Welcome]:
    """Meet part 0, as soon as it listens: returns when all have come. Raises EngineRefused where this part never can
    take part.
    """
    while True:
        is_refused = False
        try:
            answer = await _reach_once(place)
            is_refused = True
        except (OSError, TimeoutError, ValueError, msgspec.MsgspecError) as error:
            answer = f"nothing listens there: {error or type(error).__name__}"
        if not isinstance(answer, str):
            return answer
        log.debug("%s %d waits for %s: %s", place.part, place.number, place.whole, answer)
        await asyncio.sleep(REFUSED_S if is_refused else RETRY_S)


async def _reach_once(place: Place) -> tuple[Connection, Welcome] | str:
    async with asyncio.timeout(CONNECT_S_MAX):
        if isinstance(place.address, str):
            sock = _connected(place.address)
            reader, writer = await asyncio.open_unix_connection(sock=sock, limit=LINE_BYTES_MAX)
        else:
            reader, writer = await asyncio.open_connection(*place.address, limit=LINE_BYTES_MAX)
    connection = Connection(0, reader, writer)
    try:
        if not _is_own(writer):
            connection.close()
            return "it is another user's"
        _keep_alive(writer)
        connection.say(Hello(place.number, place.settings))
        line = await reader.readline()
        welcome = msgspec.json.decode(line, type=Welcome) if line else Welcome(refusal="it has ended")
    except BaseException:
        connection.close()
        raise
    if not welcome.refusal:
        return connection, welcome
    connection.close()
    if welcome.is_final:
        raise EngineRefused(welcome.refusal)
    return welcome.refusal


def _connected(address: str) -> socket.socket:
    """Uvloop itself cannot connect to a socket without a file. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.setblocking(False)
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def _is_own(writer: asyncio.StreamWriter) -> bool:
    """Whether the other side of a Unix socket runs as this process's user. Of another host nothing is known."""
    connection: socket.socket = writer.get_extra_info("socket")
    if connection.family != socket.AF_UNIX:
        return True
    size = struct.calcsize("3i")
    _pid, uid, _gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(uid == os.getuid())


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """End a connection when the other host is silent, also while this one has something to send."""
    sock: socket.socket = writer.get_extra_info("socket")
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (SILENT_S + PROBE_S * PROBES))
