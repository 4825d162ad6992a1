"""The parts of a request's time to the first token, which add up to it.

The router measures the whole and its own parts on its clock; workers report durations on theirs. The remainder is
``front_end_and_bus_s``: a worker's HTTP front end around its engine, the bus and the relay.

    aggregated    [router] [queue, fetch, prefill] [front end, bus]
    offered       [router] [queue, fetch, prefill] [decode queue, handoff, decode prefill] [front end, bus]
    streamed      as offered, but both legs run concurrently: of the decode leg, only the time after the prompt was
                  computed counts

When the workers' parts add up to more than the router measured (clocks, rounding, overlapping legs), they are scaled
down: the router's measurement is what the client waited.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.router.request.timings import Timings
from shared.contracts.decisions import TtftParts
from shared.contracts.inference import LegReport
from shared.contracts.kv_exchange import KvRead


class Legs:
    """The reports of the attempt that produced the response."""

    def __init__(self, *, answering: LegReport, prefill: LegReport | None = None, streamed: bool = False) -> None:
        """``prefill`` None: one worker did both, or the prefill leg's report is missing."""
        self.answering = answering
        self.prefill = prefill
        self.streamed = streamed


def ttft_s(first_data_s: float, answering: LegReport | None, *, stream: bool) -> float:
    """The time to the first token. ``first_data_s``: from the request to the first data of the response.

    A response that is no stream arrives as a whole: the worker's time after its first token is subtracted, which gives
    the time at which the first token of a stream would have arrived.
    """
    if stream or answering is None or answering.first_token_s <= 0:
        return first_data_s
    return max(0.0, first_data_s - max(0.0, answering.total_s - answering.first_token_s))


def ttft_parts(whole_s: float, router: Timings, legs: Legs) -> TtftParts:
    """``whole_s`` split into its parts."""
    return fitted(whole_s, router, leg_parts(legs))


def leg_parts(legs: Legs) -> TtftParts:
    """The parts as the workers report them, before they are fitted to the router's clock."""
    answering, prefill = legs.answering, legs.prefill
    moved_s = exchanging_s(answering)
    if prefill is None and not legs.streamed:
        return TtftParts(queue_s=answering.queue_s - moved_s, fetch_s=moved_s, prefill_s=answering.prefill_s)
    waited_s = answering.queue_s
    fetch_s, queue_s, prefill_s = 0.0, 0.0, 0.0
    if prefill is not None:
        fetch_s = exchanging_s(prefill)
        queue_s, prefill_s = prefill.queue_s - fetch_s, prefill.prefill_s
        if legs.streamed and moved_s > 0:
            scheduled_s = max(0.0, answering.first_token_s - answering.prefill_s)
            waited_s = min(waited_s, max(0.0, scheduled_s - prefill.first_token_s))
            # The decode worker can have its first token before the prefill worker's front end has reported it.
            prefill_s, fetch_s, queue_s = _less(prefill.first_token_s - scheduled_s, prefill_s, fetch_s, queue_s)
            moved_s = min(moved_s, waited_s)
        elif legs.streamed:
            queue_s = fetch_s = prefill_s = 0.0  # The decode worker had all KV and did not wait.
    return TtftParts(
        queue_s=queue_s,
        fetch_s=fetch_s,
        prefill_s=prefill_s,
        handoff_s=moved_s,
        decode_queue_s=waited_s - moved_s,
        decode_prefill_s=answering.prefill_s,
    )


def fitted(whole_s: float, router: Timings, work: TtftParts) -> TtftParts:
    """The router's times and the workers' parts, made to add up to ``whole_s``; the rest is front ends' and bus's."""
    own_s = router.admission_s + router.tokenize_s + router.place_s + router.failed_s
    own = whole_s / own_s if own_s > whole_s else 1.0
    work_s = work.queue_s + work.fetch_s + work.prefill_s + work.handoff_s + work.decode_queue_s + work.decode_prefill_s
    left_s = max(0.0, whole_s - own_s)
    share = left_s / work_s if work_s > left_s else 1.0
    return TtftParts(
        admission_s=router.admission_s * own,
        tokenize_s=router.tokenize_s * own,
        place_s=router.place_s * own,
        failed_s=router.failed_s * own,
        queue_s=work.queue_s * share,
        fetch_s=work.fetch_s * share,
        prefill_s=work.prefill_s * share,
        handoff_s=work.handoff_s * share,
        decode_queue_s=work.decode_queue_s * share,
        decode_prefill_s=work.decode_prefill_s * share,
        front_end_and_bus_s=max(0.0, whole_s - own_s * own - work_s * share),
    )


def exchanging_s(report: LegReport) -> float:
    """The part of the leg's time in its engine's queue in which it requested or read KV. Time between the grant and the
    read, when it waits for free blocks, counts as queueing.
    """
    if report.kv is None or not report.kv.reads:
        return 0.0
    requested = [read for read in report.kv.reads if read.requested_at > 0]
    if not requested:
        return 0.0
    # Later reads fetched KV again after a preemption.
    until = min(read.requested_at for read in requested) + report.queue_s
    return min(report.queue_s, covered_s((span for read in requested for span in _spans(read)), until))


def covered_s(spans: Iterable[tuple[float, float]], until: float) -> float:
    """How much time before ``until`` at least one of the spans covers."""
    total_s, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        end = min(end, until)  # noqa: PLW2901  # the same span, cut at ``until``
        total_s += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total_s


def _spans(read: KvRead) -> list[tuple[float, float]]:
    spans = [(read.requested_at, read.granted_at)] if read.granted_at else []
    return [*spans, (read.read_at, read.ended_at)] if read.read_at else spans


def _less(over_s: float, *parts_s: float) -> list[float]:
    """The parts after subtracting ``over_s`` in total, from the first parts first."""
    left = []
    for part_s in parts_s:
        taken_s = min(max(0.0, over_s), part_s)
        over_s -= taken_s
        left.append(part_s - taken_s)
    return left
