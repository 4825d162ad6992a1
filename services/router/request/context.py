"""One request on its way through the router: everything that the layers know of it, in one object."""

from __future__ import annotations

import re
import secrets
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from services.router.admission.queues import QueueEntry
from services.router.decisions.decision import Decision
from services.router.placement.placement import Placement, PlacementRequest
from services.router.request.errors import EVENT_STREAM, is_anthropic
from services.router.request.facts import Mode, RequestFacts
from services.router.request.http_request import HttpRequest, header_lines, header_value
from services.router.request.prompt import Prompt
from services.router.request.timings import Timings
from services.router.request.trace import Trace
from services.router.state.worker_view import WorkerView
from shared.bus.leg_inbox import Leg, LegInbox
from shared.contracts.decisions import PrefetchRecord
from shared.contracts.engine_paths import RESPONSES
from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.inference import LegReport
from shared.http.errors import NO_SNIFFING, Header
from shared.telemetry.span_names import SpanName
from shared.telemetry.tracing import trace_named

if TYPE_CHECKING:
    from services.router.admission.queues import QueueEntry
    from services.router.decisions.decision import Decision
    from services.router.placement.placement import Placement, PlacementRequest

NEVER: Final = float("inf")
ATTACHED: Final = "a server outside of Baton began it, and its tokens are not known"
CLIENT_LEFT: Final = Failure(reason=Reason.CANCELLED, message="the client left")
CLIENT_SLOW: Final = Failure(reason=Reason.CLIENT_SLOW, message="the client reads too slowly")
EXCUSED_MAX: Final = 8
"""A connection that breaks again and again, or a worker that reports but takes no legs, ends a request."""
ID_BYTES: Final = 16
NO_WORKERS: Final[frozenset[WorkerId]] = frozenset()
RESPONSE_ID: Final = re.compile(rb'"response":\s?\{"id":\s?"([A-Za-z0-9_-]{1,128})"')
CREATED: Final = re.compile(rb'"created(?:_at)?":(\d{1,18})')


class Served(NamedTuple):
    """What a worker serves under the name that a request gives."""

    name: str
    model: str
    revision: str
    dtype: str
    adapter: str
    """Digest of the LoRA adapter's files; empty for the model itself."""

    @classmethod
    def by(cls, view: WorkerView, name: str) -> Served:
        one = view.record.fingerprint
        return cls(name, one.model, one.revision, one.dtype, view.digest_of(name))

    def same_on(self, view: WorkerView) -> bool:
        """Whether this worker serves the same under the same name."""
        return self == Served.by(view, self.name)


class RequestContext:
    """A request that is being served. It is made when the body is complete and dropped when the request has ended."""

    trace: Trace | None = None
    """What the request's spans are made from; None when tracing is off."""
    prompt: Prompt | None = None
    charged_tokens = 0
    """Tokens taken from the key's rate limit, until the request's true use is known."""
    sequences = 0
    """Sequences counted for the key, until the request ends."""

    request: PlacementRequest | None = None
    """What placement was last asked."""
    entry: QueueEntry | None = None
    """The request's entry in the admission queue, until the request ends."""
    placement: Placement | None = None
    """The placement that the present attempt runs."""
    decision: Decision | None = None
    """The last placement or rejection, in the decision log."""
    prefetch: PrefetchRecord | None = None
    """What a worker has read for it before its legs began."""
    is_prefetched = False
    """Whether a worker was told to."""
    stopped: Failure | None = None
    """Why the present attempt goes no further."""
    attempts = 0
    excused = 0
    """Attempts that the bus or a draining worker ended, up to ``EXCUSED_MAX``: no engine has failed the request."""
    resumes_excused = 0
    """Resumes among the ``excused`` attempts."""
    resuming = False
    """Whether the present attempt is a resume."""
    tried_at = 0.0
    """When the present attempt began."""
    answering = False
    """The client has received data of the present attempt."""
    deaths = 0
    """Engines that died while they computed this request."""
    digest = b""
    """See ``state.quarantine``; empty while it is not needed."""

    cached_tokens: int | None = None
    """Cached prompt tokens as the first worker would have counted them in usage; None: not known."""
    created = 0
    """The ``created`` or ``created_at`` field of the stream's first event; 0: it has none."""
    answer_id = ""
    """``StartLeg.answer_id``; empty where no event has an id that a resumed stream could not repeat."""
    resumes_max = 0
    resumes = 0
    resumed_tokens = 0
    """Tokens relayed before each resume, summed over all resumes."""
    like: Served | None = None
    """What the worker that began the stream serves: a worker with another model would continue it differently."""

    response_id = ""
    """The id in the events of a stream of /v1/responses; empty: not known."""
    newest = b""
    """The newest data of the stream."""

    status = 0
    """HTTP status of the response; 0 until it is known."""
    reason = ""
    """Why the request did not end well; empty when it did."""
    prefill_report: LegReport | None = None
    report: LegReport | None = None
    """The report of the leg that answered."""

    def __init__(
        self,
        *,
        http_request: HttpRequest,
        inbox: LegInbox,
        started_at: float,
        ends_at: float,
        on_end: Callable[[], None],
    ) -> None:
        self.http_request = http_request
        self.inbox = inbox
        self.facts = RequestFacts(path=http_request.head.path, model="")
        """Known once the body has been read."""
        self.timings = Timings(started_at=started_at)
        self.on_end = on_end
        """Called when the request has ended, whatever its response was."""
        self.ends_at = ends_at
        """When the request must have its first token, or the whole response if that is no stream. NEVER while a stream
        makes progress.
        """
        self.deadline_at = ends_at
        """Deadline of the present step (prefill leg, first frame, next frame)."""
        self.late_at = NEVER
        """When the deadline monitor found the present step late."""
        self.pings_at = NEVER
        """When the client of a stream gets a ping, unless an event comes before."""
        self.legs: list[Leg] = []
        """The legs of the present attempt."""
        self.failed_workers: dict[WorkerId, Epoch] = {}
        """Workers that failed this request. A worker that has restarted since has a later epoch."""
        self.silences: list[tuple[WorkerView, float]] = []
        """Workers that were lost before they had answered this request, and when they were last heard."""
        self.not_serving = NO_WORKERS
        """Workers whose engines do not serve the request's path."""
        self.declined_by = NO_WORKERS
        """The worker whose default of the cache hit threshold refused the request, avoided while another can serve it.
        """
        self.busy_workers: set[WorkerId] = set()
        """Workers that were full when this request was last tried."""
        self.relayed = array("I")
        """Token ids of all frames that were relayed, in order: a request migration continues after them."""
        self.joined = array("I")
        """Indexes in ``relayed`` of tokens that the engine's server received together with the one before."""

    def read(self, facts: RequestFacts, resumes_max: int, ping_s: float) -> None:
        """The body has been read. ``ping_s``: see ``Settings.stream_ping_s``."""
        self.facts = facts
        if facts.stream and ping_s:
            self.pings_at = self.timings.started_at + ping_s
        self.resumes_max = resumes_max
        if facts.path == RESPONSES and facts.stream:
            self.answer_id = secrets.token_hex(ID_BYTES)

    def model(self) -> str:
        """The model that the client named, else that of the worker that serves the request; empty: neither is known."""
        placement = self.placement
        return self.facts.model or (placement.decode.record.model if placement is not None else "")

    def trace_id(self) -> str:
        """For log lines; empty: there is none."""
        return trace_named(self.http_request.head.trace) if self.trace is None else self.trace.name()

    def mark(self, name: SpanName, begun_at: float, ended_at: float) -> None:
        """Note a span of the router's own work."""
        if self.trace is not None:
            self.trace.mark(name, begun_at, ended_at)

    def allow(self, now: float, step_s: float) -> None:
        """The present step may take ``step_s`` seconds, within the request's time budget."""
        self.deadline_at = min(now + step_s, self.ends_at)
        self.late_at = NEVER

    def progressed(self, next_at: float) -> None:
        """The engine generates a stream: only its silence ends the request now. The next token is due at ``next_at``.
        An attempt that was stopped may not go on.
        """
        if self.stopped is None:
            self.ends_at = NEVER
        self.deadline_at = min(next_at, self.ends_at)

    def broke_off(self, ends_at: float) -> None:
        """A stream has stopped to make progress: the first token of the next attempt is due at ``ends_at``."""
        if self.ends_at == NEVER:
            self.ends_at = ends_at

    def may_retry(self, attempts_max: int) -> bool:
        """Whether another attempt is allowed. A response that has begun can only be resumed."""
        if self.http_request.begun:
            return not self.why_not_resumable() and self.resumes - self.resumes_excused < self.resumes_max
        return self.attempts - self.excused < attempts_max

    def excuse(self) -> None:
        """No engine has failed the present attempt, which counts against no limit then."""
        if self.excused < EXCUSED_MAX:
            self.excused += 1
            self.resumes_excused += self.resuming

    def why_not_resumable(self) -> str:
        """Why the stream, which has begun, cannot continue at another worker; empty when it can."""
        if self.placement is not None and self.placement.decode.record.attached:
            return ATTACHED
        return self.facts.why_not_resumable()

    def begin_attempt(self, placement: Placement, now: float) -> None:
        """Run this placement next. What the attempt before reported does not count for it."""
        self.tried_at = now
        self.legs.clear()
        self.stopped = CLIENT_LEFT if self.http_request.left else None
        self.attempts += 1
        self.answering = False
        self.resuming = self.http_request.begun
        if self.resuming:
            self.resumes += 1
            self.resumed_tokens += len(self.relayed)
        self.placement = placement
        self.timings.prefill_s = -1.0
        self.prefill_report = None

    def give_up(self, failure: Failure) -> None:
        """The present attempt has failed: its workers stop, and release KV that they keep for it."""
        for leg in self.legs:
            self.inbox.cancel(leg, failure)

    def started(self, leg: Leg) -> None:
        """Add a leg. ``stop`` may have come while the leg was being started: then it is cancelled here."""
        self.legs.append(leg)
        if self.stopped is not None:
            self.inbox.cancel(leg, self.stopped)

    def stop(self, failure: Failure) -> None:
        """Stop this attempt's legs, here and at their workers; readers of their frames get LegFailed.

        A single leg is cancelled even when it has ended: the worker of a prefill leg still keeps KV for the decode leg
        that will now never read it.
        """
        if self.stopped is None:
            self.stopped = failure
        for leg in self.legs:
            if not leg.ended or len(self.legs) == 1:
                self.inbox.cancel(leg, failure)

    def began(self, data: bytes) -> None:
        """``data`` are the stream's first bytes. A resumed stream repeats their ``created``."""
        if found := CREATED.search(data):
            self.created = int(found[1])
        if self.facts.path == RESPONSES and (found := RESPONSE_ID.search(data)):
            self.response_id = found[1].decode()

    def join(self, indexes: list[int]) -> None:
        """``indexes`` of the next frame's tokens that its engine received together with the one before."""
        before = len(self.relayed)
        self.joined.extend([before + index for index in indexes])

    def decision_headers(self) -> list[Header]:
        """The id under which ``/baton/decisions`` explains the placement."""
        if self.decision is None:
            return []
        return [(DECISION_HEADER.encode(), self.decision.decision_id.encode())]

    def client_left(self) -> None:
        """Called by ``HttpRequest.client_left``, which says what else happens then."""
        self.stop(CLIENT_SLOW if self.http_request.slow else CLIENT_LEFT)

    def close(self) -> None:
        """Cancel all that still runs, and let go of it: with its legs the request would be garbage in a cycle."""
        self.deadline_at = NEVER
        for leg in self.legs:
            leg.cancel()
        self.legs.clear()


DECISION_HEADER: Final = "x-baton-decision"
UNBUFFERED: Final = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
"""Headers of a stream: proxies would keep its events back until it ends."""
FIXED_HEADERS_MAX: Final = 4096
"""Maximum number of cached combinations. A plain dict is cleared when it is full: compiled code reads it without a
call, unlike ``Bounded``."""


class ResponseHeaders:
    """Makes response headers: the workers that serve the request, and the ids to ask about it. Those that depend only
    on the workers are cached for each combination.
    """

    def __init__(self) -> None:
        self._fixed: dict[tuple[Mode, str, str, str, bool], bytes] = {}

    def of(self, context: RequestContext, placement: Placement, content_type: str) -> bytes:
        """See ``header_lines``."""
        prefill = placement.prefill.record.worker_id if placement.prefill is not None else ""
        key = (placement.mode, content_type, placement.decode.record.worker_id, prefill, placement.streamed)
        fixed = self._fixed.get(key)
        if fixed is None:
            if len(self._fixed) >= FIXED_HEADERS_MAX:
                self._fixed.clear()
            fixed = self._fixed[key] = header_lines(_fixed_headers(*key))
        named, decision = context.http_request.head.request_id, context.decision
        decided = f"{DECISION_HEADER}: {decision.decision_id}\r\n" if decision is not None else ""
        own = f"request-id: {named}\r\n" if is_anthropic(context.http_request.head.path) else ""
        return fixed + f"x-request-id: {named}\r\n{own}{decided}".encode()


def early_headers(context: RequestContext) -> bytes:
    """Headers of a stream that has begun before its workers are known."""
    head = context.http_request.head
    headers = [(b"content-type", EVENT_STREAM.encode()), NO_SNIFFING, *UNBUFFERED]
    headers.append((b"x-request-id", head.request_id.encode()))
    if is_anthropic(head.path):
        headers.append((b"request-id", head.request_id.encode()))
    return header_lines([*headers, *context.decision_headers()])


def _fixed_headers(mode: Mode, content_type: str, decode: str, prefill: str, streamed: bool) -> list[Header]:
    headers = [
        (b"content-type", header_value(content_type)),
        NO_SNIFFING,
        (b"x-baton-mode", mode.value.encode()),
        (b"x-baton-decode-worker", header_value(decode)),
    ]
    if content_type.startswith(EVENT_STREAM):
        headers += UNBUFFERED
    if prefill:
        headers.append((b"x-baton-prefill-worker", header_value(prefill)))
        headers.append((b"x-baton-handoff", b"streamed" if streamed else b"offered"))
    return headers
