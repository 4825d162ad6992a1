"""Records all KV messages on one NATS server: legs and their reports, leases, grants, releases and load reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from shared.bus.nats_bus import connect_nats
from shared.bus.port import Bus, Envelope
from shared.contracts.channels import FRAMES, KV_GRANT, KV_LEASE, KV_RELEASE, LOAD, START_LEG
from shared.contracts.inference import FrameBatch, FrameKind, LegKind, LegReport, StartLeg
from shared.contracts.kv_exchange import KvExchangeState, KvGrant, KvTransferReport, LeaseKv, ReleaseKv
from shared.contracts.load import LoadReport

SOON_S_MAX = 60.0
SETTLED_S_MAX = 25.0
"""Less than a lease, so that passing proves that unneeded leases are released and do not just expire."""


@dataclass
class SeenLeg:
    """One leg as observed on the bus."""

    start: StartLeg
    ended: bool = False
    report: LegReport | None = None

    @property
    def transfer_report(self) -> KvTransferReport:
        assert self.report is not None, self
        assert self.report.kv is not None, f"a {self.start.kind} leg without a transfer report"
        return self.report.kv


@dataclass
class Tap:
    """Subscribes and stores every message. Use as ``async with Tap(url) as tap``."""

    url: str
    legs: dict[str, SeenLeg] = field(default_factory=dict)
    loads: dict[str, LoadReport] = field(default_factory=dict)
    leases: list[LeaseKv] = field(default_factory=list)
    grants: list[KvGrant] = field(default_factory=list)
    releases: list[ReleaseKv] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        self._changed = asyncio.Event()
        self.bus: Bus = await connect_nats(self.url, name="tap", connect_s_max=30.0)
        await self.bus.subscribe(START_LEG, self._on_start)
        await self.bus.subscribe(FRAMES, self._on_frames)
        await self.bus.subscribe(LOAD, self._on_load)
        for channel, messages in ((KV_LEASE, self.leases), (KV_GRANT, self.grants), (KV_RELEASE, self.releases)):
            await self.bus.subscribe(channel, self._append_to(messages))
        return self

    async def __aexit__(self, *_failure: object) -> None:
        await self.bus.close()

    def _on_start(self, start: StartLeg, _envelope: Envelope) -> None:
        self.legs[start.leg_id] = SeenLeg(start)
        self._changed.set()

    def _on_frames(self, batch: FrameBatch, _envelope: Envelope) -> None:
        for frame in batch.frames:
            leg = self.legs.get(frame.leg_id)
            if leg is not None and frame.kind in (FrameKind.END, FrameKind.FAILURE):
                leg.ended, leg.report = True, frame.report
        self._changed.set()

    def _on_load(self, report: LoadReport, _envelope: Envelope) -> None:
        self.loads[report.worker_id] = report
        self._changed.set()

    def _append_to(self, messages: list[Any]) -> Callable[[Any, Envelope], None]:
        def append(message: Any, _envelope: Envelope) -> None:
            messages.append(message)
            self._changed.set()

        return append

    async def until(self, condition: Callable[[], Any], what: str, s_max: float = SOON_S_MAX) -> Any:
        """Wait until ``condition`` returns a true value and return it; it is called after each message."""
        try:
            async with asyncio.timeout(s_max):
                while not (held := condition()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"not within {s_max:g} s: {what}") from None
        return held

    async def legs_of(self, request_id: str) -> dict[LegKind, SeenLeg]:
        """The legs of a request by kind, once all have ended."""

        def ended() -> dict[LegKind, SeenLeg]:
            found = [leg for leg in self.legs.values() if leg.start.request_id == request_id]
            return {leg.start.kind: leg for leg in found} if found and all(leg.ended for leg in found) else {}

        return await self.until(ended, f"the legs of {request_id} have ended")

    def exchange_state(self, worker_id: str) -> KvExchangeState:
        """Leases and reads in the worker's last load report."""
        state = self.loads[worker_id].exchange
        assert state is not None, f"{worker_id} reports no KV exchange state"
        return state

    async def until_settled(self, *worker_ids: str, s_max: float = SETTLED_S_MAX) -> None:
        """Wait until new load reports of these workers show no leg, no lease, no pinned block and no read."""
        for worker_id in worker_ids:
            self.loads.pop(worker_id, None)

        def settled() -> bool:
            return all(self._settled(worker_id) for worker_id in worker_ids)

        try:
            await self.until(settled, f"{worker_ids} pin and read nothing", s_max)
        except AssertionError as error:
            raise AssertionError(
                f"{error}; last load reports: {[self.loads.get(name) for name in worker_ids]}"
            ) from None

    def _settled(self, worker_id: str) -> bool:
        load = self.loads.get(worker_id)
        if load is None:
            return False
        state = self.exchange_state(worker_id)
        return not (load.legs or load.running or state.leases or state.pinned_blocks or state.reads)
