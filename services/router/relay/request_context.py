"""One request on its way: its exchange, the legs that run just now, its deadline, and its story for the record."""

from __future__ import annotations

from services.router.http.request import Header, HttpRequest
from services.router.placement.decision import Decision
from services.router.placement.placement import Placement
from services.router.placement.request_fields import Mode, RequestFacts
from services.router.relay.attempt import Attempts
from services.router.telemetry.kv_usage import cached_tokens, kv_moves, kv_numbers
from services.router.telemetry.trace import Trace
from services.router.telemetry.ttft import Legs, RouterTimes, ttft_parts, ttft_s
from services.router.tokenize.segments import Prompt
from shared.bus.leg_inbox import Leg, LegInbox
from shared.contracts.decisions import TtftParts
from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import DecisionId
from shared.contracts.inference import LegReport, RequestFinished
from shared.telemetry.span_names import SpanName

NEVER = float("inf")
LEFT = Failure(reason=Reason.CANCELLED, message="the client left")
SLOW = Failure(reason=Reason.CLIENT_SLOW, message="the client reads too slowly")


class Spent:
    """Where the router's own time went before the legs of the last attempt: one behind the other, in seconds."""

    __slots__ = ("admission_s", "failed_s", "gap_s_max", "place_s", "tokenize_s", "trace")

    def __init__(self) -> None:
        self.admission_s = 0.0
        """In the waiting room."""
        self.tokenize_s = 0.0
        self.place_s = 0.0
        """All placements together."""
        self.failed_s = 0.0
        """Attempts that failed, from their placement to their failure."""
        self.gap_s_max = 0.0
        """The longest time between two pieces of its stream: the client's, no part of the above."""
        self.trace: Trace | None = None
        """What the request's spans will be drawn from, where anybody traces."""

    def times(self) -> RouterTimes:
        """As they are now."""
        return RouterTimes(
            admission_s=self.admission_s, tokenize_s=self.tokenize_s, place_s=self.place_s, failed_s=self.failed_s
        )


class Story:
    """What happened, in the terms of ``RequestFinished``. Times are on the monotonic clock; 0 where not reached."""

    __slots__ = (
        "answered_at",
        "first_at",
        "last_at",
        "placed",
        "prefill_report",
        "prefill_s",
        "prompt",
        "reason",
        "report",
        "spent",
        "started_at",
        "status",
    )

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self.status = 0
        self.reason = ""
        self.prompt: Prompt | None = None
        self.placed: Placement | None = None
        self.spent = Spent()
        self.prefill_s = -1.0
        self.prefill_report: LegReport | None = None
        self.report: LegReport | None = None
        self.first_at = 0.0
        self.last_at = 0.0
        self.answered_at = 0.0
        """When the client had its answer, if something was waited for after that."""

    def attempted(self, placed: Placement) -> None:
        """A placement is tried; what an earlier one cost is no part of what this one will."""
        self.placed = placed
        self.prefill_s = -1.0
        self.prefill_report = None


class RequestContext:
    """A request that is being served."""

    __slots__ = (
        "attempts",
        "charged",
        "deadline_at",
        "decision",
        "ends_at",
        "exchange",
        "facts",
        "inbox",
        "late_at",
        "legs",
        "stopped",
        "story",
    )

    def __init__(
        self,
        exchange: HttpRequest,
        facts: RequestFacts,
        inbox: LegInbox,
        attempts: Attempts,
        now: float,
        ends_at: float,
    ) -> None:
        self.exchange = exchange
        self.facts = facts
        self.inbox = inbox
        self.attempts = attempts
        self.charged = 0
        """Tokens taken of its key's rate_limit until it is known what it used."""
        self.ends_at = ends_at
        """When the request's whole budget is spent."""
        self.deadline_at = ends_at
        """When the present hop is late."""
        self.legs: list[Leg] = []
        """Of the present attempt."""
        self.stopped: Failure | None = None
        """Why the present attempt goes no further."""
        self.late_at = NEVER
        """When the present hop was found late."""
        self.decision: Decision | None = None
        """The last placement, or refusal, in the log."""
        self.story = Story(now)

    def mark(self, name: SpanName, begun_at: float, ended_at: float) -> None:
        """The router has done something of which a trace tells."""
        trace = self.story.spent.trace
        if trace is not None:
            trace.mark(name, begun_at, ended_at)

    def allow(self, now: float, hop_s: float) -> None:
        """The present hop may take ``hop_s`` seconds, but no longer than what is left of the request's budget."""
        self.deadline_at = min(now + hop_s, self.ends_at)
        self.late_at = NEVER

    def attempt(self, placed: Placement) -> None:
        """A placement is tried."""
        self.legs.clear()
        self.stopped = LEFT if self.exchange.left else None
        self.attempts.begin(resumed=self.exchange.begun)
        self.story.attempted(placed)

    def give_up(self, failure: Failure) -> None:
        """The present attempt has failed: none of its workers is to go on, if it still could, or to keep KV for it."""
        for leg in self.legs:
            self.inbox.cancel(leg, failure)

    def started(self, leg: Leg) -> None:
        """One more leg; nobody could stop it before it was there."""
        self.legs.append(leg)
        if self.stopped is not None:
            self.inbox.cancel(leg, self.stopped)

    def stop(self, failure: Failure) -> None:
        """Stop this attempt's legs, here and at their workers; who waits for their frames is told why. The worker of
        a prefill leg that has ended is told too, for it keeps KV that nobody will read.
        """
        if self.stopped is None:
            self.stopped = failure
        for leg in self.legs:
            if not leg.ended or len(self.legs) == 1:
                self.inbox.cancel(leg, failure)

    def decision_headers(self) -> list[Header]:
        """By what name the client may ask why its request went where it went."""
        if self.decision is None:
            return []
        return [(b"x-baton-decision", self.decision.decision_id.encode())]

    def client_left(self) -> None:
        """Nobody waits for the answer any more."""
        self.stop(SLOW if self.exchange.slow else LEFT)

    def close(self) -> None:
        """Nothing of this request goes on after it."""
        self.deadline_at = NEVER
        self.exchange.on_left = None
        for leg in self.legs:
            leg.cancel()


def first_token(flight: RequestContext) -> tuple[float, TtftParts | None]:
    """The time to the first token and where it went; -1 and None where there was none, or nobody says."""
    story, report = flight.story, flight.story.report
    if not story.first_at:
        return -1.0, None
    whole_s = ttft_s(story.first_at - story.started_at, report, stream=flight.facts.stream)
    if report is None or report.first_token_s <= 0 or flight.attempts.resumes:
        return whole_s, None  # What a leg that went on reports is no part of the first token's time.
    streamed = story.placed is not None and story.placed.streamed
    legs = Legs(answering=report, prefill=story.prefill_report, streamed=streamed)
    return whole_s, ttft_parts(whole_s, story.spent.times(), legs)


def predicted_cached(flight: RequestContext) -> int:
    """Prompt tokens that were expected to be cached; -1 where nothing exact was known, or not of the prompt alone."""
    story = flight.story
    exact = story.prompt is not None and story.prompt.exact and not flight.attempts.resumes
    return story.placed.cached_tokens if story.placed is not None and exact else -1


def finished(flight: RequestContext, now: float) -> RequestFinished:
    """The flight's story as the rest of the system hears it."""
    story, placed, report = flight.story, flight.story.placed, flight.story.report
    answering = report or LegReport(prompt_tokens=-1, completion_tokens=-1, cached_tokens=-1, received_tokens=-1)
    generated = answering.completion_tokens
    spread_s = story.last_at - story.first_at
    mode = placed.mode if placed is not None else Mode.AGGREGATED
    kv = kv_numbers(story.prefill_report, answering, mode)
    whole_s, parts = first_token(flight)
    asked = flight.decision
    prefill_worker = placed.prefill.record.worker_id if placed is not None and placed.prefill is not None else ""
    decode_worker = placed.decode.record.worker_id if placed is not None else ""
    return RequestFinished(
        request_id=flight.exchange.head.request_id,
        decision_id=flight.decision.decision_id if flight.decision is not None else DecisionId(""),
        tenant=asked.tenant if asked is not None else flight.exchange.head.client.key.tenant,
        model=flight.facts.model,
        path=flight.facts.path,
        mode=mode.value,
        status=story.status,
        reason=story.reason,
        attempts=flight.attempts.count,
        resumes=flight.attempts.resumes,
        resumed_tokens=flight.attempts.resumed_tokens,
        prefill_worker=prefill_worker,
        decode_worker=decode_worker,
        prompt_tokens=answering.prompt_tokens,
        completion_tokens=generated,
        cached_tokens=cached_tokens(story.prefill_report, answering, mode),
        received_tokens=answering.received_tokens,
        received_bytes=answering.received_bytes,
        predicted_cached_tokens=predicted_cached(flight),
        ttft_s=whole_s,
        ttft_parts=parts,
        e2e_s=(story.answered_at or now) - story.started_at,
        itl_s=spread_s / (generated - 1) if generated > 1 and spread_s > 0 else -1.0,
        placement_s=story.spent.place_s if flight.decision is not None else -1.0,
        prefill_s=story.prefill_s,
        streamed_handoff=placed is not None and placed.streamed,
        recomputed_tokens=kv.recomputed_tokens,
        reprefilled_tokens=kv.reprefilled_tokens,
        readback_tokens=kv.readback_tokens,
        kv_wait_s=kv.wait_s,
        kv_read_s=kv.read_s,
        kv_moves=kv_moves(story.prefill_report, prefill_worker, answering, decode_worker),
        ttft_target_s=asked.ttft_target_s if asked is not None else -1.0,
        itl_target_s=asked.itl_target_s if asked is not None else -1.0,
    )
