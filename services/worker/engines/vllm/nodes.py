"""Keeps the parts of an engine together whose ranks run on several hosts.

The worker runs on the first host. On each further host another process has that host's ranks only (``follower``).
It connects to the worker, which checks that both have the same settings and says where the ranks meet.
The connection stays open while the engine lives, and carries nothing more: when it breaks, both ends end their part of
the engine. Nothing else would tell: an idle rank waits for its next step for ever, and a step for a rank that is gone
for minutes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Self, TypeVar

import msgspec

from services.worker.engines.port import EngineDead, EngineRefused
from services.worker.settings import Settings
from shared.contracts.ids import Epoch
from shared.contracts.workers import Role

T = TypeVar("T")
log = logging.getLogger("baton.worker")

OF_ONE_HOST = frozenset({"asleep", "cpu_cores", "drain_s_max", "kv_host", "node", "role", "stay_drained", "worker_id"})
"""Settings that may differ between the hosts of an engine. All have the worker's role, which may change."""
GATHER_S_MAX = 1800.0
"""Maximum wait of a worker for its engine's further hosts."""
HELLO_S_MAX = 10.0
CONNECT_S_MAX = 5.0
SILENT_S, PROBE_S, PROBES = 2, 1, 4
"""A connection on which nothing comes is probed, and is broken when no probe is answered."""
LINE_BYTES_MAX = 1 << 16
DIGEST_BYTES = 8


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A further host has come."""

    node: int
    settings: dict[str, str]
    """What ``shared_settings`` returns there."""


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All hosts have come, or this one is not welcome."""

    epoch: int = 0
    port: int = 0
    """The ranks meet here, at the worker's address."""
    role: Role = Role.BOTH
    refusal: str = ""
    is_final: bool = False
    """Whether the refusal would be the same the next time."""


def shared_settings(settings: Settings) -> dict[str, str]:
    """Digests of the settings that all hosts of an engine must have in common: the connection is not encrypted."""
    fields = msgspec.structs.asdict(settings)
    return {
        name: blake2b(str(value).encode(), digest_size=DIGEST_BYTES).hexdigest()
        for name, value in fields.items()
        if name not in OF_ONE_HOST
    }


class Followers:
    """The connections of a worker to its engine's further hosts."""

    def __init__(self, settings: Settings, epoch: Epoch, port: int) -> None:
        self._settings = settings
        self._welcome = Welcome(epoch=epoch, port=port, role=settings.role)
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._all_came = asyncio.Event()
        self._server: asyncio.Server
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the engine cannot go on, once a host is gone."""

    @classmethod
    async def gather(cls, settings: Settings, epoch: Epoch, port: int, report: Callable[[str], None]) -> Self:
        """Wait until all further hosts have come. Raises EngineRefused."""
        followers, (host, own_port) = cls(settings, epoch, port), settings.meeting
        try:
            followers._server = await asyncio.start_server(followers._on_hello, host, own_port, limit=LINE_BYTES_MAX)
        except OSError as error:
            raise EngineRefused(f"WORKER_HEAD_ADDRESS={settings.head_address}: cannot listen there: {error}") from error
        missing = "1 further host" if settings.nodes == 2 else f"{settings.nodes - 1} further hosts"
        report(f"waiting for {missing} at {settings.head_address}")
        try:
            async with asyncio.timeout(GATHER_S_MAX):
                await followers._all_came.wait()
            for writer in followers._writers.values():
                _send(writer, followers._welcome)
        except TimeoutError:
            node = min(set(range(1, settings.nodes)) - followers._writers.keys())
            await followers.close()
            raise EngineRefused(
                f"node {node} of {settings.nodes} has not come to {settings.head_address}: on its host, start a "
                f"worker with the same settings and WORKER_NODE={node}"
            ) from None
        except BaseException:
            await followers.close()
            raise
        return followers

    async def unless_lost(self, starting: Coroutine[Any, Any, T]) -> T:
        """What the engine's start returns. Raises EngineDead when a host is gone before: the start would not end."""
        task = asyncio.ensure_future(starting)
        try:
            either: list[asyncio.Future[Any]] = [task, self.lost]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EngineDead(self.lost.result())
            return task.result()
        finally:
            task.cancel()

    def on_lost(self, listener: Callable[[str], None]) -> None:
        """Call it when a host is gone; at once if one is."""
        self.lost.add_done_callback(lambda lost: None if lost.cancelled() else listener(lost.result()))

    async def close(self) -> None:
        """Disconnect: the other hosts end their ranks."""
        self.lost.cancel()
        self._server.close()
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _on_hello(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        node = 0
        try:
            keep_alive(writer)
            async with asyncio.timeout(HELLO_S_MAX):
                hello = msgspec.json.decode(await reader.readline(), type=Hello)
            if refusal := self._refusal(hello):
                _send(writer, refusal)
                return
            node = hello.node
            self._writers[node] = writer
            log.info("node %d of %d has come", node, self._settings.nodes)
            if len(self._writers) == self._settings.nodes - 1:
                self._all_came.set()
            await reader.read(1)  # Nothing comes any more: it returns when the connection ends.
        except (OSError, TimeoutError, ValueError, msgspec.MsgspecError) as error:
            log.warning("a connection to %s ended: %s", self._settings.head_address, error or type(error).__name__)
        finally:
            self._serving.discard(task)
            writer.close()
            if node:
                self._gone(node)

    def _refusal(self, hello: Hello) -> Welcome | None:
        own = shared_settings(self._settings)
        differing = sorted(
            name for name in own.keys() | hello.settings.keys() if own.get(name) != hello.settings.get(name)
        )
        if differing:
            names = ", ".join(f"WORKER_{name.upper()}" for name in differing)
            why = f"{names}: all hosts of an engine need the same, but node {hello.node} has another than the worker"
            return Welcome(refusal=why, is_final=True)
        if not 1 <= hello.node < self._settings.nodes:
            return Welcome(
                refusal=f"there is no node {hello.node}: write 1 to {self._settings.nodes - 1}", is_final=True
            )
        if hello.node in self._writers or self._all_came.is_set():
            return Welcome(refusal=f"node {hello.node} is here already, or the engine is about to end")
        return None

    def _gone(self, node: int) -> None:
        del self._writers[node]
        if self._all_came.is_set() and not self.lost.done():
            self.lost.set_result(f"node {node} of the engine is gone: its process ended or the network failed")


class Membership:
    """The connection of a further host to the worker of its engine."""

    def __init__(self, welcome: Welcome, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.epoch = Epoch(welcome.epoch)
        self.port = welcome.port
        self.role = welcome.role
        self._reader = reader
        self._writer = writer

    async def until_lost(self) -> None:
        """Returns when the worker has ended or is unreachable."""
        with suppress(OSError):
            await self._reader.read(1)

    def close(self) -> None:
        self._writer.close()


async def join(settings: Settings) -> Membership | str:
    """Meet the worker: returns when all hosts have come, or why this host cannot take part now. Raises EngineRefused
    where it never can, OSError while the worker does not listen.
    """
    host, port = settings.meeting
    async with asyncio.timeout(CONNECT_S_MAX):
        reader, writer = await asyncio.open_connection(host, port, limit=LINE_BYTES_MAX)
    try:
        keep_alive(writer)
        _send(writer, Hello(settings.node, shared_settings(settings)))
        async with asyncio.timeout(GATHER_S_MAX):
            line = await reader.readline()
        welcome = msgspec.json.decode(line, type=Welcome) if line else Welcome(refusal="the worker has ended")
    except BaseException:
        writer.close()
        raise
    if not welcome.refusal:
        return Membership(welcome, reader, writer)
    writer.close()
    if welcome.is_final:
        raise EngineRefused(welcome.refusal)
    return welcome.refusal


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """End the connection when the other host is silent, also while this one has something to send."""
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (SILENT_S + PROBE_S * PROBES))


def _send(writer: asyncio.StreamWriter, message: Hello | Welcome) -> None:
    writer.write(msgspec.json.encode(message) + b"\n")
