"""The TransferAgent on NIXL.

Over shared memory the thread that begins a read copies it, and one core copies at about half of what memory allows. So
once a large read from a peer has ended as soon as it began, which shows that the peer is reached over shared memory,
later large reads from it are split: a second thread with an agent of its own copies one half.
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
from connector.transfer.cpu_affinity import leave_cores
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
"""Smaller reads end before a second thread would wake up on a machine whose cores are all busy."""


@dataclass(slots=True, eq=False)
class _Transfer:
    """A read. nixl's handle keeps its agent alive, so ``forget`` drops it with the connection."""

    connection: _Connection
    handle: Any = None
    """Of the connection's first agent; None after its release."""
    second_half: Future[TransferState] | None = None
    """The half that the second agent copies."""

    def state(self) -> TransferState:
        if self.handle is None:
            return TransferState.FAILED
        state = self.connection.first.state(self.handle)
        if self.second_half is None or state is TransferState.FAILED:
            return state
        if not self.second_half.done():
            return TransferState.RUNNING
        is_copied = not self.second_half.exception() and self.second_half.result() is TransferState.DONE
        return state if is_copied else TransferState.FAILED


@dataclass(slots=True, eq=False)
class _Connection:
    """To one peer."""

    first: ReadAgent
    metadata: bytes
    opening: Future[ReadAgent] | None = None
    """The second agent, once large reads have shown that it pays."""
    transfers: set[_Transfer] = field(default_factory=set)

    @property
    def second(self) -> ReadAgent | None:
        """The second agent, if it is connected."""
        opening = self.opening
        return opening.result() if opening is not None and opening.done() and not opening.exception() else None


class NixlAgent:
    """A TransferAgent on nixl. Its name must never be used again: peers identify connections by it."""

    def __init__(self, name: str, *, split_bytes: int = SPLIT_BYTES) -> None:
        self._name = name
        self._split_bytes = split_bytes
        self._agent = make_agent(name, progress=True)
        self._regions: list[Region] = []
        self._registered: list[Any] = []
        self._connections: dict[str, _Connection] = {}
        self._agent_numbers = count(1)
        self._opening = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-connect")
        # This thread and its copies inherit the affinity of the model's thread, and the transfer thread that wakes the
        # second one copies there too: the second one runs on other cores.
        self._second_thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="kv-second-copy",
            initializer=leave_cores,
            initargs=(os.sched_getaffinity(0),),
        )

    def register(self, regions: Sequence[Region]) -> None:
        """See ``TransferAgent``."""
        self._regions.extend(regions)
        self._registered.extend(register(self._agent, regions))

    def metadata(self) -> bytes:
        """See ``TransferAgent``."""
        return bytes(self._agent.get_agent_metadata())

    def connect(self, metadata: bytes) -> str:
        """See ``TransferAgent``."""
        first = self._open(metadata)
        self.forget(first.name)
        self._connections[first.name] = _Connection(first, metadata)
        return first.name

    def _open(self, metadata: bytes) -> ReadAgent:
        return open_read_agent(f"{self._name}-{next(self._agent_numbers)}", self._regions, metadata)

    def forget(self, name: str) -> None:
        """See ``TransferAgent``. Raises TimeoutError when the second agent is stuck."""
        connection = self._connections.pop(name, None)
        if connection is None:
            return
        for transfer in connection.transfers:
            if transfer.second_half is not None and not transfer.second_half.cancel():
                transfer.second_half.exception(2 * COPY_S_MAX)
            if transfer.handle is not None:
                connection.first.release(transfer.handle)
                transfer.handle = None
        connection.transfers.clear()
        connection.first.end()
        if connection.opening is not None and not connection.opening.cancel():
            connection.opening.add_done_callback(_end_opened)

    def read(self, name: str, remote: Spans, local: Spans, *, device: str, remote_device: str) -> Any:
        """See ``TransferAgent``."""
        connection = self._connections.get(name)
        if connection is None:
            raise TransferFailed(f"reading: {name} is not connected")
        memories, first = (MEMORY[remote_device], MEMORY[device]), connection.first
        is_large = int(remote[:, 1].sum()) >= self._split_bytes
        second = connection.second if is_large else None
        own, other = ((remote, local), None) if second is None else halves_of(remote, local)
        transfer = _Transfer(connection)
        connection.transfers.add(transfer)
        with failing(f"reading {len(remote)} pieces"):
            transfer.handle = first.prepare(*own, memories)
            if second is not None and other is not None:
                transfer.second_half = self._second_thread.submit(second.copy, *other, memories)
            first.agent.transfer(transfer.handle)
        has_cores = len(os.sched_getaffinity(0)) > 1
        if is_large and has_cores and connection.opening is None and transfer.state() is TransferState.DONE:
            connection.opening = self._opening.submit(self._open, connection.metadata)
        return transfer

    def state(self, handle: Any) -> TransferState:
        """State of a read."""
        state: TransferState = handle.state()
        return state

    def release(self, handle: Any) -> bool:
        """Release the handle. False: the read still runs; nixl cannot stop it, only ``forget`` can."""
        if handle.handle is None:
            return True
        is_second_over = handle.second_half is None or handle.second_half.done()
        first = handle.connection.first
        if (
            not is_second_over
            or first.state(handle.handle) is TransferState.RUNNING
            or not first.release(handle.handle)
        ):
            return False
        handle.handle = None
        handle.connection.transfers.discard(handle)
        return True

    def close(self) -> None:
        """Disconnect from all peers and destroy the agent."""
        for name in list(self._connections):
            self.forget(name)
        self._opening.shutdown()
        self._second_thread.shutdown()
        deregister(self._agent, self._registered)
        self._agent = None


def _end_opened(opening: Future[ReadAgent]) -> None:
    if not opening.exception():
        opening.result().end()
