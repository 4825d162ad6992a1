"""NIXL behind the port: the one place that imports it. UCX moves the bytes, over whatever both machines have.

Over shared memory a read is copied inside ``read``, by the calling thread and without Python's lock.

Seen over TCP: a transfer that was released, or whose peer was removed, still writes when a peer that was frozen goes
on. Only the end of the agent stops it. So each peer is read with an agent of its own, which ends with the connection;
it has no progress thread, because whoever reads asks for the state until it is over.

Also seen over TCP, and UCX's own: a reader that ends in the middle of a read can end the holder ("Fatal: unexpected
error: Endpoint timeout"), about one time in five. Shared memory and RDMA ask nothing of the holder's process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from nixl import _api as nixl_api
from nixl import _bindings as nixl_bindings

from connector.transfer_port import Region, Spans, TransferFailed, TransferState

STATES = {"PROC": TransferState.RUNNING, "DONE": TransferState.DONE, "ERR": TransferState.FAILED}
MEMORY = {"cpu": "DRAM", "cuda": "VRAM"}
BACKENDS = ["UCX"]
ERRORS = tuple(one for name, one in vars(nixl_bindings).items() if name.startswith("nixl") and name.endswith("Error"))
PROGRESS_DELAY_US = 10_000
"""Longest sleep of the progress thread, which with none spins and keeps a core busy for ever. It wakes at once when
something arrives."""
if "NIXL_LOG_LEVEL" not in os.environ:
    logging.getLogger("nixl").setLevel(logging.WARNING)  # or it has two lines to say of each connection


@dataclass(slots=True, eq=False)
class _Transfer:
    """A read's handle; nixl's own keeps its agent alive, so it is dropped with the connection."""

    connection: _Connection
    handle: Any


@dataclass(slots=True, eq=False)
class _Connection:
    """To one peer, with the agent that reads from it."""

    agent: Any
    registered: list[Any]
    transfers: set[_Transfer] = field(default_factory=set)


class NixlAgent:
    """A TransferAgent on nixl. Its name must be unique for ever: peers keep connections by it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._agent = make_agent(name, progress=True)
        self._regions: list[Region] = []
        self._registered: list[Any] = []
        self._connections: dict[str, _Connection] = {}
        self._connected = 0

    def register(self, regions: Sequence[Region]) -> None:
        """Make memory readable by others and writable by reads. Call before ``metadata``."""
        self._regions.extend(regions)
        self._registered.extend(_register(self._agent, regions))

    def metadata(self) -> bytes:
        """What another agent needs to connect."""
        return bytes(self._agent.get_agent_metadata())

    def connect(self, metadata: bytes) -> str:
        """Know that agent, wire up, answer its name. Raises TransferFailed."""
        self._connected += 1
        agent = make_agent(f"{self._name}-{self._connected}", progress=False)
        registered = _register(agent, self._regions)
        with _failing("connecting"):
            added = agent.add_remote_agent(metadata)
            name = added.decode() if isinstance(added, bytes) else str(added)
            agent.make_connection(name, backends=BACKENDS)
        self.forget(name)
        self._connections[name] = _Connection(agent, registered)
        return name

    def forget(self, name: str) -> None:
        """Disconnect; harmless when unknown. No byte of a read from there moves any more."""
        connection = self._connections.pop(name, None)
        if connection is None:
            return
        for transfer in connection.transfers:
            _release(connection.agent, transfer.handle)
            transfer.handle = None
        connection.transfers.clear()
        _end(connection.agent, connection.registered)
        connection.agent = None

    def read(self, name: str, remote: Spans, local: Spans, *, device: str, remote_device: str) -> Any:
        """Begin to copy each remote span over the local one of the same place and length; answers a handle.

        Raises TransferFailed.
        """
        connection = self._connections.get(name)
        if connection is None:
            raise TransferFailed(f"reading: {name} is not connected")
        agent = connection.agent
        with _failing(f"reading {len(remote)} pieces"):
            here = agent.get_xfer_descs(local, MEMORY[device])
            there = agent.get_xfer_descs(remote, MEMORY[remote_device])
            transfer = _Transfer(connection, agent.initialize_xfer("READ", here, there, name, backends=BACKENDS))
            connection.transfers.add(transfer)
            agent.transfer(transfer.handle)
        return transfer

    def state(self, handle: Any) -> TransferState:
        """How far it is."""
        if handle.handle is None:
            return TransferState.FAILED
        try:
            return STATES[handle.connection.agent.check_xfer_state(handle.handle)]
        except ERRORS:
            return TransferState.FAILED

    def release(self, handle: Any) -> bool:
        """Give the handle back. False: it still runs; nixl cannot stop it, only ``forget`` can."""
        if handle.handle is None:
            return True
        if self.state(handle) is TransferState.RUNNING or not _release(handle.connection.agent, handle.handle):
            return False
        handle.handle = None
        handle.connection.transfers.discard(handle)
        return True

    def close(self) -> None:
        """Everything is over."""
        for name in list(self._connections):
            self.forget(name)
        _end(self._agent, self._registered)
        self._agent = None


def make_agent(name: str, *, progress: bool, backends: Sequence[str] = BACKENDS) -> Any:
    """NIXL's own. Raises TransferFailed."""
    with _sleeping_progress_threads(), _cores_kept(), _failing("starting an agent"):
        config = nixl_api.nixl_agent_config(enable_prog_thread=progress, num_threads=0, backends=list(backends))
        return nixl_api.nixl_agent(name, config)


def _register(agent: Any, regions: Sequence[Region]) -> list[Any]:
    registered = []
    for device in sorted({region.device for region in regions}):
        rows = [(one.base, one.length, one.device_id, "") for one in regions if one.device == device]
        with _failing(f"registering {len(rows)} pieces of {device} memory"):
            registered.append(agent.register_memory(rows, mem_type=MEMORY[device], backends=BACKENDS))
    return registered


def _release(agent: Any, handle: Any) -> bool:
    try:
        agent.release_xfer_handle(handle)
    except ERRORS:
        return False
    return True


def _end(agent: Any, registered: list[Any]) -> None:
    for rows in registered:
        try:
            agent.deregister_memory(rows)
        except ERRORS:
            continue  # what cannot be given back in order goes with the agent
    registered.clear()


@contextmanager
def _failing(doing: str) -> Iterator[None]:
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
