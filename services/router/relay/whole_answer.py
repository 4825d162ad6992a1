"""A response that is no stream: it is collected to its end, because until then the request can still be retried."""

from __future__ import annotations

from typing import Final

from services.router.placement.placement import Placement
from services.router.relay.running_leg import END, OK, EngineRefused, LegServices, NotAnswered
from services.router.request.context import RequestContext
from shared.bus.leg_inbox import LegFailed
from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import WorkerId
from shared.contracts.inference import Frame

NO_STREAM: Final = Failure(
    reason=Reason.BAD_MESSAGE, message="The worker that took over the stream did not answer with a stream."
)
ANSWER_BYTES_MAX: Final = 256 * 1024 * 1024
TOO_LARGE: Final = Failure(reason=Reason.INTERNAL, message="The answer is larger than the router holds.")


class WholeAnswer:
    """The frames of one leg's response, or of its engine's error."""

    def __init__(
        self, services: LegServices, context: RequestContext, worker_id: WorkerId, frames: list[Frame]
    ) -> None:
        self._services = services
        self._context = context
        self._worker_id = worker_id
        self._frames = frames
        self._size = sum([len(frame.data) for frame in frames])
        self._is_too_large = False

    def add(self, frames: list[Frame]) -> None:
        """Keep the next frames."""
        self._frames += frames
        self._size += sum([len(frame.data) for frame in frames])
        self._is_too_large = self._size > ANSWER_BYTES_MAX

    def error(self) -> NotAnswered | None:
        """Why the client does not get the response, as far as the frames tell."""
        if self._is_too_large:
            return LegFailed(TOO_LARGE)
        if self._frames[-1].kind is not END:
            return None
        if self._frames[0].status != OK:
            return EngineRefused(self._worker_id, self._frames)
        return LegFailed(NO_STREAM) if self._context.http_request.begun else None

    def send(self, placement: Placement) -> None:
        """Send the complete response."""
        services, context, frames = self._services, self._context, self._frames
        context.report = frames[-1].report
        context.status = OK
        context.timings.first_at = context.timings.last_at = services.now()
        body = b"".join([frame.data for frame in frames])
        context.http_request.answer(OK, services.headers(context, placement, frames[0].content_type), body)
