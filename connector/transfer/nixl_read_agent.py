"""NIXL's own agents, and how one reads from one peer. UCX moves the bytes, over whatever both machines have.

Over shared memory a read is copied when it is begun, by the calling thread and without Python's lock.

Seen over TCP: a transfer that was released, or whose peer was removed, still writes when a peer that was frozen goes
on. Only the end of the agent stops it. So each peer is read with an agent of its own, which ends with the connection;
it has no progress thread, because whoever reads asks for the state until it is over.

Also seen over TCP, and UCX's own: a reader that ends in the middle of a read can end the holder ("Fatal: unexpected
error: Endpoint timeout"), about one time in five. Shared memory and RDMA ask nothing of the holder's process.
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

STATES = {"PROC": TransferState.RUNNING, "DONE": TransferState.DONE, "ERR": TransferState.FAILED}
MEMORY = {"cpu": "DRAM", "cuda": "VRAM"}
BACKENDS = ["UCX"]
ERRORS = tuple(one for name, one in vars(nixl_bindings).items() if name.startswith("nixl") and name.endswith("Error"))
PROGRESS_DELAY_US = 10_000
"""Longest sleep of the progress thread, which with none spins and keeps a core busy for ever. It wakes at once when
something arrives."""
if "NIXL_LOG_LEVEL" not in os.environ:
    logging.getLogger("nixl").setLevel(logging.WARNING)  # or it has two lines to say of each connection
COPY_S_MAX = 2.0
"""For ``copy``, which takes milliseconds over shared memory."""
COPY_POLL_S = 0.000_1
_making = threading.Lock()
"""An agent is made by changing a module of nixl's for a moment."""


@dataclass(slots=True, eq=False)
class ReadAgent:
    """An agent that reads from one peer. Not thread-safe; methods raise nixl's ERRORS where nothing else is said."""

    agent: Any
    registered: list[Any]
    name: str
    """The peer's."""

    def prepare(self, remote: Spans, local: Spans, memories: tuple[str, str]) -> Any:
        """A handle. It keeps the agent alive."""
        there, here = self.agent.get_xfer_descs(remote, memories[0]), self.agent.get_xfer_descs(local, memories[1])
        return self.agent.initialize_xfer("READ", here, there, self.name, backends=BACKENDS)

    def state(self, handle: Any) -> TransferState:
        """How far it is; never raises."""
        try:
            return STATES[self.agent.check_xfer_state(handle)]
        except ERRORS:
            return TransferState.FAILED

    def release(self, handle: Any) -> bool:
        """Whether nixl has taken it back; never raises."""
        try:
            self.agent.release_xfer_handle(handle)
        except ERRORS:
            return False
        return True

    def copy(self, remote: Spans, local: Spans, memories: tuple[str, str]) -> TransferState:
        """From beginning to end; RUNNING when it took too long."""
        handle, ends_at = self.prepare(remote, local, memories), time.monotonic() + COPY_S_MAX
        try:
            self.agent.transfer(handle)
            while (state := self.state(handle)) is TransferState.RUNNING and time.monotonic() < ends_at:
                time.sleep(COPY_POLL_S)
        finally:
            self.release(handle)
        return state

    def end(self) -> None:
        """From now on it moves nothing."""
        deregister(self.agent, self.registered)
        self.agent = None


def open_read_agent(name: str, regions: Sequence[Region], metadata: bytes) -> ReadAgent:
    """An agent of that name, which must be unique for ever, wired to the peer. Raises TransferFailed."""
    agent = make_agent(name, progress=False)
    registered = register(agent, regions)
    with failing("connecting"):
        added = agent.add_remote_agent(metadata)
        peer = added.decode() if isinstance(added, bytes) else str(added)
        agent.make_connection(peer, backends=BACKENDS)
    return ReadAgent(agent, registered, peer)


def make_agent(name: str, *, progress: bool, backends: Sequence[str] = BACKENDS) -> Any:
    """NIXL's own. Raises TransferFailed."""
    with _making, _sleeping_progress_threads(), _cores_kept(), failing("starting an agent"):
        config = nixl_api.nixl_agent_config(enable_prog_thread=progress, num_threads=0, backends=list(backends))
        return nixl_api.nixl_agent(name, config)


def register(agent: Any, regions: Sequence[Region]) -> list[Any]:
    """What to give back. Raises TransferFailed."""
    registered = []
    for device in sorted({region.device for region in regions}):
        rows = [(one.base, one.length, one.device_id, "") for one in regions if one.device == device]
        with failing(f"registering {len(rows)} pieces of {device} memory"):
            registered.append(agent.register_memory(rows, mem_type=MEMORY[device], backends=BACKENDS))
    return registered


def deregister(agent: Any, registered: list[Any]) -> None:
    """Give it all back."""
    for rows in registered:
        try:
            agent.deregister_memory(rows)
        except ERRORS:
            continue  # what cannot be given back in order goes with the agent
    registered.clear()


@contextmanager
def failing(doing: str) -> Iterator[None]:
    """Nixl's errors are TransferFailed, and say what was being done."""
    try:
        yield
    except ERRORS as error:
        raise TransferFailed(f"{doing}: {type(error).__name__} {error}") from error


@contextmanager
def _sleeping_progress_threads() -> Iterator[None]:
    """The delay is no option of nixl's Python side: it is set on the config object on its way to the library."""
    make_agent = nixl_bindings.nixlAgent

    def make_sleeping_agent(name: str, config: Any) -> Any:
        config.pthrDelay = PROGRESS_DELAY_US
        return make_agent(name, config)

    nixl_bindings.nixlAgent = make_sleeping_agent
    try:
        yield
    finally:
        nixl_bindings.nixlAgent = make_agent


@contextmanager
def _cores_kept() -> Iterator[None]:
    """Whatever a library does to the calling thread's affinity: it later runs the model."""
    cores = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
