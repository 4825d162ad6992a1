"""The worker's side of legs: frames are queued at once and sent once per turn of the event loop, a batch per router."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from shared.bus.port import Bus, BusDown, MessageTooLarge
from shared.contracts.channels import FRAMES
from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import Epoch, LegId, RouterId, WorkerId
from shared.contracts.inference import Frame, FrameBatch, FrameKind, LegReport, StartLeg

log = logging.getLogger("baton.bus")

BATCH_BYTES_MAX: Final = 256 * 1024
"""A larger batch is split, so that one long response does not delay the other legs of its router."""
BUFFER_BYTES_MAX: Final = 16 * 1024 * 1024
"""Above this, ``LegFrames.drain`` waits."""
LISTS_AFTER_LEG: Final = 15
"""Empty in-flight lists that a router without legs here still gets: it may wait for a leg that was lost."""
FRAME_OVERHEAD_BYTES: Final = 64
"""Bytes of a frame on the wire besides its data."""
TOKEN_ID_BYTES: Final = 5
_NO_FRAME: Final = Frame(leg_id=LegId(""), seq=0, kind=FrameKind.DATA)
"""What an END frame has of a frame that has left, or never was."""


class LegGone(Exception):
    """The frames of a leg cannot be delivered any more; ``failure`` has the reason."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.reason}: {failure.message}")
        self.failure = failure


class LegFrames:
    """Sends the frames of one leg: ``head``, then ``data``, then exactly one ``end`` or ``fail``. No call waits."""

    __slots__ = ("_on_gone", "_sender", "_seq", "ended", "gone", "leg_id", "router_id")

    def __init__(
        self, sender: FrameSender, leg_id: LegId, router_id: RouterId, on_gone: Callable[[Failure], None] | None
    ) -> None:
        self.leg_id = leg_id
        self.router_id = router_id
        self.ended = False
        self.gone: Failure | None = None
        """Set when the router or the bus is gone; the engine can stop working on this leg."""
        self._sender = sender
        self._seq = 0
        self._on_gone = on_gone

    def head(self, status: int, content_type: str) -> None:
        """The response's HTTP status and content type."""
        if not self.ended:
            frame = Frame(
                leg_id=self.leg_id, seq=self._next(), kind=FrameKind.HEAD, status=status, content_type=content_type
            )
            self._sender.queue(self.router_id, frame, FRAME_OVERHEAD_BYTES)

    def data(
        self,
        data: bytes,
        token_ids: Sequence[int] = (),
        joined: list[int] | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        """Bytes for the client, and the tokens that they encode (see ``Frame`` for the others)."""
        if not self.ended:
            frame = Frame(
                leg_id=self.leg_id,
                seq=self._next(),
                kind=FrameKind.DATA,
                data=data,
                token_ids=list(token_ids),
                joined=joined,
                cached_tokens=cached_tokens,
            )
            self._sender.queue(self.router_id, frame, FRAME_OVERHEAD_BYTES + data_bytes(frame))

    def end(self, report: LegReport) -> None:
        """The leg is complete. Its END frame takes the place of those before it that have not left: a response that is
        sent whole is one frame.
        """
        if not self.ended:
            data = self._take_back(FrameKind.DATA) or _NO_FRAME
            head = self._take_back(FrameKind.HEAD) or _NO_FRAME
            frame = Frame(
                leg_id=self.leg_id,
                seq=self._next(),
                kind=FrameKind.END,
                data=data.data,
                token_ids=data.token_ids,
                status=head.status,
                content_type=head.content_type,
                report=report,
                joined=data.joined,
                cached_tokens=data.cached_tokens,
            )
            self._finish(frame, 2 * FRAME_OVERHEAD_BYTES + len(report.kv_transfer) + data_bytes(frame))

    def _take_back(self, kind: FrameKind) -> Frame | None:
        """The leg's newest frame, if it is of this kind and has not left; the next frame gets its number."""
        frame = self._sender.take_back(self.router_id, self.leg_id, kind)
        if frame is not None:
            self._seq = frame.seq
        return frame

    def fail(self, failure: Failure) -> None:
        if not self.ended:
            frame = Frame(leg_id=self.leg_id, seq=self._next(), kind=FrameKind.FAILURE, failure=failure)
            self._finish(frame, FRAME_OVERHEAD_BYTES + len(failure.message))

    def abandon(self) -> None:
        """Send no more of this leg: its router cancelled it."""
        self.ended = True
        self._sender.forget(self)

    async def drain(self) -> None:
        """Wait until the sender's buffer is within its bound. Raises LegGone."""
        if self.gone is None and self._sender.is_behind:
            await self._sender.drain()
        if self.gone is not None:
            raise LegGone(self.gone)

    def lose(self, failure: Failure) -> None:
        """Called by the sender when the frames cannot be delivered."""
        self.abandon()
        self.gone = failure
        if self._on_gone is not None:
            self._on_gone(failure)

    def _finish(self, frame: Frame, size: int) -> None:
        self._sender.queue(self.router_id, frame, size)
        self.abandon()

    def _next(self) -> int:
        seq = self._seq
        self._seq = seq + 1
        return seq


def data_bytes(frame: Frame) -> int:
    """What the data and tokens of a frame take on the wire."""
    return len(frame.data) + TOKEN_ID_BYTES * (len(frame.token_ids) + len(frame.joined or ()))


class _Queue:
    """Frames for one router, and what each counts in the buffer."""

    __slots__ = ("frames", "size", "sizes")

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.sizes: list[int] = []
        self.size = 0

    def add(self, frame: Frame, size: int) -> None:
        self.frames.append(frame)
        self.sizes.append(size)
        self.size += size


class FrameSender:
    """Sends the frames of all legs that one worker serves."""

    def __init__(
        self, bus: Bus, worker_id: WorkerId, epoch: Epoch, *, buffer_bytes_max: int = BUFFER_BYTES_MAX
    ) -> None:
        self._bus = bus
        self._worker_id = worker_id
        self._epoch = epoch
        self._buffer_bytes_max = buffer_bytes_max
        self._buffered_bytes = 0
        self._below_limit = asyncio.Event()
        self._below_limit.set()
        self._queued: dict[RouterId, _Queue] = {}
        self._legs: dict[LegId, LegFrames] = {}
        self._routers: dict[RouterId, int] = {}
        """Routers that had a leg here recently, and how many more in-flight lists each gets."""
        self._lists_due: set[RouterId] = set()
        """Routers whose next batch carries the in-flight list."""
        self._loop = asyncio.get_running_loop()
        self._flush: asyncio.Handle | None = None
        """Handle of the call that sends what this turn of the event loop has queued."""
        self._flusher: asyncio.Task[None] | None = None
        """Sends what cannot be sent at once."""
        bus.on_unreachable(self._on_unreachable)
        bus.on_disconnect(lambda: self._lose_all(_BUS_DOWN))

    def leg(self, start: StartLeg, on_gone: Callable[[Failure], None] | None = None) -> LegFrames:
        """Begin to serve a leg. ``on_gone`` is called once if its frames cannot be delivered any more."""
        frames = LegFrames(self, start.leg_id, start.router_id, on_gone)
        self._legs[start.leg_id] = frames
        self._routers[start.router_id] = LISTS_AFTER_LEG
        return frames

    def queue(self, router_id: RouterId, frame: Frame, size: int) -> None:
        """Send ``frame`` with all others of this turn of the event loop."""
        self._queue_of(router_id).add(frame, size)
        self._buffered_bytes += size
        if self._buffered_bytes > self._buffer_bytes_max:
            self._below_limit.clear()
        if self._flush is None:
            self._flush_soon()

    def take_back(self, router_id: RouterId, leg_id: LegId, kind: FrameKind) -> Frame | None:
        """Remove the newest frame for this router, if it is this leg's and of this kind."""
        queue = self._queued.get(router_id)
        if queue is None or not queue.frames or queue.frames[-1].leg_id != leg_id or queue.frames[-1].kind is not kind:
            return None
        size = queue.sizes.pop()
        queue.size -= size
        self._count_sent(size)
        return queue.frames.pop()

    def _queue_of(self, router_id: RouterId) -> _Queue:
        queue = self._queued.get(router_id)
        if queue is None:
            queue = self._queued[router_id] = _Queue()
        return queue

    def _flush_soon(self) -> None:
        if self._flush is None and self._flusher is None:
            # It runs after all callbacks of this turn, so it sends their frames in one batch.
            self._flush = self._loop.call_soon(self._flush_now)

    def forget(self, leg: LegFrames) -> None:
        """Drop a leg that ended or is gone."""
        self._legs.pop(leg.leg_id, None)

    @property
    def is_behind(self) -> bool:
        """Whether ``drain`` waits."""
        return self._buffered_bytes > self._buffer_bytes_max

    async def drain(self) -> None:
        """Wait until the buffer is below its limit."""
        await self._below_limit.wait()

    async def send_in_flight_lists(self) -> None:
        """Send every router the list of its legs that are in flight here. That finds a router that is gone while a
        response is not streamed, and a router finds legs whose cancel or frames were lost.
        """
        served = {leg.router_id for leg in self._legs.values()}
        for router_id, lists_left in list(self._routers.items()):
            if router_id not in served:
                self._routers[router_id] = lists_left - 1
                if not lists_left:
                    del self._routers[router_id]
                    continue
            self._lists_due.add(router_id)
            self._queue_of(router_id)
        if self._queued:
            self._flush_soon()
        await self.close()

    async def close(self) -> None:
        """Wait until everything queued has been handed to the bus."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush_now()
        while self._flusher is not None:
            await asyncio.shield(self._flusher)

    def _flush_now(self) -> None:
        """Send all batches, as far as the bus takes each at once: most never need a task."""
        self._flush = None
        try:
            for router_id in list(self._queued):
                if not self._send_now(router_id):
                    self._start_flusher()
                    return
        except Exception as bug:
            self._start_flusher(bug)

    def _send_now(self, router_id: RouterId) -> bool:
        """Whether the bus took the router's batch; if not, it is still queued."""
        queue = self._queued[router_id]
        if queue.size > BATCH_BYTES_MAX:
            return False
        del self._queued[router_id]
        in_flight = self._in_flight_legs(router_id)
        try:
            sent = self._bus.publish_now(FRAMES, self._batch(router_id, queue.frames, in_flight), key=router_id)
        except BusDown:
            sent = True
            self._lose_all(_BUS_DOWN)
        except MessageTooLarge:
            sent = False
        if sent:
            self._count_sent(queue.size)
            return True
        self._queued[router_id] = queue
        if in_flight is not None:
            self._lists_due.add(router_id)
        return False

    def _start_flusher(self, bug: Exception | None = None) -> None:
        self._flusher = self._loop.create_task(self._send_all(bug), name="send-frames")
        self._flusher.add_done_callback(self._bus.end_with)

    async def _send_all(self, bug: Exception | None) -> None:
        """Raises ``bug``, which ends the bus."""
        try:
            if bug is not None:
                raise bug
            while self._queued:
                router_id, queue = next(iter(self._queued.items()))
                del self._queued[router_id]
                await self._send(router_id, queue)
        finally:
            self._flusher = None

    async def _send(self, router_id: RouterId, queue: _Queue) -> None:
        frames: list[Frame] = []
        size = 0
        for frame, frame_size in zip(queue.frames, queue.sizes, strict=True):
            if frames and size + frame_size > BATCH_BYTES_MAX:
                await self._publish(router_id, frames, size)
                frames, size = [], 0
            frames.append(frame)
            size += frame_size
        await self._publish(router_id, frames, size, self._in_flight_legs(router_id))

    def _in_flight_legs(self, router_id: RouterId) -> list[LegId] | None:
        """If the list is due: the legs served here, and those whose END frame is still queued."""
        if router_id not in self._lists_due:
            return None
        self._lists_due.remove(router_id)
        queue = self._queued.get(router_id)
        ended = [frame.leg_id for frame in queue.frames] if queue is not None else []
        return list(dict.fromkeys([leg.leg_id for leg in self._legs.values() if leg.router_id == router_id] + ended))

    def _batch(self, router_id: RouterId, frames: list[Frame], in_flight: list[LegId] | None) -> FrameBatch:
        return FrameBatch(
            router_id=router_id, worker_id=self._worker_id, epoch=self._epoch, frames=frames, in_flight=in_flight
        )

    async def _publish(
        self, router_id: RouterId, frames: list[Frame], size: int, in_flight: list[LegId] | None = None
    ) -> None:
        try:
            await self._bus.publish(FRAMES, self._batch(router_id, frames, in_flight), key=router_id)
        except BusDown:
            self._lose_all(_BUS_DOWN)
        except MessageTooLarge as error:
            for frame in frames:
                await self._refuse(router_id, frame, str(error))
        finally:
            self._count_sent(size)

    def _count_sent(self, size: int) -> None:
        self._buffered_bytes -= size
        if self._buffered_bytes <= self._buffer_bytes_max:
            self._below_limit.set()

    async def _refuse(self, router_id: RouterId, frame: Frame, why: str) -> None:
        """Send a failure instead of a frame that is too large, with the same sequence number."""
        failure = Failure(reason=Reason.TOO_LARGE, message=why)
        leg = self._legs.get(frame.leg_id)
        failed = Frame(leg_id=frame.leg_id, seq=frame.seq, kind=FrameKind.FAILURE, failure=failure)
        if leg is not None:
            leg.lose(failure)
        await self._publish(router_id, [failed], 0)

    def _on_unreachable(self, key: str) -> None:
        self._routers.pop(RouterId(key), None)
        gone = Failure(reason=Reason.CANCELLED, message=f"router {key} is gone")
        for leg in [leg for leg in self._legs.values() if leg.router_id == key]:
            leg.lose(gone)

    def _lose_all(self, failure: Failure) -> None:
        for leg in list(self._legs.values()):
            leg.lose(failure)


_BUS_DOWN: Final = Failure(reason=Reason.BUS_DOWN, message="the connection to NATS was lost")
