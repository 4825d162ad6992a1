"""The simulated network link: delays each read by the simulated transfer time.

The few real bytes are copied only when the simulated ones would have arrived. So a holder that has reused its blocks
in the meantime is detected, as at the end of a slow transfer.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

from connector.messages import Read, ReadPart
from services.worker.engines.simulated.core.settings import SimulationSettings
from services.worker.engines.simulated.core.timing import TransferLink


@dataclass(slots=True)
class _Transfer:
    read: Read
    began_s: float
    left: int
    """Blocks whose result is not final."""


class SimulatedLink:
    """Reads in progress. Times are on the engine's clock."""

    def __init__(self, settings: SimulationSettings) -> None:
        self._wire = TransferLink(settings.step_timing())
        self._block_bytes = settings.block_size * settings.sim_kv_bytes_per_token
        self._due: list[tuple[float, int]] = []
        self._waiting: dict[int, _Transfer] = {}
        """By read id: reads whose simulated bytes have not arrived."""
        self._copying: dict[int, _Transfer] = {}

    def begin(self, read: Read, now: float) -> None:
        """Queue a read on the link."""
        began, arrives = self._wire.book(len(read.local_blocks) * self._block_bytes, now)
        self._waiting[read.read_id] = _Transfer(read, began, len(read.local_blocks))
        heapq.heappush(self._due, (arrives, read.read_id))

    def next_arrival(self) -> float | None:
        """When the next read's bytes must be copied."""
        while self._due and self._due[0][1] not in self._waiting:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def arrivals(self, now: float) -> list[Read]:
        """Reads whose bytes have arrived: copy them now, then report to ``landed``."""
        arrived: list[Read] = []
        while (at := self.next_arrival()) is not None and at <= now:
            read_id = heapq.heappop(self._due)[1]
            self._copying[read_id] = self._waiting.pop(read_id)
            arrived.append(self._copying[read_id].read)
        return arrived

    def landed(self, part: ReadPart, now: float) -> ReadPart | None:
        """The same part with simulated bytes and times; None for an unknown read."""
        transfer = self._copying.get(part.read_id)
        if transfer is None:
            return None
        transfer.left -= part.count
        if not transfer.left:
            del self._copying[part.read_id]
        size = 0 if part.failure else part.count * self._block_bytes
        return replace(part, bytes=size, started_s=transfer.began_s, ended_s=now)

    def cancel(self, read_id: int, now: float) -> ReadPart | None:
        """Cancel a read; returns its final part, or None if its bytes are being copied already."""
        transfer = self._waiting.pop(read_id, None)
        if transfer is None:
            return None
        return ReadPart(read_id, 0, transfer.left, 0, transfer.began_s, now, "cancelled")

    @property
    def copying(self) -> bool:
        """Whether the mover is copying."""
        return bool(self._copying)

    @property
    def reads(self) -> int:
        """Number of reads in progress."""
        return len(self._waiting) + len(self._copying)
