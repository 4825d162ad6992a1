"""What all legs of a placed request do: start at a worker, read frames, count as load, end once.

Everything here is called back: by the inbox when a leg's frames have come, by timers, by the client's connection. A
coroutine for each leg would cost more than all that it does. Only what must wait for the bus or the client is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from services.router.placement.placement import Placement
from services.router.relay.request_tasks import RequestTasks
from services.router.relay.start_leg import LegLoad, LegLoads, LegStarter
from services.router.relay.write_coalescer import WriteCoalescer
from services.router.request.context import RequestContext
from services.router.settings import Settings
from services.router.state.worker_speeds import WorkerSpeeds
from services.router.telemetry.request_metrics import RequestMetrics
from services.router.telemetry.tracing import Tracing
from shared.bus.leg_inbox import Leg, LegFailed, LegInbox, LegReader
from shared.bus.port import BusDown, MessageTooLarge
from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import WorkerId
from shared.contracts.inference import Frame, FrameKind, LegReport, StartLeg

if TYPE_CHECKING:
    from services.router.relay.attempt import Attempt

HEAD: Final = FrameKind.HEAD
DATA: Final = FrameKind.DATA
END: Final = FrameKind.END
OK: Final = 200
STATUS_MAX: Final = 599
REFUSAL_BYTES_MAX: Final = 500
"""Maximum length of the quotation from an engine's error body in a stream's last event."""
NO_HEAD: Final = Failure(reason=Reason.BAD_MESSAGE, message="The leg's answer does not begin with a head.")


class EngineRefused(Exception):
    """The engine answered a leg with an HTTP error of its own, which is passed on to the client unchanged."""

    def __init__(self, worker_id: WorkerId, frames: list[Frame]) -> None:
        head = frames[0]
        super().__init__(f"status {head.status}")
        self.worker_id = worker_id
        self.status = head.status
        self.content_type = head.content_type
        self.body = b"".join([frame.data for frame in frames])

    def as_text(self) -> str:
        """For the client of a stream, whose status has already been sent."""
        quoted = self.body[:REFUSAL_BYTES_MAX].decode(errors="replace")
        return f"The engine refused to continue ({self.status}): {quoted}"


NotAnswered = LegFailed | EngineRefused | BusDown | MessageTooLarge
"""Why an attempt did not give the client its response."""


@dataclass(frozen=True, kw_only=True)
class LegServices:
    """What the legs of all requests use of the router."""

    settings: Settings
    attempts_max: int
    now: Callable[[], float]
    inbox: LegInbox
    starter: LegStarter
    loads: LegLoads
    speeds: WorkerSpeeds
    tracing: Tracing
    metrics: RequestMetrics
    headers: Callable[[RequestContext, Placement, str], bytes]
    coalescer: WriteCoalescer
    tasks: RequestTasks


class RunningLeg(LegReader):
    """One leg from its start to its end, with its load on the worker and its times."""

    def __init__(self, services: LegServices, attempt: Attempt, start: StartLeg) -> None:
        self.services = services
        self.attempt = attempt
        self.context = attempt.context
        self.start = start
        self.begun_at = services.now()
        self.over = False
        request = self.context.request
        hashes = request.hashes if request is not None else ()
        self.load = LegLoad(services.loads, start, attempt.placement.context_tokens, hashes)
        self.frames: list[Frame] = []
        """Frames that were read and are still needed."""
        self._leg: Leg | None = None
        self._times = services.tracing.leg(self.context, start)

    def open(self) -> None:
        """Send the leg to its worker."""
        context = self.context
        if context.stopped is not None:
            self.fail(LegFailed(context.stopped))
            return
        headers = context.http_request.head.trace if self._times is None else self._times.headers()
        try:
            leg = self.services.inbox.start_now(self.start, self, headers)
        except (BusDown, MessageTooLarge) as error:
            self.fail(error)
            return
        if leg is None:
            self.services.tasks.spawn(context, self._open_later(headers), "start-leg")
        else:
            self._opened(leg)

    async def _open_later(self, headers: dict[str, str] | None) -> None:
        try:
            self._opened(await self.services.inbox.start(self.start, self, headers))
        except (BusDown, MessageTooLarge) as error:
            self.fail(error)
        except Exception as bug:
            self.leg_crashed(bug)

    def _opened(self, leg: Leg) -> None:
        self._leg = leg
        self.load.sent()
        self.context.started(leg)
        if leg.unread or leg.has_failed:  # It was answered while the message was being sent.
            self.leg_changed(leg)

    def leg_changed(self, leg: Leg) -> None:
        """See ``LegReader``."""
        if self.over or self._leg is None or self.waits(leg):
            return
        frames = leg.frames()
        if frames:
            self.read(frames)
        if leg.has_failed and not self.over:
            self.broke(leg.failure())

    def leg_crashed(self, bug: Exception) -> None:
        """See ``LegReader``."""
        self.attempt.crashed(bug)

    def waits(self, leg: Leg) -> bool:
        """Whether frames are left in the leg for now. Who says so calls ``leg_changed`` later."""
        del leg
        return False

    def read(self, frames: list[Frame]) -> None:
        """The next frames, at least one."""
        raise NotImplementedError

    def broke(self, error: LegFailed) -> None:
        """The leg has ended without an END frame."""
        self.fail(error)

    def fail(self, error: NotAnswered) -> None:
        """It ends without its result."""
        raise NotImplementedError

    def close(self, error: Exception | None) -> None:
        """It is over: its load counts no more."""
        self.over, self._leg = True, None
        if self._times is not None:
            self._times.ended(self.services.now(), error)
        self.load.ended()

    def learn(self, report: LegReport | None, took_s: float | None) -> None:
        """It has ended well: learn the worker's speed from it. ``took_s``: until its first token, if any."""
        self.services.speeds.leg_ended(self.start.worker_id, self.start.epoch, report, took_s)


def is_head(frame: Frame) -> bool:
    """Whether it can be a leg's first frame: a head, or a whole response, with a status that HTTP has."""
    return (frame.kind is HEAD or frame.kind is END) and OK <= frame.status <= STATUS_MAX
