"""The port to what moves bytes between engines: NIXL, or agents within one process for tests and simulated engines."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Spans = NDArray[np.uint64]
"""Shape (n, 3): address, length in bytes and device number of each span of memory."""


class TransferState(Enum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class TransferFailed(Exception):
    """The agent refused; the message says what and why. No byte moves."""


LEAVING = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)
"""What is raised to end a process or a task, and is no failure of what it interrupts."""


@contextmanager
def failing(doing: str) -> Iterator[None]:
    """Turn whatever a library raises into TransferFailed that says what failed. It need not be an Exception: a Rust
    library that panics raises a BaseException.
    """
    try:
        yield
    except (TransferFailed, *LEAVING):
        raise
    except BaseException as error:
        raise TransferFailed(f"{doing}: {type(error).__name__} {error}") from error


@dataclass(frozen=True, slots=True)
class Region:
    base: int
    length: int
    device: str
    """cpu or cuda."""
    device_id: int


class Connecting(Protocol):
    """A connection that is being opened."""

    def name(self) -> str | None:
        """What ``read`` and ``forget`` call the connection; None while it is opened. Raises TransferFailed."""

    def cancel(self) -> None:
        """Give it up, opened or not."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A ``Connecting`` of an agent that connects at once."""

    agent: TransferAgent
    peer: str

    def name(self) -> str:
        return self.peer

    def cancel(self) -> None:
        self.agent.forget(self.peer)


class TransferAgent(Protocol):
    """The agent of one process. Not thread-safe: one thread calls it."""

    def register(self, regions: Sequence[Region]) -> None:
        """Make memory readable by peers and writable by reads. Call before ``metadata``."""

    def metadata(self) -> bytes:
        """What a peer needs to connect."""

    def connect(self, metadata: bytes) -> Connecting:
        """Begin to connect to the agent with this metadata. Does not block: NIXL registers all memory for a connection,
        which takes up to seconds. Raises TransferFailed.
        """

    def forget(self, name: str) -> None:
        """Disconnect: reads over this connection end, each at the latest when ``release`` returns True. Does not block.
        Unknown names are ignored.
        """

    def read(self, name: str, remote: Spans, local: Spans, *, device: str, remote_device: str) -> Any:
        """Begin to copy each remote span to the local one at the same index, which has the same length; returns a
        handle.

        Raises TransferFailed.
        """

    def state(self, handle: Any) -> TransferState:
        """State of a read."""

    def release(self, handle: Any) -> bool:
        """Release the handle, cancelling what still runs. True: no byte of the read moves any more. False: it cannot be
        stopped yet, call again.
        """

    def notify(self, name: str, message: bytes) -> None:
        """Send a message to the peer's agent, without a word on whether it arrives. Does not block. Raises
        TransferFailed.
        """

    def notices(self) -> list[bytes]:
        """Messages that have come since the last call, from anybody. Raises TransferFailed."""

    def close(self) -> None:
        """Disconnect from all peers and end the agent."""


CUDA_DEFAULTS = {
    # Baton reads (GET). Without NVLink UCX allows cuda_ipc for writes only, because reads over PCIe are slower than
    # writes, and falls back to TCP through host memory, which is slower by far (openucx/ucx, cuda_ipc_iface.c).
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"
}


def set_ucx_defaults(devices: Collection[str]) -> None:
    """Set defaults for GPU memory before the first agent of the process starts; the operator's values stay. Settings
    for host memory are in ``nixl_agent``: they hold for every agent.

    ``devices``: kinds of the memory to be read, cpu or cuda. UCX warns of a setting that it has no use for, so nothing
    is set without a GPU.
    """
    if "cuda" in devices:
        for name, value in CUDA_DEFAULTS.items():
            os.environ.setdefault(name, value)
