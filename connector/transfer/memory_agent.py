"""A TransferAgent without NIXL: agents of one process copy each other's memory. For tests and simulated engines."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from connector.transfer.agent import Connecting, Region, Spans, TransferFailed, TransferState

PIECES_AT_ONCE = 64
"""Spans copied by each check of a read's state, if ``in_steps``."""


class MemoryNetwork:
    """Agents that can reach one another, by name. One per test, or one per process of simulated engines."""

    def __init__(self) -> None:
        self.agents: dict[str, MemoryAgent] = {}

    def agent(self, name: str) -> MemoryAgent:
        """Create an agent, reachable until it is closed."""
        return MemoryAgent(name, self)


@dataclass(slots=True)
class Copying:
    peer: str
    remote: Spans
    local: Spans
    copied: int = 0


@dataclass(slots=True)
class Behaviour:
    """Faults of an agent's reads, for tests."""

    fail_reads: bool = False
    """Each read fails before it has copied anything."""
    opening: set[str] = field(default_factory=set)
    """Connections to these agents are not opened."""
    stalled: bool = False
    """Nothing moves, and no handle can be released."""
    hung: set[str] = field(default_factory=set)
    """Agents whose reads do not move, and whose handles cannot be released."""
    in_steps: bool = False
    """Each check of the state copies a few spans, instead of ``read`` copying all."""
    reads: list[Copying] = field(default_factory=list)
    loses_notices: bool = False
    """What the agent sends does not arrive."""


@dataclass(frozen=True, slots=True)
class Opening:
    """A connection that opens at once, unless the agent's behaviour says otherwise."""

    agent: MemoryAgent
    peer: str

    def name(self) -> str | None:
        return None if self.peer in self.agent.behaviour.opening else self.peer

    def cancel(self) -> None:
        self.agent.forget(self.peer)


class MemoryAgent:
    """A TransferAgent on ``memmove``."""

    def __init__(self, name: str, network: MemoryNetwork) -> None:
        self.name = name
        self.behaviour = Behaviour()
        self._network = network
        self._regions: list[Region] = []
        self._known: set[str] = set()
        self._notices: list[bytes] = []
        network.agents[name] = self

    def register(self, regions: Sequence[Region]) -> None:
        self._regions.extend(regions)

    def metadata(self) -> bytes:
        return self.name.encode()

    def connect(self, metadata: bytes) -> Connecting:
        name = metadata.decode()
        if name not in self._network.agents:
            raise TransferFailed(f"connecting: there is no {name}")
        self._known.add(name)
        return Opening(self, name)

    def forget(self, name: str) -> None:
        self._known.discard(name)

    def read(self, name: str, remote: Spans, local: Spans, *, device: str, remote_device: str) -> Any:
        peer = self._network.agents.get(name)
        if peer is None or name not in self._known:
            raise TransferFailed(f"reading: {name} is not connected")
        if not (peer.has(remote, remote_device) and self.has(local, device)):
            raise TransferFailed("reading: memory that was not registered")
        copying = Copying(name, remote, local)
        self.behaviour.reads.append(copying)
        if not self.behaviour.in_steps:
            self._copy(copying, len(remote))
        return copying

    def state(self, handle: Any) -> TransferState:
        if self.behaviour.fail_reads or handle.peer not in self._known or handle.peer not in self._network.agents:
            return TransferState.FAILED
        self._copy(handle, PIECES_AT_ONCE)
        return TransferState.DONE if handle.copied == len(handle.remote) else TransferState.RUNNING

    def release(self, handle: Any) -> bool:
        return not self._stalls(handle) or handle.peer not in self._known

    def notify(self, name: str, message: bytes) -> None:
        peer = self._network.agents.get(name)
        if peer is None or name not in self._known:
            raise TransferFailed(f"notifying: {name} is not connected")
        if not self.behaviour.loses_notices:
            peer.noticed(message)

    def noticed(self, message: bytes) -> None:
        """Another agent has sent this."""
        self._notices.append(message)

    def notices(self) -> list[bytes]:
        notices, self._notices = self._notices, []
        return notices

    def close(self) -> None:
        self._network.agents.pop(self.name, None)

    def has(self, spans: Spans, device: str) -> bool:
        """Whether each span lies within registered memory."""
        return all(
            any(
                one.device == device and one.base <= address and address + length <= one.base + one.length
                for one in self._regions
            )
            for address, length in spans[:, :2].tolist()
        )

    def _copy(self, copying: Copying, pieces: int) -> None:
        if self._stalls(copying) or self.behaviour.fail_reads:
            return
        end = min(len(copying.remote), copying.copied + pieces)
        for place in range(copying.copied, end):
            ctypes.memmove(int(copying.local[place, 0]), int(copying.remote[place, 0]), int(copying.local[place, 1]))
        copying.copied = end

    def _stalls(self, copying: Copying) -> bool:
        return self.behaviour.stalled or copying.peer in self.behaviour.hung
