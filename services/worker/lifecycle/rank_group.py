"""The workers of a data parallel group: they begin, drain and end together.

Their engines compute in lock step, so none can serve without the others, and an idle one does not notice that another
has died. Each worker therefore holds a connection to rank 0 for as long as it lives (``services.worker.meeting``), and
rank 0 passes on what the others say.

A step of each takes as long as the longest. So one that had little to do while others had much would learn that its
engine is slow, and get no requests by which to learn better. All publish the speed that they have learned together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Literal

import msgspec

from services.worker.engines.port import EngineDead
from services.worker.lifecycle.drain import DrainPlan
from services.worker.meeting import (
    HOSTS_S_MAX,
    Connection,
    Gathering,
    Place,
    Welcome,
    local_name,
    reach,
    shared_settings,
)
from services.worker.settings import Settings
from shared.contracts.load import EngineSpeed
from shared.engine_speed.learner import combined, is_valid
from shared.sockets import free_port

log = logging.getLogger("baton.worker")

LOOPBACK = "127.0.0.1"
JOIN_S_MAX = 300.0
"""Time for all workers of a group on one host, whose supervisors may start one after another."""
SPEED_S = 1.0
"""How often a worker says at most how fast its engine is."""
DRAIN_SPREAD_S = 15.0
"""How much longer than its legs may take a worker waits for the others' drains."""


class Saying(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line on a connection."""

    kind: Literal["draining", "drained", "all-drained", "speed"]
    rank: int = 0
    s_max: float = 0.0
    evacuate: bool = False
    ordered: bool = False
    """Fields of the plan of a drain, in "draining"."""
    speed: EngineSpeed | None = None
    """What a rank has learned of its engine, or rank 0 of all, in "speed"."""


_decode = msgspec.json.Decoder(Saying).decode


@dataclass
class RankGroup:
    """A group of which all workers are there. ``lost`` gets the reason when one of them has ended."""

    place: Place
    port: int
    _peers: list[Connection]
    """All others for rank 0, and rank 0 for them."""
    lost: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    drain_wanted: asyncio.Future[DrainPlan] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The drain of another worker, which this one has to follow."""
    _following: list[asyncio.Task[None]] = field(default_factory=list)
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
        return f"rank {self.place.number} of {self.place.size} of {self.place.whole}"

    def follow(self) -> None:
        """Hear the others from now on."""
        for peer in self._peers:
            task = asyncio.get_running_loop().create_task(self._follow(peer), name=f"rank-{peer.number}")
            self._following.append(task)

    def begin_drain(self, plan: DrainPlan) -> None:
        """Tell the others, who then drain as well."""
        if self.drain_wanted.done():  # They know.
            return
        self._hear(
            Saying("draining", self.place.number, s_max=plan.s_max, evacuate=plan.evacuate, ordered=plan.ordered), None
        )

    def speed(self, own: EngineSpeed | None) -> EngineSpeed | None:
        """The speed of the group's engines. ``own``: what this worker has learned; it says so once a second at most."""
        now = asyncio.get_running_loop().time()
        if own is not None and now >= self._spoken_at + SPEED_S:
            self._spoken_at = now
            if self.place.number == 0:
                self._speeds[0] = own
                own = self._shared = combined(list(self._speeds.values()))
            self._hear(Saying("speed", self.place.number, speed=own), None)
        return self._shared or own

    async def end_drain(self, plan: DrainPlan) -> None:
        """Call when this worker has no legs any more: wait for the others, whose engines need this one's."""
        self._hear(Saying("drained", self.place.number), None)
        try:
            await asyncio.wait_for(self._all_drained.wait(), plan.s_max + DRAIN_SPREAD_S)
        except TimeoutError:
            log.warning("other ranks of %s still drain; they end with this one", self.place.whole)

    def close(self) -> None:
        for task in self._following:
            task.cancel()
        for peer in self._peers:
            peer.close()

    async def _follow(self, peer: Connection) -> None:
        with contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
            while line := await peer.reader.readline():
                self._hear(_decode(line), peer)
        if not (self._all_drained.is_set() or self.lost.done()):
            self.lost.set_result(f"rank {peer.number} of {self.place.whole} has ended or cannot be reached")

    def _hear(self, saying: Saying, source: Connection | None) -> None:
        """``source`` is None for what this worker says. Rank 0 passes everything on."""
        if saying.kind == "speed" and source is not None:
            if saying.speed is not None and is_valid(saying.speed):
                self._learned(source.number, saying.speed)
            return
        for peer in self._peers:
            if peer is not source and (self.place.number == 0 or source is None):
                peer.say(saying)
        if saying.kind == "draining" and source is not None and not self.drain_wanted.done():
            plan = DrainPlan(s_max=saying.s_max, evacuate=saying.evacuate, ordered=saying.ordered)
            self.drain_wanted.set_result(plan)
        elif saying.kind == "drained" and self.place.number == 0:
            self._drained.add(saying.rank if source is None else source.number)
            if len(self._drained) == self.place.size:
                self._hear(Saying("all-drained"), None)
                self._all_drained.set()
        elif saying.kind == "all-drained" and self.place.number:
            self._all_drained.set()

    def _learned(self, rank: int, speed: EngineSpeed) -> None:
        if self.place.number == 0:
            self._speeds[rank] = speed
        else:
            self._shared = speed


async def join(place: Place, port: int, report: Callable[[str], None], s_max: float = 0.0) -> RankGroup:
    """Wait until all workers of the group are there. ``port``: TCP port for the engines, which rank 0 tells the others;
    0: rank 0 chooses a free one. ``report`` gets what it waits for. ``s_max`` 0: as long as starts may take. Raises
    EngineDead, and EngineRefused where the worker never can take part.
    """
    s_max = s_max or (JOIN_S_MAX if isinstance(place.address, str) else HOSTS_S_MAX)
    try:
        async with asyncio.timeout(s_max):
            if place.number == 0:
                port = port or free_port(LOOPBACK if isinstance(place.address, str) else place.address[0])
                peers = await Gathering(place).all(Welcome(port=port), report)
            else:
                report(f"waiting for rank 0 of {place.whole}")
                peer, welcome = await reach(place)
                peers, port = [peer], welcome.port
    except TimeoutError:
        raise EngineDead(
            f"the other workers of {place.whole} did not come within {s_max:.0f} s: start {place.size} workers with "
            f"its name, the ranks 0 to {place.size - 1} and the same user and state folder, or the same "
            "WORKER_HEAD_ADDRESS"
        ) from None
    group = RankGroup(place, port, peers)
    group.follow()
    return group


def place_of(settings: Settings, scope: str) -> Place:
    """A worker's place in its group, whose workers are on one host unless they have an address to meet at. ``scope``
    and the name of the group are equal for its workers, and for no others of this user on the host.
    """
    name = settings.data_parallel_group
    return Place(
        number=settings.data_parallel_rank,
        size=settings.data_parallel_size,
        address=settings.meeting if settings.head_address else local_name(scope, name),
        part="rank",
        whole=f"the data parallel group {name}",
        settings=shared_settings(settings),
    )
