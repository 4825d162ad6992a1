"""The TransferAgent on NIXL.

Over shared memory whoever begins a read copies it, and two cores copy about half as fast again as one. So once a
large read from a peer was over as soon as it was begun, a second thread, with an agent of its own, copies half of each
large read from there: a second *lane*.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from connector.layout.routes import halves_of
from connector.transfer.agent import Region, Spans, TransferFailed, TransferState
from connector.transfer.nixl_read_agent import (
    COPY_S_MAX,
    MEMORY,
    ReadAgent,
    deregister,
    failing,
    make_agent,
    open_read_agent,
    register,
)

SPLIT_BYTES = 32 << 20
"""Smaller reads are over before a second thread would be awake, where engines have all cores busy."""


@dataclass(slots=True, eq=False)
class _Transfer:
    """A read. nixl's handle keeps its agent alive, so it is dropped with the connection."""

    connection: _Connection
    handle: Any = None
    """In the connection's first lane."""
    beside: Future[TransferState] | None = None
    """The second lane's half."""

    def state(self) -> TransferState:
        if self.handle is None:
            return TransferState.FAILED
        state = self.connection.first.state(self.handle)
        if self.beside is None or state is TransferState.FAILED:
            return state
        if not self.beside.done():
            return TransferState.RUNNING
        is_copied = not self.beside.exception() and self.beside.result() is TransferState.DONE
        return state if is_copied else TransferState.FAILED


@dataclass(slots=True, eq=False)
class _Connection:
    """To one peer."""

    first: ReadAgent
    metadata: bytes
    opening: Future[ReadAgent] | None = None
    """The second lane."""
    transfers: set[_Transfer] = field(default_factory=set)

    @property
    def second(self) -> ReadAgent | None:
        """That can be read with now."""
        opening = self.opening
        return opening.result() if opening is not None and opening.done() and not opening.exception() else None


class NixlAgent:
    """A TransferAgent on nixl. Its name must be unique for ever: peers keep connections by it."""

    def __init__(self, name: str, *, split_bytes: int = SPLIT_BYTES) -> None:
        self._name = name
        self._split_bytes = split_bytes
        self._agent = make_agent(name, progress=True)
        self._regions: list[Region] = []
        self._registered: list[Any] = []
        self._connections: dict[str, _Connection] = {}
        self._agent_numbers = count(1)
        self._opening = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-open-lane")
        self._beside = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="kv-second-lane", initializer=_leave, initargs=(os.sched_getaffinity(0),)
        )

    def register(self, regions: Sequence[Region]) -> None:
        """Make memory readable by others and writable by reads. Call before ``metadata``."""
        self._regions.extend(regions)
        self._registered.extend(register(self._agent, regions))

    def metadata(self) -> bytes:
        """What another agent needs to connect."""
        return bytes(self._agent.get_agent_metadata())

    def connect(self, metadata: bytes) -> str:
        """Know that agent, wire up, answer its name. Raises TransferFailed."""
        lane = self._open(metadata)
        self.forget(lane.name)
        self._connections[lane.name] = _Connection(lane, metadata)
        return lane.name

    def _open(self, metadata: bytes) -> ReadAgent:
        return open_read_agent(f"{self._name}-{next(self._agent_numbers)}", self._regions, metadata)

    def forget(self, name: str) -> None:
        """Disconnect; harmless when unknown. No byte of a read from there moves any more.

        Raises TimeoutError when the second lane is stuck.
        """
        connection = self._connections.pop(name, None)
        if connection is None:
            return
        for transfer in connection.transfers:
            if transfer.beside is not None and not transfer.beside.cancel():
                transfer.beside.exception(2 * COPY_S_MAX)
            if transfer.handle is not None:
                connection.first.release(transfer.handle)
                transfer.handle = None
        connection.transfers.clear()
        connection.first.end()
        if connection.opening is not None and not connection.opening.cancel():
            connection.opening.add_done_callback(_end_opened)

    def read(self, name: str, remote: Spans, local: Spans, *, device: str, remote_device: str) -> Any:
        """Begin to copy each remote span over the local one of the same place and length; answers a handle.

        Raises TransferFailed.
        """
        connection = self._connections.get(name)
        if connection is None:
            raise TransferFailed(f"reading: {name} is not connected")
        memories, lane = (MEMORY[remote_device], MEMORY[device]), connection.first
        is_large = int(remote[:, 1].sum()) >= self._split_bytes
        second = connection.second if is_large else None
        own, other = ((remote, local), None) if second is None else halves_of(remote, local)
        transfer = _Transfer(connection)
        connection.transfers.add(transfer)
        with failing(f"reading {len(remote)} pieces"):
            transfer.handle = lane.prepare(*own, memories)
            if second is not None and other is not None:
                transfer.beside = self._beside.submit(second.copy, *other, memories)
            lane.agent.transfer(transfer.handle)
        has_cores = len(os.sched_getaffinity(0)) > 1
        if is_large and has_cores and connection.opening is None and transfer.state() is TransferState.DONE:
            connection.opening = self._opening.submit(self._open, connection.metadata)
        return transfer

    def state(self, handle: Any) -> TransferState:
        """How far it is."""
        state: TransferState = handle.state()
        return state

    def release(self, handle: Any) -> bool:
        """Give the handle back. False: it still runs; nixl cannot stop it, only ``forget`` can."""
        if handle.handle is None:
            return True
        is_over = handle.beside is None or handle.beside.done()
        lane = handle.connection.first
        if not is_over or lane.state(handle.handle) is TransferState.RUNNING or not lane.release(handle.handle):
            return False
        handle.handle = None
        handle.connection.transfers.discard(handle)
        return True

    def close(self) -> None:
        """Everything is over."""
        for name in list(self._connections):
            self.forget(name)
        self._opening.shutdown()
        self._beside.shutdown()
        deregister(self._agent, self._registered)
        self._agent = None


def _leave(cores: set[int]) -> None:
    """The calling thread runs elsewhere, if it may: who made the agent has the model on these cores, and whoever wakes
    this thread copies there himself.
    """
    if others := os.sched_getaffinity(0) - cores:
        os.sched_setaffinity(0, others)


def _end_opened(opening: Future[ReadAgent]) -> None:
    if not opening.exception():
        opening.result().end()
