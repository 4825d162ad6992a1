"""The router's side of legs: start them, read their frames, cancel them. Every loss fails its leg; none hangs it.

This is the hot path of the system. A router gets one ``FrameBatch`` per turn of a worker's event loop, whatever the
number of streams, and does one dictionary look-up and one append per frame. A waiter is woken once per batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from shared.bus.port import Bus, BusDown, Envelope, Subscription
from shared.contracts.channels import CANCEL_LEG, FRAMES, START_LEG
from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import Epoch, LegId, RouterId, WorkerId
from shared.contracts.inference import CancelLeg, Frame, FrameBatch, FrameKind, StartLeg

log = logging.getLogger("baton.bus")

FRAME_OVERHEAD_BYTES = 128
"""What an unread frame costs besides its data."""
CANCELLED_KEPT_MAX = 4096
"""Cancelled legs that are remembered: frames of theirs which were under way need no second cancel."""

ROLLS_MISSED_MAX = 3
"""A leg that was never answered and is not on so many rolls of its worker, one after the other, was never begun."""

_DATA = FrameKind.DATA
_FAILURE = FrameKind.FAILURE
_END = FrameKind.END


class LegFailed(Exception):
    """The leg did not end well; ``failure`` says why, ``worker_id`` whose leg it was, if anybody's."""

    def __init__(self, failure: Failure, worker_id: WorkerId | None = None) -> None:
        super().__init__(f"{failure.reason}: {failure.message}")
        self.failure = failure
        self.worker_id = worker_id


@dataclass(slots=True)
class Orphans:
    """Legs that one side knew of and the other did not, since the start."""

    served: int = 0
    """By a worker, though nobody here waited for them."""
    awaited: int = 0
    """Here, though their worker did not serve them."""


class Leg:
    """One leg as its router sees it."""

    __slots__ = (
        "_buffered_bytes",
        "_failure",
        "_frames",
        "_inbox",
        "_seq",
        "_waiter",
        "ended",
        "epoch",
        "leg_id",
        "rolls_missed",
        "worker_id",
    )

    def __init__(self, inbox: LegInbox, leg_id: LegId, worker_id: WorkerId, epoch: Epoch | None) -> None:
        self.leg_id = leg_id
        self.worker_id = worker_id
        self.epoch = epoch
        self.ended = False
        """No more frames will come: END or FAILURE arrived, or the leg was cancelled or lost."""
        self.rolls_missed = 0
        self._inbox = inbox
        self._frames: list[Frame] = []
        self._buffered_bytes = 0
        self._seq = 0
        self._failure: Failure | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def frames(self) -> list[Frame]:
        """All frames that arrived since the last call, in order, at least one. The last one is the END frame.

        One caller at a time. Raises LegFailed, after the frames that came before the failure were read.
        """
        if not self._frames:
            if self.ended:
                raise LegFailed(self._failure or _ENDED, self.worker_id)
            self._waiter = waiter = asyncio.get_running_loop().create_future()
            try:
                await waiter
            finally:
                if self._waiter is waiter:
                    self._waiter = None
            if not self._frames:
                raise LegFailed(self._failure or _ENDED, self.worker_id)
        frames = self._frames
        self._frames = []
        self._buffered_bytes = 0
        return frames

    @property
    def is_begun(self) -> bool:
        """Whether its worker has answered."""
        return self._seq > 0

    @property
    def unread(self) -> bool:
        """Whether frames wait for their reader."""
        return bool(self._frames)

    def cancel(self) -> None:
        """Nobody waits for this leg any more: tell the worker, unless it has ended. Idempotent."""
        if not self.ended:
            self._inbox.cancel(self, _CANCELLED)

    def fail(self, failure: Failure) -> None:
        """End the leg with this failure; a reader sees it after the frames it has not read yet."""
        if not self.ended:
            self.ended = True
            self._failure = failure
            self._wake()

    def take(self, frame: Frame, buffer_bytes_max: int) -> None:
        """One frame arrived."""
        if frame.seq != self._seq:
            self._inbox.cancel(self, _lost(f"frame {self._seq} of leg {self.leg_id} is missing"))
            return
        self._seq += 1
        kind = frame.kind
        if kind is _FAILURE:
            self._inbox.forget(self)
            self.fail(frame.failure or _INTERNAL)
            return
        self._frames.append(frame)
        if kind is _DATA:
            self._buffered_bytes += len(frame.data) + FRAME_OVERHEAD_BYTES
            if self._buffered_bytes > buffer_bytes_max:
                self._inbox.cancel(self, _SLOW)
                return
        elif kind is _END:
            self._inbox.forget(self)
            self.ended = True
        if self._waiter is not None:
            self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)


class LegInbox:
    """All legs of one router. ``leg_buffer_bytes_max`` bounds what a slow client's leg may hold back."""

    def __init__(self, bus: Bus, router_id: RouterId, *, leg_buffer_bytes_max: int) -> None:
        self.orphans = Orphans()
        self._bus = bus
        self._router_id = router_id
        self._leg_buffer_bytes_max = leg_buffer_bytes_max
        self._legs: dict[LegId, Leg] = {}
        self._cancelled: dict[LegId, bool] = {}
        """And whether they were on a roll after that."""
        self._cancels: list[CancelLeg] = []
        self._canceller: asyncio.Task[None] | None = None
        self._subscription: Subscription | None = None
        self.closed = False
        """Nothing new is started any more."""

    async def open(self) -> None:
        """Listen for frames. Call once, before the first ``start``."""
        self._bus.on_unreachable(self._on_unreachable)
        self._bus.on_disconnect(lambda: self._fail_all(_BUS_DOWN))
        self._subscription = await self._bus.subscribe(
            FRAMES, self._on_batch, on_dropped=self._on_dropped, router_id=self._router_id
        )

    async def start(self, start: StartLeg, headers: Mapping[str, str] | None = None) -> Leg:
        """Ask a worker to serve a leg. Raises BusDown, MessageTooLarge; all else comes out of ``Leg.frames``."""
        leg = Leg(self, start.leg_id, start.worker_id, start.epoch)
        self._legs[start.leg_id] = leg
        try:
            await self._bus.publish(START_LEG, start, headers=headers, key=start.leg_id)
        except BaseException:
            self.forget(leg)
            leg.ended = True
            raise
        return leg

    def worker_lost(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """Fail every leg that this life of the worker, or an earlier one, was serving."""
        for leg in list(self._legs.values()):
            if leg.worker_id == worker_id and (leg.epoch is None or leg.epoch <= epoch):
                self._lose(leg, Failure(reason=Reason.WORKER_LOST, message=f"worker {worker_id} was lost"))

    def cancel(self, leg: Leg, why: Failure) -> None:
        """End the leg here and tell its worker to stop."""
        self._lose(leg, why)
        self._tell_to_stop(leg.worker_id, leg.leg_id)

    def forget(self, leg: Leg) -> None:
        """Frames of this leg are ignored from now on."""
        self._legs.pop(leg.leg_id, None)

    async def close(self) -> None:
        """Cancel what still runs and stop listening."""
        self.closed = True
        for leg in list(self._legs.values()):
            leg.cancel()
        if self._canceller is not None:
            await self._canceller
        if self._subscription is not None:
            await self._subscription.close()

    def _on_batch(self, batch: FrameBatch, _envelope: Envelope) -> None:
        legs = self._legs
        buffer_bytes_max = self._leg_buffer_bytes_max
        for frame in batch.frames:
            leg = legs.get(frame.leg_id)
            if leg is not None:
                leg.take(frame, buffer_bytes_max)
            elif frame.kind < _END:
                self._tell_to_stop(batch.worker_id, frame.leg_id)
        if batch.serving is not None:
            self._compare(batch.worker_id, batch.epoch, set(batch.serving))

    def _compare(self, worker_id: WorkerId, epoch: Epoch, serving: set[LegId]) -> None:
        """A worker tells which legs it serves. Those that nobody here waits for it is told to stop, again if that was
        said before its last roll; those that it knows nothing of are lost. Its frames come in order, so what it has
        begun to answer is on every roll until its end.
        """
        for leg_id in serving - self._legs.keys():
            if self._cancelled.get(leg_id) is False:
                self._cancelled[leg_id] = True
                continue
            self._cancelled.pop(leg_id, None)
            self.orphans.served += 1
            log.warning("%s serves leg %s, which nobody waits for: it is told to stop", worker_id, leg_id)
            self._tell_to_stop(worker_id, leg_id)
        for leg in list(self._legs.values()):
            if leg.worker_id != worker_id or (leg.epoch is not None and leg.epoch > epoch):
                continue
            leg.rolls_missed = 0 if leg.leg_id in serving else leg.rolls_missed + 1
            if leg.rolls_missed >= (1 if leg.is_begun else ROLLS_MISSED_MAX):
                self.orphans.awaited += 1
                self.cancel(leg, _lost(f"{worker_id} does not serve leg {leg.leg_id}"))

    def _tell_to_stop(self, worker_id: WorkerId, leg_id: LegId) -> None:
        """Once per leg: cancel it, also when it was given up in an outage and its worker still serves it."""
        if leg_id in self._cancelled:
            return
        self._cancelled[leg_id] = False
        if len(self._cancelled) > CANCELLED_KEPT_MAX:
            del self._cancelled[next(iter(self._cancelled))]
        self._cancels.append(CancelLeg(worker_id=worker_id, leg_id=leg_id))
        if self._canceller is None:
            self._canceller = asyncio.get_running_loop().create_task(self._send_cancels(), name="cancel-legs")
            self._canceller.add_done_callback(self._bus.end_with)

    def _on_unreachable(self, key: str) -> None:
        leg = self._legs.get(LegId(key))
        if leg is not None:
            self._lose(leg, Failure(reason=Reason.WORKER_LOST, message=f"worker {leg.worker_id} does not listen"))

    def _on_dropped(self) -> None:
        """Which legs the lost batch belonged to is unknown, and a lost END would never show as a gap."""
        self._fail_all(_lost("the router's queue of frames overflowed"))

    def _fail_all(self, failure: Failure) -> None:
        for leg in list(self._legs.values()):
            self._lose(leg, failure)

    def _lose(self, leg: Leg, failure: Failure) -> None:
        self.forget(leg)
        leg.fail(failure)

    async def _send_cancels(self) -> None:
        while self._cancels:
            cancel = self._cancels.pop()
            try:
                await self._bus.publish(CANCEL_LEG, cancel)
            except BusDown:
                log.info("leg %s was not cancelled: NATS is down, its worker fails it", cancel.leg_id)
        self._canceller = None


def _lost(message: str) -> Failure:
    return Failure(reason=Reason.FRAMES_LOST, message=message)


_ENDED = Failure(reason=Reason.INTERNAL, message="the leg has ended; its END frame was already read")
_CANCELLED = Failure(reason=Reason.CANCELLED, message="the router cancelled the leg")
_SLOW = Failure(reason=Reason.CLIENT_SLOW, message="the client reads too slowly")
_INTERNAL = Failure(reason=Reason.INTERNAL, message="the worker gave no reason")
_BUS_DOWN = Failure(reason=Reason.BUS_DOWN, message="the connection to NATS was lost")
