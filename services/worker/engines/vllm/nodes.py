"""Keeps the parts of an engine together whose ranks run on several hosts.

The worker runs on the first host. On each further host another process has that host's ranks only (``follower``). Both
hold a connection (``services.worker.meeting``), which carries nothing: when it ends, both end their part of the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Self, TypeVar

from services.worker.engines.port import EngineDead, EngineRefused
from services.worker.meeting import HOSTS_S_MAX, Connection, Gathering, Place, Welcome, reach, shared_settings
from services.worker.settings import Settings
from shared.contracts.ids import Epoch

T = TypeVar("T")


def place_of(settings: Settings) -> Place:
    return Place(
        number=settings.node,
        size=settings.nodes,
        address=settings.meeting,
        part="node",
        whole=f"the engine at {settings.head_address}",
        settings=shared_settings(settings),
    )


class Followers:
    """The connections of a worker to its engine's further hosts."""

    def __init__(self, connections: list[Connection]) -> None:
        self._following = {asyncio.ensure_future(self._follow(connection)): connection for connection in connections}
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the engine cannot go on, once a host is gone."""

    @classmethod
    async def gather(cls, settings: Settings, epoch: Epoch, port: int, report: Callable[[str], None]) -> Self:
        """Wait until all further hosts have come. Raises EngineRefused."""
        gathering = Gathering(place_of(settings))
        try:
            async with asyncio.timeout(HOSTS_S_MAX):
                return cls(await gathering.all(Welcome(port=port, epoch=epoch, role=settings.role), report))
        except TimeoutError:
            node = gathering.missing()[0]
            raise EngineRefused(
                f"node {node} of {settings.nodes} has not come to {settings.head_address}: on its host, start a "
                f"worker with the same settings and WORKER_NODE={node}"
            ) from None

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
        for task, connection in self._following.items():
            task.cancel()
            connection.close()
        await asyncio.gather(*self._following, return_exceptions=True)

    async def _follow(self, connection: Connection) -> None:
        with suppress(OSError):
            await connection.reader.read(1)  # Nothing comes: it returns when the connection ends.
        if not self.lost.done():
            reason = f"node {connection.number} of the engine is gone: its process ended or the network failed"
            self.lost.set_result(reason)


class Membership:
    """The connection of a further host to the worker of its engine."""

    def __init__(self, connection: Connection, welcome: Welcome) -> None:
        self.epoch = Epoch(welcome.epoch)
        self.port = welcome.port
        self.role = welcome.role
        self._connection = connection

    async def until_lost(self) -> None:
        """Returns when the worker has ended or is unreachable."""
        with suppress(OSError):
            await self._connection.reader.read(1)

    def close(self) -> None:
        self._connection.close()


async def join(settings: Settings) -> Membership:
    """Wait for the worker and all its hosts. Raises EngineRefused where this host never can take part."""
    return Membership(*await reach(place_of(settings)))
