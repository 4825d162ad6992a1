"""The router's side of legs: start them, read their frames, cancel them. Every loss fails its leg; none hangs it.

This is the hot path of the system. A router gets one ``FrameBatch`` per turn of a worker's event loop, whatever the
number of streams, and does one dictionary look-up and one append per frame. A leg's reader is called once per batch,
and not before the leg's end while it holds the leg.

A worker is believed about its own legs only. NATS lets it publish on subjects with its own id, the bus drops a batch
whose worker is not that of its subject, and frames of a leg that another worker serves are dropped here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from mypy_extensions import mypyc_attr

from shared.bounded import Bounded
from shared.bus.port import Bus, BusDown, Envelope, Subscription
from shared.bus.receiver import count_bad, is_logged
from shared.bus.wire import BadMessage
from shared.contracts.channels import CANCEL_LEG, FRAMES, START_LEG
from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import Epoch, LegId, RouterId, WorkerId
from shared.contracts.inference import CancelLeg, Frame, FrameBatch, FrameKind, StartLeg

log = logging.getLogger("baton.bus")

ID_SHOWN_MAX: Final = 64
FRAME_OVERHEAD_BYTES: Final = 128
"""Bytes that an unread frame counts besides its data."""
CANCELLED_MAX: Final = 4096
"""Cancelled legs that are remembered, so that their late frames cause no second cancel."""

CANCELS_WAITING_MAX: Final = 4096
"""Cancels that wait for the bus. Legs that are not cancelled for that reason are on their worker's next list."""
LISTENER_S: Final = 0.25
"""Time in which NATS says that a subject has no subscriber."""
LISTS_MISSED_MAX: Final = 3
"""A leg without any frame is lost when this many consecutive in-flight lists of its worker lack it."""

_DATA: Final = FrameKind.DATA
_FAILURE: Final = FrameKind.FAILURE
_END: Final = FrameKind.END


class LegFailed(Exception):
    """The leg failed; ``failure`` has the reason, ``worker_id`` its worker, if any. ``by_bus``: this process knows that
    NATS was lost, or had nobody to deliver the leg to; a worker cannot claim that.
    """

    def __init__(self, failure: Failure, worker_id: WorkerId | None = None, *, by_bus: bool = False) -> None:
        super().__init__(f"{failure.reason}: {failure.message}")
        self.failure = failure
        self.worker_id = worker_id
        self.by_bus = by_bus


@dataclass(slots=True)
class Orphans:
    """Legs that only one side knew, counted since the start."""

    served: int = 0
    """Served by a worker, but unknown to this router."""
    awaited: int = 0
    """Awaited by this router, but not served by their worker."""


@mypyc_attr(allow_interpreted_subclasses=True)  # Tests have readers of their own.
class LegReader:
    """Gets the frames of one leg."""

    def leg_changed(self, leg: Leg) -> None:
        """Frames have come, or the leg has ended. Called once for each batch of frames, unless the leg is ``held``, on
        the event loop; an exception is a bug, and goes to ``leg_crashed``.
        """
        raise NotImplementedError

    def leg_crashed(self, bug: Exception) -> None:
        """``leg_changed`` raised."""
        raise NotImplementedError


class Leg:
    """The router's end of one leg."""

    __slots__ = (
        "_buffered_bytes",
        "_by_bus",
        "_failure",
        "_frames",
        "_inbox",
        "_reader",
        "_seq",
        "_told",
        "ended",
        "epoch",
        "has_failed",
        "held",
        "leg_id",
        "lists_missed",
        "worker_id",
    )

    def __init__(
        self, inbox: LegInbox, reader: LegReader, leg_id: LegId, worker_id: WorkerId, epoch: Epoch | None
    ) -> None:
        self.leg_id = leg_id
        self.worker_id = worker_id
        self.epoch = epoch
        self.ended = False
        """No more frames are taken: END or FAILURE arrived, or the leg was cancelled or lost."""
        self.has_failed = False
        """Whether the leg ended without an END frame, a turn of the loop ago. In that turn the frames of other legs are
        read that came together with the failure."""
        self.held = False
        """Set by the reader, which is then called only at the end of the leg, and reads what has come when it likes."""
        self.lists_missed = 0
        self._inbox = inbox
        self._reader = reader
        self._frames: list[Frame] = []
        self._buffered_bytes = 0
        self._seq = 0
        self._failure: Failure | None = None
        self._by_bus = False
        self._told = True
        """False: the reader is about to be called."""

    def frames(self) -> list[Frame]:
        """All frames since the last call, in order; the END frame is the last of the leg."""
        frames = self._frames
        if frames:
            self._frames = []
            self._buffered_bytes = 0
        return frames

    def failure(self) -> LegFailed:
        return LegFailed(self._failure or _INTERNAL, self.worker_id, by_bus=self._by_bus)

    @property
    def is_begun(self) -> bool:
        """Whether its worker has sent a frame."""
        return self._seq > 0

    @property
    def unread(self) -> bool:
        """Whether frames wait to be read."""
        return bool(self._frames)

    def cancel(self) -> None:
        """Cancel the leg at its worker, unless it has ended. Idempotent."""
        if not self.ended:
            self._inbox.cancel(self, _CANCELLED)

    def fail(self, failure: Failure, *, by_bus: bool = False) -> None:
        """End the leg with this failure; the reader gets it after the unread frames."""
        if not self.ended:
            self.ended = True
            self._failure, self._by_bus = failure, by_bus
            self._inbox.call_soon(self._tell_failure)

    def take(self, frame: Frame, buffer_bytes_max: int) -> bool:
        """Add a frame. Answers whether ``tell`` must follow."""
        seq, kind = self._seq, frame.kind
        if frame.seq != seq:
            self._inbox.cancel(self, _lost(f"frame {seq} of leg {self.leg_id} is missing"))
            return False
        self._seq = seq + 1
        if kind is _FAILURE:
            self._inbox.forget(self)
            self.fail(frame.failure or _INTERNAL)
            return False
        self._frames.append(frame)
        if kind is _DATA:
            self._buffered_bytes += len(frame.data) + FRAME_OVERHEAD_BYTES
            if self._buffered_bytes > buffer_bytes_max:
                self._inbox.cancel(self, _SLOW)
                return False
        elif kind is _END:
            self._inbox.forget(self)
            self.ended = True
        if self.held and not self.ended:
            return False
        self._told = False
        return True

    def tell(self) -> None:
        """Call the reader, unless it has been called since the last ``take``."""
        if self._told:
            return
        self._told = True
        try:
            self._reader.leg_changed(self)
        except Exception as bug:  # It ends this leg's request, not the bus.
            self._reader.leg_crashed(bug)

    def _tell_failure(self) -> None:
        self.has_failed, self._told = True, False
        self.tell()


class LegInbox:
    """All legs of one router. ``leg_buffer_bytes_max`` limits the unread bytes of a leg with a slow client."""

    def __init__(self, bus: Bus, router_id: RouterId, *, leg_buffer_bytes_max: int) -> None:
        self.orphans = Orphans()
        self._bus = bus
        self._router_id = router_id
        self._leg_buffer_bytes_max = leg_buffer_bytes_max
        self._legs: dict[LegId, Leg] = {}
        self._cancelled = Bounded[LegId, bool](CANCELLED_MAX)
        """Cancelled legs, and whether an in-flight list has named them since."""
        self._cancels: list[CancelLeg] = []
        self._canceller: asyncio.Task[None] | None = None
        self._unheard: dict[LegId, asyncio.Future[None]] = {}
        """See ``has_listener``."""
        self._subscription: Subscription | None = None
        self.received = 0
        self.closed = False
        """No new legs are started."""
        self._loop = asyncio.get_running_loop()
        self.call_soon = self._loop.call_soon

    async def open(self) -> None:
        """Subscribe to frames. Call once, before the first ``start``."""
        self._bus.on_unreachable(self._on_unreachable)
        self._bus.on_disconnect(lambda: self._fail_all(_BUS_DOWN, by_bus=True))
        self._subscription = await self._bus.subscribe(
            FRAMES, self._on_batch, on_dropped=self._on_dropped, router_id=self._router_id
        )

    def start_now(self, start: StartLeg, reader: LegReader, headers: Mapping[str, str] | None = None) -> Leg | None:
        """Ask a worker to serve a leg. None: the bus cannot take the message at once; ``start`` waits for it.

        Raises BusDown, MessageTooLarge; all other failures end the leg.
        """
        leg = self._new_leg(start, reader)
        try:
            sent = self._bus.publish_now(START_LEG, start, headers=headers, key=start.leg_id)
        except BaseException:
            self._forget_unstarted(leg)
            raise
        if not sent:
            self._forget_unstarted(leg)
            return None
        return leg

    def hold(self) -> None:
        self._bus.hold()

    def release(self) -> None:
        self._bus.release()

    async def start(self, start: StartLeg, reader: LegReader, headers: Mapping[str, str] | None = None) -> Leg:
        """As ``start_now``, and waits until the bus can take the message."""
        leg = self._new_leg(start, reader)
        try:
            await self._bus.publish(START_LEG, start, headers=headers, key=start.leg_id)
        except BaseException:
            self._forget_unstarted(leg)
            raise
        return leg

    def _new_leg(self, start: StartLeg, reader: LegReader) -> Leg:
        leg = self._legs[start.leg_id] = Leg(self, reader, start.leg_id, start.worker_id, start.epoch)
        return leg

    def _forget_unstarted(self, leg: Leg) -> None:
        self.forget(leg)
        leg.ended = True

    def worker_lost(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """Fail every leg of this epoch of the worker, or of an earlier one."""
        lost = Failure(reason=Reason.WORKER_LOST, message=f"worker {worker_id} was lost", suspect=True)
        for leg in list(self._legs.values()):
            if leg.worker_id == worker_id and (leg.epoch is None or leg.epoch <= epoch):
                self._lose(leg, lost)

    async def has_listener(self, worker_id: WorkerId) -> bool:
        """Whether a process of this worker is connected to NATS, also one that is frozen. True where that is unknown.
        Cancels a leg that does not exist: NATS says at once when nobody listens.
        """
        leg_id = LegId(secrets.token_hex(8))
        unheard = self._unheard[leg_id] = self._loop.create_future()
        try:
            await self._bus.publish(CANCEL_LEG, CancelLeg(worker_id=worker_id, leg_id=leg_id), key=leg_id)
            await asyncio.wait([unheard], timeout=LISTENER_S)
        except BusDown:
            return True
        finally:
            del self._unheard[leg_id]
        return not unheard.done()

    def cancel(self, leg: Leg, why: Failure) -> None:
        """End the leg here and cancel it at its worker."""
        self._lose(leg, why)
        self._cancel_once(leg.worker_id, leg.leg_id)

    def forget(self, leg: Leg) -> None:
        """Ignore further frames of this leg."""
        self._legs.pop(leg.leg_id, None)

    async def close(self) -> None:
        """Cancel what still runs and stop subscription."""
        self.closed = True
        for leg in list(self._legs.values()):
            leg.cancel()
        if self._canceller is not None:
            await self._canceller
        if self._subscription is not None:
            await self._subscription.close()

    def _on_batch(self, batch: FrameBatch, _envelope: Envelope) -> None:
        legs = self._legs
        worker_id = batch.worker_id
        buffer_bytes_max = self._leg_buffer_bytes_max
        changed: list[Leg] = []
        self.received += len(batch.frames)
        for frame in batch.frames:
            leg = legs.get(frame.leg_id)
            if leg is None:
                if frame.kind < _END:
                    self._cancel_once(worker_id, frame.leg_id)
            elif leg.worker_id == worker_id:
                if leg.take(frame, buffer_bytes_max):
                    changed.append(leg)
            else:
                self._drop_foreign(worker_id, leg)
        for leg in changed:
            leg.tell()
        if batch.in_flight is not None:
            self._compare(batch.worker_id, batch.epoch, set(batch.in_flight))

    def _compare(self, worker_id: WorkerId, epoch: Epoch, in_flight: set[LegId]) -> None:
        """Compare a worker's in-flight list with the legs of this router. Legs unknown here are cancelled, again if the
        cancel was sent before the worker's previous list. Legs that the worker does not know are lost: its frames
        arrive in order, so a leg that has begun is on every list until its end.
        """
        for leg_id in in_flight - self._legs.keys():
            if self._cancelled.get(leg_id) is False:
                self._cancelled[leg_id] = True
                continue
            self._cancelled.pop(leg_id, None)
            self.orphans.served += 1
            if is_logged(self.orphans.served):
                log.warning(
                    "%s serves leg %s, which this router does not know: cancelling it (number %d since the start)",
                    worker_id,
                    leg_id[:ID_SHOWN_MAX],
                    self.orphans.served,
                )
            self._cancel_once(worker_id, leg_id)
        for leg in list(self._legs.values()):
            if leg.worker_id != worker_id:
                if leg.leg_id in in_flight:
                    self._drop_foreign(worker_id, leg)
                continue
            if leg.epoch is not None and leg.epoch > epoch:
                continue
            leg.lists_missed = 0 if leg.leg_id in in_flight else leg.lists_missed + 1
            if leg.lists_missed >= (1 if leg.is_begun else LISTS_MISSED_MAX):
                self.orphans.awaited += 1
                self.cancel(leg, _lost(f"{worker_id} does not serve leg {leg.leg_id}"))

    def _drop_foreign(self, worker_id: WorkerId, leg: Leg) -> None:
        """Count, and log within limits, a frame or an entry of an in-flight list of another worker's leg."""
        error = BadMessage(f"leg {leg.leg_id} is served by {leg.worker_id}")
        count_bad(self._bus.counts, FRAMES.filter(router_id=self._router_id, worker_id=worker_id), error)

    def _cancel_once(self, worker_id: WorkerId, leg_id: LegId) -> None:
        """Cancel a leg once, also one that failed here in an outage and is still served."""
        if leg_id in self._cancelled or len(self._cancels) >= CANCELS_WAITING_MAX:
            return
        self._cancelled[leg_id] = False
        self._cancels.append(CancelLeg(worker_id=worker_id, leg_id=leg_id))
        if self._canceller is None:
            self._canceller = self._loop.create_task(self._send_cancels(), name="cancel-legs")
            self._canceller.add_done_callback(self._bus.end_with)

    def _on_unreachable(self, key: str) -> None:
        unheard = self._unheard.get(LegId(key))
        if unheard is not None and not unheard.done():
            unheard.set_result(None)
        leg = self._legs.get(LegId(key))
        if leg is not None:
            message = f"worker {leg.worker_id} is not connected to NATS"
            self._lose(leg, Failure(reason=Reason.WORKER_LOST, message=message), by_bus=True)

    def _on_dropped(self) -> None:
        """Fail all legs: the legs of the dropped batch are unknown, and a lost END leaves no gap."""
        self._fail_all(_lost("the router's queue of frames overflowed"))

    def _fail_all(self, failure: Failure, *, by_bus: bool = False) -> None:
        for leg in list(self._legs.values()):
            self._lose(leg, failure, by_bus=by_bus)

    def _lose(self, leg: Leg, failure: Failure, *, by_bus: bool = False) -> None:
        self.forget(leg)
        leg.fail(failure, by_bus=by_bus)

    async def _send_cancels(self) -> None:
        while self._cancels:
            cancel = self._cancels.pop()
            try:
                await self._bus.publish(CANCEL_LEG, cancel)
            except BusDown:
                log.info("leg %s was not cancelled: NATS is down, so its worker fails it", cancel.leg_id)
        self._canceller = None


def _lost(message: str) -> Failure:
    return Failure(reason=Reason.FRAMES_LOST, message=message)


_CANCELLED: Final = Failure(reason=Reason.CANCELLED, message="the router cancelled the leg")
_SLOW: Final = Failure(reason=Reason.CLIENT_SLOW, message="the client reads too slowly")
_INTERNAL: Final = Failure(reason=Reason.INTERNAL, message="the worker gave no reason")
_BUS_DOWN: Final = Failure(reason=Reason.BUS_DOWN, message="the connection to NATS was lost")
