"""NIXL behind the port: the one file that imports it. UCX moves the bytes, over whatever both machines have.

Over shared memory a read is copied inside ``read``, by the calling thread and without Python's lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nixl import _api as nixl_api
from nixl import _bindings as nixl_bindings

from connector.transfer_port import Region, Spans, TransferFailed, TransferState

STATES = {"PROC": TransferState.RUNNING, "DONE": TransferState.DONE, "ERR": TransferState.FAILED}
MEMORY = {"cpu": "DRAM", "cuda": "VRAM"}
ERRORS = tuple(one for name, one in vars(nixl_bindings).items() if name.startswith("nixl") and name.endswith("Error"))
PROGRESS_DELAY_US = 10_000
"""Longest sleep of the progress thread, which with none spins and keeps a core busy for ever. It wakes at once when
something arrives."""


class NixlAgent:
    """A TransferAgent on nixl. Its name must be unique for ever: peers keep connections by it."""

    def __init__(self, name: str) -> None:
        with _sleeping_progress_threads(), _cores_kept():
            config = nixl_api.nixl_agent_config(enable_prog_thread=True, num_threads=0, backends=["UCX"])
            self._agent = nixl_api.nixl_agent(name, config)
        self._registered: list[Any] = []

    def register(self, regions: Sequence[Region]) -> None:
        """Make memory readable by others and writable by reads. Call before ``metadata``."""
        for device in sorted({region.device for region in regions}):
            rows = [(one.base, one.length, one.device_id, "") for one in regions if one.device == device]
            with _failing(f"registering {len(rows)} pieces of {device} memory"):
                self._registered.append(self._agent.register_memory(rows, mem_type=MEMORY[device], backends=["UCX"]))

    def metadata(self) -> bytes:
        """What another agent needs to connect."""
        return bytes(self._agent.get_agent_metadata())

    def connect(self, metadata: bytes) -> str:
        """Know that agent, wire up, answer its name. Raises TransferFailed."""
        with _failing("connecting"):
            added = self._agent.add_remote_agent(metadata)
            name = added.decode() if isinstance(added, bytes) else str(added)
            self._agent.make_connection(name)
        return name

    def forget(self, name: str) -> None:
        """Disconnect; harmless when unknown."""
        try:
            self._agent.remove_remote_agent(name)
        except ERRORS:
            return  # it was not known, or its process is gone: either way there is no connection any more

    def read(self, name: str, remote: Spans, local: Spans, *, device: str, remote_device: str) -> Any:
        """Begin to copy each remote span over the local one of the same place and length; answers a handle.

        Raises TransferFailed.
        """
        with _failing(f"reading {len(remote)} pieces"):
            here = self._agent.get_xfer_descs(local, MEMORY[device])
            there = self._agent.get_xfer_descs(remote, MEMORY[remote_device])
            handle = self._agent.initialize_xfer("READ", here, there, name, backends=["UCX"])
            if STATES[self._agent.transfer(handle)] is TransferState.FAILED:
                raise TransferFailed("reading: the transfer ended in an error as it began")
        return handle

    def state(self, handle: Any) -> TransferState:
        """How far it is."""
        try:
            return STATES[self._agent.check_xfer_state(handle)]
        except ERRORS:
            return TransferState.FAILED

    def release(self, handle: Any) -> bool:
        """Give the handle back, cancelling what still runs. False: it cannot be stopped yet, ask again."""
        try:
            self._agent.release_xfer_handle(handle)
        except ERRORS:
            return False
        return True

    def close(self) -> None:
        """Everything is over."""
        for rows in self._registered:
            with _failing("giving memory back"):
                self._agent.deregister_memory(rows)
        self._registered.clear()
        del self._agent


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
