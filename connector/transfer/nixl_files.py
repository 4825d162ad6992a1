"""Moves blocks between memory and a file with NIXL's POSIX plugin. Not thread-safe; calls block until they end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from connector.transfer.agent import TransferFailed
from connector.transfer.nixl_agent import ERRORS, make_agent

BACKEND = "POSIX"
POLL_S = 0.000_1
TRANSFER_S_MAX = 60.0
"""Maximum duration of a batch of blocks; a file system that takes longer is stuck."""


class NixlFile:
    """One open file and one region of memory, both registered."""

    description = "NIXL POSIX"

    def __init__(self, name: str, descriptor: int, size: int, memory: tuple[int, int]) -> None:
        """``memory``: address and length. Raises TransferFailed where the plugin cannot run."""
        self._descriptor = descriptor
        self._name = name
        try:
            self._agent = make_agent(name, progress=False, backend=BACKEND)
            file_rows, memory_rows = [(0, size, descriptor, "")], [(*memory, 0, "")]
            self._registered: list[Any] = [
                self._agent.register_memory(file_rows, mem_type="FILE", backends=[BACKEND]),
                self._agent.register_memory(memory_rows, mem_type="DRAM", backends=[BACKEND]),
            ]
        except ERRORS as error:
            raise TransferFailed(f"NIXL's POSIX plugin: {type(error).__name__} {error}") from error

    def write(self, addresses: Sequence[int], offsets: Sequence[int], length: int) -> None:
        """Copy ``length`` bytes from each address to its offset. Raises TransferFailed, TimeoutError."""
        self._move("WRITE", addresses, offsets, length)

    def read(self, addresses: Sequence[int], offsets: Sequence[int], length: int) -> None:
        """Copy from the file to memory, like ``write``. Raises TransferFailed, TimeoutError."""
        self._move("READ", addresses, offsets, length)

    def close(self) -> None:
        """Deregister the file and the memory."""
        for rows in self._registered:
            try:
                self._agent.deregister_memory(rows)
            except ERRORS:
                continue  # what nixl refuses to deregister ends with the agent
        self._registered.clear()
        self._agent = None

    def _move(self, operation: str, addresses: Sequence[int], offsets: Sequence[int], length: int) -> None:
        here = np.array([(address, length, 0) for address in addresses], dtype=np.uint64)
        there = np.array([(offset, length, self._descriptor) for offset in offsets], dtype=np.uint64)
        agent = self._agent
        try:
            memory, file = agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(there, "FILE")
            handle = agent.initialize_xfer(operation, memory, file, self._name, backends=[BACKEND])
            try:
                self._finish(handle, agent.transfer(handle), operation)
            finally:
                agent.release_xfer_handle(handle)
        except ERRORS as error:
            raise TransferFailed(f"{operation} of {len(offsets)} blocks: {type(error).__name__} {error}") from error

    def _finish(self, handle: Any, state: str, operation: str) -> None:
        until = time.monotonic() + TRANSFER_S_MAX
        while state == "PROC":
            if time.monotonic() > until:
                raise TimeoutError(f"{operation} has not ended after {TRANSFER_S_MAX:g} s")
            time.sleep(POLL_S)
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise TransferFailed(f"{operation}: {state}")
