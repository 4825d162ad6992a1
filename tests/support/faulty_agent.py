"""A transfer agent that calls a test's function before each read, to inject faults at an exact moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from connector.transfer.agent import Connecting, Region, Spans, TransferAgent, TransferState


class FaultyAgent:
    """Wraps another agent. ``before_read`` is called with the number of the read, counted from 1.

    It may wait, raise TransferFailed, or act on the peer.
    """

    def __init__(self, inner: TransferAgent, before_read: Callable[[int], None]) -> None:
        self.inner = inner
        self.before_read = before_read
        self.reads = 0

    def register(self, regions: Sequence[Region]) -> None:
        self.inner.register(regions)

    def metadata(self) -> bytes:
        return self.inner.metadata()

    def connect(self, metadata: bytes) -> Connecting:
        return self.inner.connect(metadata)

    def forget(self, name: str) -> None:
        self.inner.forget(name)

    def read(self, name: str, remote: Spans, local: Spans, *, device: str, remote_device: str) -> Any:
        self.reads += 1
        self.before_read(self.reads)
        return self.inner.read(name, remote, local, device=device, remote_device=remote_device)

    def state(self, handle: Any) -> TransferState:
        return self.inner.state(handle)

    def release(self, handle: Any) -> bool:
        return self.inner.release(handle)

    def notify(self, name: str, message: bytes) -> None:
        self.inner.notify(name, message)

    def notices(self) -> list[bytes]:
        return self.inner.notices()

    def close(self) -> None:
        self.inner.close()
