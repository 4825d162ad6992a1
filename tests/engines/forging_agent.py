"""NIXL's agent, which spoils what a real engine reads of another one, as a file says."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from connector.transfer.agent import Region, Spans, TransferState
from connector.transfer.nixl_agent import NixlAgent
from tests.engines.forged_reads import FORGERY_FILE, Forgery, Spoiling


class ForgingAgent(NixlAgent):
    """A read's spans are pieces of blocks, each of one layer's memory or of adjacent blocks of it."""

    def __init__(self, name: str, *, backend: str) -> None:
        super().__init__(name, backend=backend)
        self._spoiling = Spoiling(Path(os.environ[FORGERY_FILE]))
        self._reads: dict[int, tuple[Forgery, Spans]] = {}
        """What to do with the reads under way, and their destinations, by their handles' identity."""
        self._memory: Sequence[Region] = ()
        """Of the layers, in the engine's order."""

    def register(self, regions: Sequence[Region]) -> None:
        super().register(regions)
        self._memory = regions[:-1]  # The last one is for probes.

    def read(self, name: str, remote: Spans, local: Spans, *, device: str, remote_device: str) -> Any:
        handle = super().read(name, remote, local, device=device, remote_device=remote_device)
        self._reads[id(handle)] = (self._spoiling.next(), np.array(local))
        return handle

    def state(self, handle: Any) -> TransferState:
        state = super().state(handle)
        if state is TransferState.DONE and (read := self._reads.pop(id(handle), None)) is not None:
            forge(*read, self._memory)
        return state

    def release(self, handle: Any) -> bool:
        released = super().release(handle)
        if released:
            self._reads.pop(id(handle), None)
        return released


def forge(forgery: Forgery, local: Spans, memory: Sequence[Region]) -> None:
    """Spoil what has arrived in these spans."""
    spans = sorted((int(address), int(length)) for address, length in local[:, :2])
    if forgery is Forgery.ZEROED:
        address, length = spans[0]
        ctypes.memset(address, 0, length)
    elif forgery is Forgery.DRAFTLESS:
        (layers,) = memory  # One after the other.
        for address, length in spans:
            if address >= layers.base + layers.length // 2:
                ctypes.memset(address, 0, length)
    elif forgery is Forgery.SWAPPED:
        for address, length in spans:  # Two adjacent blocks each: they were allocated one after the other.
            half = length // 2
            first, second = ctypes.string_at(address, half), ctypes.string_at(address + half, half)
            ctypes.memmove(address, second, half)
            ctypes.memmove(address + half, first, half)
