"""The TransferAgent on NIXL: an agent that lends this engine's memory, and for each peer one that reads from it.

A plug-in of NIXL (a "backend") moves the bytes: UCX, over whatever transport both machines have, unless the operator
has chosen another one, such as LIBFABRIC. Over shared memory the thread that begins a read copies
it whole, without holding Python's GIL, and one core copies at about half of what memory allows. So once a large read
from a peer has ended as soon as it began, which shows that the peer is reached over shared memory, later large reads
from it are split: a second thread with an agent of its own copies one half.

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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from nixl import _api as nixl_api
from nixl import _bindings as nixl_bindings

from connector.layout.routes import halves_of
from connector.transfer.agent import Connecting, Region, Spans, TransferFailed, TransferState, failing
from connector.transfer.threads import DaemonThreads, keep_cores, leave_cores
from shared.contracts.workers import USUAL_BACKEND

STATES = {"PROC": TransferState.RUNNING, "DONE": TransferState.DONE, "ERR": TransferState.FAILED}
MEMORY = {"cpu": "DRAM", "cuda": "VRAM"}
PACKAGE: str = nixl_api.__name__.rpartition(".")[0]
"""The package that ``nixl`` stands for in this process."""
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
    """An agent that reads from one peer. Not thread-safe. Methods raise what nixl raises unless stated otherwise."""

    agent: Any
    registered: list[Any]
    name: str
    """The name of the peer's agent, which the peer chooses."""
    backend: str = USUAL_BACKEND

    def prepare(self, remote: Spans, local: Spans, memories: tuple[str, str]) -> Any:
        """Return a handle. nixl's handle holds a reference to the agent, so drop it before ``end``."""
        there, here = self.agent.get_xfer_descs(remote, memories[0]), self.agent.get_xfer_descs(local, memories[1])
        return self.agent.initialize_xfer("READ", here, there, self.name, backends=[self.backend])

    def state(self, handle: Any) -> TransferState:
        """State of a read; never raises."""
        try:
            return STATES[self.agent.check_xfer_state(handle)]
        except Exception:
            return TransferState.FAILED

    def release(self, handle: Any) -> bool:
        """Release a handle; False if nixl refuses. Never raises."""
        try:
            self.agent.release_xfer_handle(handle)
        except Exception:
            return False
        return True

    def copy(self, remote: Spans, local: Spans, memories: tuple[str, str], s_max: float = COPY_S_MAX) -> TransferState:
        """Copy and wait for the end; RUNNING if it took longer than ``s_max``."""
        handle, ends_at = self.prepare(remote, local, memories), time.monotonic() + s_max
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


def open_read_agent(name: str, regions: Sequence[Region], metadata: bytes, backend: str = USUAL_BACKEND) -> ReadAgent:
    """An agent that is connected to the peer. Its name must never be used again. Raises TransferFailed."""
    agent = make_agent(name, progress=False, backend=backend)
    registered = register(agent, regions, backend)
    return ReadAgent(agent, registered, load(agent, metadata, backend), backend)


def load(agent: Any, metadata: bytes, backend: str = USUAL_BACKEND) -> str:
    """Connect an agent to the peer with this metadata; returns the name of the peer's agent. Raises TransferFailed."""
    with failing("connecting"):
        added = agent.add_remote_agent(metadata)
        peer = added.decode() if isinstance(added, bytes) else str(added)
        agent.make_connection(peer, backends=[backend])
    return peer


def make_agent(name: str, *, progress: bool, backend: str = USUAL_BACKEND) -> Any:
    """Create a nixl agent. Raises TransferFailed."""
    with _making, _sleeping_progress_threads(), keep_cores(), failing("starting an agent"):
        config = nixl_api.nixl_agent_config(enable_prog_thread=progress, num_threads=0, backends=[backend])
        return nixl_api.nixl_agent(name, config)


def plugins() -> list[str]:
    """The plug-ins that NIXL finds, whether or not they load. Raises what nixl raises."""
    config = nixl_api.nixl_agent_config(enable_prog_thread=False, num_threads=0, backends=[])
    return sorted(nixl_api.nixl_agent("plugins", config).get_plugin_list())


def plugin_folder() -> Path:
    """Where NIXL looks for them."""
    inside = Path(nixl_api.__file__).parent
    return Path(os.environ.get("NIXL_PLUGIN_DIR") or inside.parent / f".{inside.name}.mesonpy.libs" / "plugins")


def register(agent: Any, regions: Sequence[Region], backend: str = USUAL_BACKEND) -> list[Any]:
    """Register memory; returns what ``deregister`` needs. Raises TransferFailed."""
    registered = []
    for device in sorted({region.device for region in regions}):
        rows = [(one.base, one.length, one.device_id, "") for one in regions if one.device == device]
        with failing(f"registering {len(rows)} pieces of {device} memory"):
            registered.append(agent.register_memory(rows, mem_type=MEMORY[device], backends=[backend]))
    return registered


def deregister(agent: Any, registered: list[Any]) -> None:
    """Deregister what can be deregistered."""
    for rows in registered:
        try:
            agent.deregister_memory(rows)
        except Exception:  # noqa: S112
            continue  # what nixl refuses to deregister ends with the agent
    registered.clear()


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


SPLIT_BYTES = 32 << 20
"""Smaller reads end before a second thread would wake up on a machine whose cores are all busy."""
OPENING_AT_ONCE_MAX = 2
"""Connections that are opened at a time."""
STUCK_S = 1.0
"""A copy on the second thread normally takes milliseconds. After this time the thread gets no more until it ends."""
CLOSE_S_MAX = 2.0
"""Time limit for each thread to end its work."""
OpenAgent = Callable[[str, Sequence[Region], bytes], ReadAgent]


@dataclass(slots=True, eq=False)
class _Transfer:
    """A read. nixl's handle keeps its agent alive, so ``forget`` drops it with the connection."""

    connection: _Connection
    handle: Any = None
    """Handle of the connection's first agent; None after its release."""
    second_half: Future[TransferState] | None = None
    """The half that the second agent copies."""
    has_failed: bool = False

    def state(self) -> TransferState:
        if self.handle is None or self.has_failed:
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
    first: ReadAgent
    metadata: bytes
    opening: Future[ReadAgent] | None = None
    """The second agent, once large reads have shown that it pays."""
    transfers: set[_Transfer] = field(default_factory=set)
    ending: Future[None] | None = None
    """The end of the second agent, after the copy that it is at."""

    @property
    def is_over(self) -> bool:
        """After ``forget``: whether no byte moves any more."""
        return self.ending is None or self.ending.done()

    @property
    def second(self) -> ReadAgent | None:
        """The second agent, if it is connected."""
        opening = self.opening
        return opening.result() if opening is not None and opening.done() and not opening.exception() else None


class _Opening:
    """A connection that another thread opens."""

    def __init__(self, agent: NixlAgent, name: str, metadata: bytes, opening: Future[ReadAgent]) -> None:
        self._agent = agent
        self._given_name = name
        self._metadata = metadata
        self._opening = opening
        self._name: str | None = None

    def name(self) -> str | None:
        if self._name is None and self._opening.done():
            self._agent.opened(self._given_name, self._opening.result(), self._metadata)
            self._name = self._given_name
        return self._name

    def cancel(self) -> None:
        if self._name is not None:
            self._agent.forget(self._name)
        elif not self._opening.cancel():
            self._opening.add_done_callback(_end_opened)


class NixlAgent:
    """A TransferAgent on nixl. Its name must never be used again: peers identify connections by it.

    ``open_agent`` makes the agent of one connection, on a thread of its own; by default ``open_read_agent``. A
    connection has the name of this agent, not of the peer's: two peers may say that they have the same name.
    """

    def __init__(
        self,
        name: str,
        *,
        backend: str = USUAL_BACKEND,
        split_bytes: int = SPLIT_BYTES,
        open_agent: OpenAgent | None = None,
    ) -> None:
        self._name = name
        self._backend = backend
        self._open_agent = open_agent or partial(open_read_agent, backend=backend)
        self._split_bytes = split_bytes
        self._agent = make_agent(name, progress=True, backend=backend)
        self._regions: list[Region] = []
        self._registered: list[Any] = []
        self._connections: dict[str, _Connection] = {}
        self._agent_numbers = count(1)
        self._opening = DaemonThreads("kv-connect", OPENING_AT_ONCE_MAX)
        # This thread and its copies inherit the affinity of the model's thread, and the transfer thread that wakes the
        # second one copies there too: the second one runs on other cores.
        cores = os.sched_getaffinity(0)
        self._second_thread = DaemonThreads("kv-second-copy", 1, lambda: leave_cores(cores))
        self._second_jobs: deque[tuple[Future[Any], float]] = deque()
        """Jobs of the second thread with the time of submission, oldest first."""

    def register(self, regions: Sequence[Region]) -> None:
        self._regions.extend(regions)
        self._registered.extend(register(self._agent, regions, self._backend))

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def connect(self, metadata: bytes) -> Connecting:
        name = self._new_name()
        return _Opening(self, name, metadata, self._open(name, metadata))

    def opened(self, name: str, first: ReadAgent, metadata: bytes) -> None:
        """Use the opened connection under this name."""
        self._connections[name] = _Connection(first, metadata)

    def _new_name(self) -> str:
        return f"{self._name}-{next(self._agent_numbers)}"

    def _open(self, name: str, metadata: bytes) -> Future[ReadAgent]:
        return self._opening.submit(self._open_agent, name, self._regions, metadata)

    def forget(self, name: str) -> None:
        """See ``TransferAgent``. A copy on the second thread cannot be stopped: its end is awaited by ``release``, so a
        thread that is stuck keeps the blocks of one read and nothing else.
        """
        connection = self._connections.pop(name, None)
        if connection is None:
            return
        for transfer in connection.transfers:
            if transfer.second_half is not None:
                transfer.second_half.cancel()
            if transfer.handle is not None:
                connection.first.release(transfer.handle)
                transfer.handle = None
        connection.transfers.clear()
        connection.first.end()
        if (second := connection.second) is not None:
            connection.ending = self._on_second_thread(second.end)
        elif connection.opening is not None and not connection.opening.cancel():
            connection.opening.add_done_callback(_end_opened)

    def read(self, name: str, remote: Spans, local: Spans, *, device: str, remote_device: str) -> Any:
        connection = self._connections.get(name)
        if connection is None:
            raise TransferFailed(f"reading: {name} is not connected")
        memories, first = (MEMORY[remote_device], MEMORY[device]), connection.first
        is_large = device == remote_device == "cpu" and int(remote[:, 1].sum()) >= self._split_bytes
        second = connection.second if is_large and not self._is_second_thread_stuck() else None
        own, other = ((remote, local), None) if second is None else halves_of(remote, local)
        transfer = _Transfer(connection)
        connection.transfers.add(transfer)
        with failing(f"reading {len(remote)} pieces"):
            transfer.handle = first.prepare(*own, memories)
            if second is not None and other is not None:
                transfer.second_half = self._on_second_thread(second.copy, *other, memories)
        try:
            first.agent.transfer(transfer.handle)
        except Exception:
            transfer.has_failed = True  # Not raised: the second half may be under way, and must be awaited.
        has_cores = len(os.sched_getaffinity(0)) > 1
        if is_large and has_cores and connection.opening is None and transfer.state() is TransferState.DONE:
            connection.opening = self._open(self._new_name(), connection.metadata)
        return transfer

    def state(self, handle: Any) -> TransferState:
        state: TransferState = handle.state()
        return state

    def release(self, handle: Any) -> bool:
        """Release the handle. False: the read still runs; nixl cannot stop it, only ``forget`` can."""
        if handle.handle is None:
            return bool(handle.connection.is_over)
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

    def notify(self, name: str, message: bytes) -> None:
        connection = self._connections.get(name)
        if connection is None:
            raise TransferFailed(f"notifying: {name} is not connected")
        with failing("notifying"):
            first = connection.first
            first.agent.send_notif(first.name, message)  # With a backend it raises TypeError.
            first.agent.get_new_notifs()  # It has no progress thread: this sends what has to wait.

    def notices(self) -> list[bytes]:
        with failing("looking for notifications"):
            return [bytes(message) for messages in self._agent.get_new_notifs().values() for message in messages]

    def close(self) -> None:
        """Disconnect from all peers and destroy the agent."""
        for name in list(self._connections):
            self.forget(name)
        self._opening.close(CLOSE_S_MAX)
        self._second_thread.close(CLOSE_S_MAX)
        deregister(self._agent, self._registered)
        self._agent = None

    def _on_second_thread(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future = self._second_thread.submit(work, *args)
        self._second_jobs.append((future, time.monotonic()))
        return future

    def _is_second_thread_stuck(self) -> bool:
        jobs = self._second_jobs
        while jobs and jobs[0][0].done():
            jobs.popleft()
        return bool(jobs) and time.monotonic() > jobs[0][1] + STUCK_S


def _end_opened(opening: Future[ReadAgent]) -> None:
    if not opening.exception():
        opening.result().end()
