"""A response that is a stream: its events are relayed as they arrive."""

from __future__ import annotations

from typing import Final

from services.router.placement.placement import Placement
from services.router.relay.running_leg import DATA, END, OK, LegServices
from services.router.relay.start_leg import LegLoad
from services.router.request.context import RequestContext
from services.router.request.errors import EVENT_END, EVENT_STREAM
from services.router.request.timings import NOT_BROKEN
from shared.contracts.inference import Frame
from shared.telemetry.span_names import SpanName

RESUME: Final = SpanName.RESUME
LAST_EVENTS: Final = (b"data: [DONE]", b"event: message_stop\n", b"event: response.completed\n")
"""A stream that ends with one of them is complete, whatever happens to its leg afterwards."""


class StreamAnswer:
    """One leg's part of a stream: all of it, or what follows a resume."""

    def __init__(self, services: LegServices, context: RequestContext, placement: Placement, load: LegLoad) -> None:
        services.coalescer.enter()
        self._services = services
        self._context = context
        self._placement = placement
        self._load = load
        self._frame_gap_s_max = services.settings.frame_gap_s_max
        self._gaps = services.metrics.gaps.of[placement.mode].noted
        self._written_at = 0.0
        self._is_uncounted = context.cached_tokens is None
        """Whether the frame with the cached tokens may still arrive."""
        self.first_at = 0.0
        """When the leg's first data came; 0: it has not."""
        self.must_wait = False
        """The next write waits for the common moment of all streams (see ``WriteCoalescer``)."""

    def relay(self, frames: list[Frame]) -> bytes | None:
        """Send what these frames hold in one write. Returns None, or at the stream's end the data to end it with. The
        response's head waits for the first data, so that a leg that fails before it can still be retried. Raises
        OverflowError, and sends nothing, for token ids that are none.
        """
        services, context = self._services, self._context
        timings = context.timings
        data = b"".join([frame.data for frame in frames]) if len(frames) > 1 else frames[0].data
        relayed, joined = len(context.relayed), len(context.joined)
        try:
            for frame in frames:
                if frame.joined:
                    context.join(frame.joined)
                context.relayed.fromlist(frame.token_ids)
        except OverflowError:
            del context.relayed[relayed:], context.joined[joined:]
            raise
        if self._is_uncounted:
            context.cached_tokens, self._is_uncounted = cached_in(frames)
        last = frames[-1]
        if data:
            before, at = timings.last_at, services.now()
            timings.last_at = at
            if before:
                gap_s = at - before
                self._gaps.append(gap_s)
                timings.gap_s_max = max(timings.gap_s_max, gap_s)
            context.deadline_at = min(at + self._frame_gap_s_max, context.ends_at)
        elif last.kind is DATA:  # Tokens have come of which the client sees nothing yet.
            context.progressed(services.now() + self._frame_gap_s_max)
        if not self.first_at and (data or last.kind is END):
            self.first_at = self._written_at = timings.last_at or services.now()
            self._load.prompt_computed()
            self._begin(self.first_at, data)
        if last.kind is END:
            context.report = last.report
            return data
        self.must_wait = False
        if data:
            context.newest = data
            context.http_request.send(data)
            at = timings.last_at
            self.must_wait = services.coalescer.must_wait(self._written_at, at, services.inbox.received)
            self._written_at = at
        return None

    def is_complete(self) -> bool:
        """Whether the client has all of the stream, though its leg has not ended: its last event, whole. No text holds
        an unescaped line end.
        """
        data = self._context.newest
        return data.endswith(EVENT_END) and data.removesuffix(EVENT_END).rpartition(EVENT_END)[2].startswith(
            LAST_EVENTS
        )

    def _begin(self, at: float, data: bytes) -> None:
        """The first data of this attempt: it begins the response, or resumes it."""
        services, context, timings = self._services, self._context, self._context.timings
        context.answering = True
        context.progressed(at + self._frame_gap_s_max)
        if not context.http_request.begun:
            context.status = OK
            timings.first_at = timings.last_at
            context.began(data)
            context.http_request.begin(OK, services.headers(context, self._placement, EVENT_STREAM))
        elif timings.broke_at != NOT_BROKEN:
            services.metrics.resumed(at - timings.broke_at)
            context.mark(RESUME, timings.broke_at, at)
            timings.broke_at = NOT_BROKEN


def cached_in(frames: list[Frame]) -> tuple[int | None, bool]:
    """The cached tokens of the first frame that has them, and whether a later one may."""
    for frame in frames:
        if frame.cached_tokens is not None:
            return frame.cached_tokens, False
    return None, not any(frame.token_ids for frame in frames)
