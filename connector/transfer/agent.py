"""What moves bytes between engines, as the connector sees it. NIXL is the real one; a process-local one serves tests
and simulated engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Spans = NDArray[np.uint64]
"""Shape (n, 3): address, length in bytes, device number of each piece of memory."""


class TransferState(Enum):
    """Of a read."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class TransferFailed(Exception):
    """The agent refused; the message says what and why. Nothing moves."""


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that others may read."""

    base: int
    length: int
    device: str
    """cpu or cuda."""
    device_id: int


class TransferAgent(Protocol):
    """One process's end. Not thread-safe: one thread calls it."""

    def register(self, regions: Sequence[Region]) -> None:
        """Make memory readable by others and writable by reads. Call before ``metadata``."""

    def metadata(self) -> bytes:
        """What another agent needs to connect."""

    def connect(self, metadata: bytes) -> str:
        """Know that agent, wire up, answer its name. Raises TransferFailed."""

    def forget(self, name: str) -> None:
        """Disconnect; harmless when unknown."""

    def read(self, name: str, remote: Spans, local: Spans, *, device: str, remote_device: str) -> Any:
        """Begin to copy each remote span over the local one of the same place and length; answers a handle.

        Raises TransferFailed.
        """

    def state(self, handle: Any) -> TransferState:
        """How far it is."""

    def release(self, handle: Any) -> bool:
        """Give the handle back, cancelling what still runs. False: it cannot be stopped yet, ask again."""

    def close(self) -> None:
        """Everything is over."""
