"""A store's memory and files."""

from __future__ import annotations

import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from connector.worker.connections import PROBE_BYTES
from services.worker.engines.store.files import StoreFiles


class Arena:
    """Memory for blocks, with room for connection probes after them. It never moves; pages are allocated on first
    write.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = mmap.mmap(-1, size + PROBE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))


@dataclass(frozen=True, slots=True)
class Storage:
    arena: Arena
    files: StoreFiles | None
    thread: ThreadPoolExecutor
    """Runs all calls of ``files``."""

    def as_text(self, blocks: int) -> str:
        """For the worker's note."""
        files = "none in files" if self.files is None else f"{self.files.slots} in files ({self.files.description})"
        return f"{blocks} blocks in memory, {files}"
