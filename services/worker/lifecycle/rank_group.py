"""The workers of a data parallel group on one host: they begin, drain and end together.

Their engines compute in lock step, so none can serve without the others, and an idle one does not notice that another
has died. Each worker therefore holds a connection to rank 0 for as long as it lives, and rank 0 passes on what the
others say. The kernel ends the connection of a killed process at once.

Rank 0 listens only until all have come: a worker that starts again finds no group that still ends.

A step of each takes as long as the longest. So one that had little to do while others had much would learn that its
engine is slow, and get no requests by which to learn better. All publish the speed that they have learned together.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from math import inf
from typing import Literal

import msgspec

from services.worker.engines.port import EngineDead
from services.worker.lifecycle.drain import DrainPlan
from shared.contracts.load import EngineSpeed
from shared.engine_speed.learner import combined, is_valid

log = logging.getLogger("baton.worker")

JOIN_S_MAX = 300.0
"""Time for all workers of a group to come, which their supervisors may start one after another."""
RETRY_S = 0.2
HELLO_S_MAX = 5.0
LINE_BYTES_MAX = 1024
SPEED_S = 1.0
"""How often a worker says at most how fast its engine is."""
DRAIN_SPREAD_S = 15.0
"""How much longer than its legs may take a worker waits for the others' drains."""


class Saying(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line on a connection."""

    kind: Literal["here", "all-here", "draining", "drained", "all-drained", "speed"]
    rank: int = 0
    size: int = 0
    port: int = 0
    """Where the engines find each other; in "all-here"."""
    s_max: float = 0.0
    evacuate: bool = False
    ordered: bool = False
    """Fields of the plan of a drain, in "draining"."""
    speed: EngineSpeed | None = None
    """What a rank has learned of its engine, or rank 0 of all, in "speed"."""


_decode = msgspec.json.Decoder(Saying).decode


@dataclass
class _Peer:
    rank: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    following: asyncio.Task[None] | None = None

    def say(self, saying: Saying) -> None:
        if not self.writer.is_closing():
            self.writer.write(msgspec.json.encode(saying) + b"\n")


@dataclass(frozen=True, kw_only=True)
class Place:
    """A worker's place in its group."""

    name: str
    scope: str
    """Both together are equal for the group's workers, and for no others of this user on the host."""
    rank: int
    size: int
    port: int
    """TCP port for the engines, if this is rank 0: it tells the others."""

    @property
    def address(self) -> str:
        """Name of a Unix socket without a file, which is gone with its process."""
        digest = hashlib.blake2b(f"{self.scope}\0{self.name}".encode(), digest_size=16).hexdigest()
        return f"\0baton-group-{os.getuid()}-{digest}"


@dataclass
class RankGroup:
    """A group of which all workers are there. ``lost`` gets the reason when one of them has ended."""

    place: Place
    port: int
    _peers: list[_Peer]
    """All others for rank 0, and rank 0 for them."""
    lost: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    drain_wanted: asyncio.Future[DrainPlan] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The drain of another worker, which this one has to follow."""
    _drained: set[int] = field(default_factory=set)
    _all_drained: asyncio.Event = field(default_factory=asyncio.Event)
    _speeds: dict[int, EngineSpeed] = field(default_factory=dict)
    """What each rank has learned; only rank 0 knows it."""
    _shared: EngineSpeed | None = None
    """What all have learned together."""
    _spoken_at: float = -inf

    @property
    def text(self) -> str:
        """For operators."""
        return f"rank {self.place.rank} of {self.place.size} of the data parallel group {self.place.name}"

    def follow(self) -> None:
        """Hear the others from now on."""
        for peer in self._peers:
            peer.following = asyncio.get_running_loop().create_task(self._follow(peer), name=f"rank-{peer.rank}")

    def begin_drain(self, plan: DrainPlan) -> None:
        """Tell the others, who then drain as well."""
        if self.drain_wanted.done():  # They know.
            return
        self._hear(
            Saying("draining", self.place.rank, s_max=plan.s_max, evacuate=plan.evacuate, ordered=plan.ordered), None
        )

    def speed(self, own: EngineSpeed | None) -> EngineSpeed | None:
        """The speed of the group's engines. ``own``: what this worker has learned; it says so once a second at most."""
        now = asyncio.get_running_loop().time()
        if own is not None and now >= self._spoken_at + SPEED_S:
            self._spoken_at = now
            if self.place.rank == 0:
                self._speeds[0] = own
                own = self._shared = combined(list(self._speeds.values()))
            self._hear(Saying("speed", self.place.rank, speed=own), None)
        return self._shared or own

    async def end_drain(self, plan: DrainPlan) -> None:
        """Call when this worker has no legs any more: wait for the others, whose engines need this one's."""
        self._hear(Saying("drained", self.place.rank), None)
        try:
            await asyncio.wait_for(self._all_drained.wait(), plan.s_max + DRAIN_SPREAD_S)
        except TimeoutError:
            log.warning(
                "other ranks of the data parallel group %s still drain; they end with this one", self.place.name
            )

    def close(self) -> None:
        for peer in self._peers:
            if peer.following is not None:
                peer.following.cancel()
            peer.writer.close()

    async def _follow(self, peer: _Peer) -> None:
        with contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
            while line := await peer.reader.readline():
                self._hear(_decode(line), peer)
        if not (self._all_drained.is_set() or self.lost.done()):
            self.lost.set_result(f"rank {peer.rank} of its data parallel group {self.place.name} has ended")

    def _hear(self, saying: Saying, source: _Peer | None) -> None:
        """``source`` is None for what this worker says. Rank 0 passes everything on."""
        if saying.kind == "speed" and source is not None:
            if saying.speed is not None and is_valid(saying.speed):
                self._learned(source.rank, saying.speed)
            return
        for peer in self._peers:
            if peer is not source and (self.place.rank == 0 or source is None):
                peer.say(saying)
        if saying.kind == "draining" and source is not None and not self.drain_wanted.done():
            plan = DrainPlan(s_max=saying.s_max, evacuate=saying.evacuate, ordered=saying.ordered)
            self.drain_wanted.set_result(plan)
        elif saying.kind == "drained" and self.place.rank == 0:
            self._drained.add(saying.rank if source is None else source.rank)
            if len(self._drained) == self.place.size:
                self._hear(Saying("all-drained"), None)
                self._all_drained.set()
        elif saying.kind == "all-drained" and self.place.rank:
            self._all_drained.set()

    def _learned(self, rank: int, speed: EngineSpeed) -> None:
        if self.place.rank == 0:
            self._speeds[rank] = speed
        else:
            self._shared = speed


async def join(place: Place, report: Callable[[str], None], s_max: float = JOIN_S_MAX) -> RankGroup:
    """Wait until all workers of the group are there. ``report`` gets what it waits for. Raises EngineDead."""
    try:
        async with asyncio.timeout(s_max):
            group = await (_gather(place, report) if place.rank == 0 else _reach(place, report))
    except TimeoutError:
        raise EngineDead(
            f"the other workers of the data parallel group {place.name} did not come within {s_max:.0f} s: start "
            f"{place.size} workers with its name, the ranks 0 to {place.size - 1} and the same user and state folder"
        ) from None
    group.follow()
    return group


async def _gather(place: Place, report: Callable[[str], None]) -> RankGroup:
    """Rank 0."""
    peers: dict[int, _Peer] = {}
    changed = asyncio.Event()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HELLO_S_MAX):
                said = _decode(await reader.readline())
        except (OSError, ValueError, TimeoutError, msgspec.DecodeError):
            writer.close()
            return
        known = peers.get(said.rank)
        is_free = known is None or known.reader.at_eof()
        if _is_own(writer) and said.size == place.size and 0 < said.rank < place.size and is_free:
            peers[said.rank] = _Peer(said.rank, reader, writer)
            changed.set()
        else:
            log.warning("a worker that is no other rank of %s came: rank %d of %d", place.name, said.rank, said.size)
            writer.close()

    server = await _listen(place.address, greet)
    try:
        while (here := 1 + sum(not peer.reader.at_eof() for peer in peers.values())) < place.size:
            report(f"waiting for its data parallel group {place.name}: {here} of {place.size} workers are here")
            changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), HELLO_S_MAX)
    finally:
        server.close()
    for peer in peers.values():
        peer.say(Saying("all-here", port=place.port))
    return RankGroup(place, place.port, list(peers.values()))


async def _listen(
    address: str, greet: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> asyncio.Server:
    while True:
        try:
            return await asyncio.start_unix_server(greet, address, limit=LINE_BYTES_MAX)
        except OSError:  # A worker of the same place has not ended yet.
            await asyncio.sleep(RETRY_S)


async def _reach(place: Place, report: Callable[[str], None]) -> RankGroup:
    """The other ranks."""
    report(f"waiting for rank 0 of its data parallel group {place.name}")
    while True:
        with contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
            reader, writer = await asyncio.open_unix_connection(sock=_connected(place.address), limit=LINE_BYTES_MAX)
            peer = _Peer(0, reader, writer)
            try:
                if _is_own(writer):
                    peer.say(Saying("here", place.rank, place.size))
                    if line := await reader.readline():
                        return RankGroup(place, _decode(line).port, [peer])
            except BaseException:
                writer.close()
                raise
            writer.close()
        await asyncio.sleep(RETRY_S)


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
    """Whether the other side runs as this process's user."""
    connection = writer.get_extra_info("socket")
    size = struct.calcsize("3i")
    _pid, uid, _gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(uid == os.getuid())
