"""NIXL agents, each of which reads from one peer. UCX moves the bytes, over whatever transport both machines have.

Over shared memory the calling thread copies the whole read when it begins it, without holding Python's GIL.

Over TCP, after a transfer is released or its peer is removed, UCX still writes into local memory when a frozen peer
resumes. Only destroying the agent stops that. So each peer is read with an agent of its own, which is destroyed with
the connection, whatever memory it reads into (DECISIONS 44). It has no progress thread, because the reader polls the
state until the read ends.

Also over TCP, and a fault of UCX: a reader that dies during a read can kill the holder's process ("Fatal: unexpected
error: Endpoint timeout"), about one time in five. Shared memory and RDMA need no action of the holder's process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nixl import _api as nixl_api
from nixl import _bindings as nixl_bindings

from connector.transfer.agent import Region, Spans, TransferFailed, TransferState
from connector.transfer.threads import keep_cores

STATES = {"PROC": TransferState.RUNNING, "DONE": TransferState.DONE, "ERR": TransferState.FAILED}
MEMORY = {"cpu": "DRAM", "cuda": "VRAM"}
BACKENDS = ["UCX"]
ERRORS = tuple(one for name, one in vars(nixl_bindings).items() if name.startswith("nixl") and name.endswith("Error"))
PROGRESS_DELAY_US = 10_000
"""Longest sleep of a progress thread. Without a delay it spins and keeps a core busy; with one it still wakes at once
when something arrives.
"""
os.environ.setdefault("UCX_TCP_CONN_NB", "y")
"""UCX connects over TCP without waiting, because its waiting connect has two faults. A host that does not answer blocks
the thread for two minutes. And if the peer's process ends just after it has accepted, the endpoint is freed, yet used
by the next read, which kills this process (seen in UCX of nixl 1.5.1, twice in 5,000 such deaths). UCX reads the
variable when an agent starts.
"""
if "NIXL_LOG_LEVEL" not in os.environ:
    logging.getLogger("nixl").setLevel(logging.WARNING)  # otherwise it logs two lines per connection
COPY_S_MAX = 2.0
"""Maximum duration of ``copy``, which takes milliseconds over shared memory."""
COPY_POLL_S = 0.000_1
_making = threading.Lock()
"""``make_agent`` patches a module of nixl for a moment, so one thread at a time may run it."""


@dataclass(slots=True, eq=False)
class ReadAgent:
    """An agent that reads from one peer. Not thread-safe. Methods raise nixl's ERRORS unless stated otherwise."""

    agent: Any
    registered: list[Any]
    name: str
    """Name of the peer's agent."""

    def prepare(self, remote: Spans, local: Spans, memories: tuple[str, str]) -> Any:
        """Return a handle. nixl's handle holds a reference to the agent, so drop it before ``end``."""
        there, here = self.agent.get_xfer_descs(remote, memories[0]), self.agent.get_xfer_descs(local, memories[1])
        return self.agent.initialize_xfer("READ", here, there, self.name, backends=BACKENDS)

    def state(self, handle: Any) -> TransferState:
        """State of a read; never raises."""
        try:
            return STATES[self.agent.check_xfer_state(handle)]
        except ERRORS:
            return TransferState.FAILED

    def release(self, handle: Any) -> bool:
        """Release a handle; False if nixl refuses. Never raises."""
        try:
            self.agent.release_xfer_handle(handle)
        except ERRORS:
            return False
        return True

    def copy(self, remote: Spans, local: Spans, memories: tuple[str, str]) -> TransferState:
        """Copy and wait for the end; RUNNING if it took longer than COPY_S_MAX."""
        handle, ends_at = self.prepare(remote, local, memories), time.monotonic() + COPY_S_MAX
        try:
            self.agent.transfer(handle)
            while (state := self.state(handle)) is TransferState.RUNNING and time.monotonic() < ends_at:
                time.sleep(COPY_POLL_S)
        finally:
            self.release(handle)
        return state

    def end(self) -> None:
        """Destroy the agent: after this it moves no byte."""
        deregister(self.agent, self.registered)
        self.agent = None


def open_read_agent(name: str, regions: Sequence[Region], metadata: bytes) -> ReadAgent:
    """An agent that is connected to the peer. Its name must never be used again. Raises TransferFailed."""
    agent = make_agent(name, progress=False)
    registered = register(agent, regions)
    with failing("connecting"):
        added = agent.add_remote_agent(metadata)
        peer = added.decode() if isinstance(added, bytes) else str(added)
        agent.make_connection(peer, backends=BACKENDS)
    return ReadAgent(agent, registered, peer)


def make_agent(name: str, *, progress: bool, backends: Sequence[str] = BACKENDS) -> Any:
    """Create a nixl agent. Raises TransferFailed."""
    with _making, _sleeping_progress_threads(), keep_cores(), failing("starting an agent"):
        config = nixl_api.nixl_agent_config(enable_prog_thread=progress, num_threads=0, backends=list(backends))
        return nixl_api.nixl_agent(name, config)


def register(agent: Any, regions: Sequence[Region]) -> list[Any]:
    """Register memory; returns what ``deregister`` needs. Raises TransferFailed."""
    registered = []
    for device in sorted({region.device for region in regions}):
        rows = [(one.base, one.length, one.device_id, "") for one in regions if one.device == device]
        with failing(f"registering {len(rows)} pieces of {device} memory"):
            registered.append(agent.register_memory(rows, mem_type=MEMORY[device], backends=BACKENDS))
    return registered


def deregister(agent: Any, registered: list[Any]) -> None:
    """Deregister what can be deregistered."""
    for rows in registered:
        try:
            agent.deregister_memory(rows)
        except ERRORS:
            continue  # what nixl refuses to deregister ends with the agent
    registered.clear()


@contextmanager
def failing(doing: str) -> Iterator[None]:
    """Turn nixl's errors into TransferFailed that says what failed."""
    try:
        yield
    except ERRORS as error:
        raise TransferFailed(f"{doing}: {type(error).__name__} {error}") from error


@contextmanager
def _sleeping_progress_threads() -> Iterator[None]:
    """Set PROGRESS_DELAY_US. nixl's Python API has no option for it, so it is set on the config object that the API
    passes to the library.
    """
    make_agent = nixl_bindings.nixlAgent

    def make_sleeping_agent(name: str, config: Any) -> Any:
        config.pthrDelay = PROGRESS_DELAY_US
        return make_agent(name, config)

    nixl_bindings.nixlAgent = make_sleeping_agent
    try:
        yield
    finally:
        nixl_bindings.nixlAgent = make_agent
