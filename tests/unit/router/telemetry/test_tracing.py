"""The router's spans of a request sum up, and sampling decides which traces are kept."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import pytest

from services.router.request.trace import MARKS_MAX, Trace
from services.router.telemetry.outcome import Kept, TargetOutcome, kept, target_outcome
from services.router.telemetry.tracing import FEW_AT_ONCE, ODD_AT_ONCE_MAX, TraceShare
from shared.bus.frame_sender import LegFrames
from shared.contracts.failures import Reason
from shared.contracts.ids import Epoch, RequestId, WorkerId
from shared.contracts.inference import LegKind, LegReport, RequestFinished, StartLeg
from shared.contracts.kv_exchange import KvRead, KvTransferReport
from shared.telemetry.span_names import Attribute, SpanName
from shared.telemetry.tracing import FinishedSpan
from tests.support.spans import name_of
from tests.unit.router.fake_worker import DONE, EVENTS, JSON, SSE, FakeWorker
from tests.unit.router.streams import TOKENS, fails, streams
from tests.unit.router.world import World, give_legs, prompt, run_in_world

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
WANTED, UNWANTED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
LEAST = (1 << 128) - (1 << 64)
"""Every sampling ratio selects this trace id; none selects the greatest id."""
GREATEST = (1 << 128) - 1


class Drawings:
    """A sink that stores its spans."""

    def __init__(self, ratio: float) -> None:
        self.sample_ratio = ratio
        self.traces: list[tuple[int, list[FinishedSpan]]] = []

    def draw(self, trace_id: int, spans) -> None:
        self.traces.append((trace_id, list(spans)))

    @property
    def last(self) -> list[FinishedSpan]:
        return self.traces[-1][1]


READ = KvRead(
    worker_id=WorkerId("p1"), epoch=Epoch(1), tokens=8, bytes=4096, requested_at=70.0, granted_at=70.01, read_at=70.01,
    ended_at=70.04, read_s=0.03,
)  # fmt: skip


async def takes_time(_worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
    """A prefill of 0.5 s; a decode that waits 0.05 s for its KV, and has its first token 0.1 s after it came."""
    if start.kind is LegKind.PREFILL:
        await asyncio.sleep(0.52)
        frames.head(200, JSON)
        frames.end(LegReport(prompt_tokens=9, queue_s=0.01, prefill_s=0.5, first_token_s=0.51, total_s=0.52))
        return
    await asyncio.sleep(0.1)
    frames.head(200, SSE)
    frames.data(EVENTS[0], [1])
    await asyncio.sleep(0.3)
    frames.data(EVENTS[1], [2])
    frames.data(DONE)
    transfer_report = KvTransferReport(prompt_tokens=9, fetched_tokens=8, recomputed_tokens=1, reads=[READ])
    frames.end(
        LegReport(
            prompt_tokens=9, received_tokens=8, completion_tokens=2, queue_s=0.05, prefill_s=0.04, first_token_s=0.095,
            total_s=0.4, finish_reason="stop", kv=transfer_report,
        )
    )  # fmt: skip


def finished(**fields) -> RequestFinished:
    base = {"request_id": RequestId("r"), "model": "m", "path": "/v1/completions", "mode": "aggregated", "status": 200}
    return RequestFinished(**{**base, **fields})


def named(spans: list[FinishedSpan], name: SpanName) -> FinishedSpan:
    (found,) = [span for span in spans if name_of(span.name) == name]
    return found


def length(span: FinishedSpan) -> float:
    return span.ended_at - span.begun_at


def below(spans: list[FinishedSpan], above: FinishedSpan) -> list[FinishedSpan]:
    return [span for span in spans if span.parent_id == above.span_id]


def test_consecutive_ttft_spans_sum_to_the_ttft():
    drawings = Drawings(1.0)

    async def scenario(world: World) -> None:
        await world.pair(takes_time, takes_time)
        assert (await world.ask(prompt(stream=True))).status == 200

    run_in_world(scenario, drawings)

    spans = drawings.last
    request, whole = named(spans, SpanName.REQUEST), named(spans, SpanName.FIRST_TOKEN)
    parts = below(spans, whole)
    assert whole.begun_at == request.begun_at == parts[0].begun_at
    assert length(whole) == pytest.approx(0.62, abs=1e-6)
    assert parts[-1].ended_at == pytest.approx(whole.ended_at, abs=1e-9)
    assert all(one.ended_at == other.begun_at for one, other in pairwise(parts))
    assert {part.name: round(length(part), 6) for part in parts} == {
        SpanName.TTFT_QUEUE: 0.01,
        SpanName.TTFT_PREFILL: 0.5,
        SpanName.TTFT_HANDOFF: 0.04,
        SpanName.TTFT_DECODE_QUEUE: 0.01,
        SpanName.TTFT_DECODE_PREFILL: 0.04,
        SpanName.TTFT_FRONT_END_AND_BUS: 0.02,
    }
    decode = named(spans, SpanName.DECODE)
    assert (decode.begun_at, decode.ended_at) == (whole.ended_at, request.ended_at)


def test_request_spans_use_the_genai_semantic_conventions():
    drawings = Drawings(1.0)

    async def scenario(world: World) -> None:
        await world.pair(takes_time, takes_time)
        await world.ask(prompt(stream=True), x_request_id="me")

    run_in_world(scenario, drawings)

    about = named(drawings.last, SpanName.REQUEST).about
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.response.model": "m",
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "m",
        "gen_ai.request.stream": True,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 2,
        Attribute.REQUEST_ID: "me",
        Attribute.KEPT: "share",
        Attribute.HANDOFF: "offered",
    }
    assert expected.items() <= about.items()
    assert about["gen_ai.response.time_to_first_chunk"] == pytest.approx(0.62)


def test_each_leg_carries_its_span_as_the_workers_parent():
    drawings, seen = Drawings(1.0), []

    async def scenario(world: World) -> None:
        p1, d1 = await world.pair()
        await world.ask(prompt(), traceparent=WANTED, tracestate="a=b")
        assert d1.headers[-1]["tracestate"] == "a=b"
        seen.extend([p1.headers[-1]["traceparent"], d1.headers[-1]["traceparent"]])

    run_in_world(scenario, drawings)

    spans = drawings.last
    prefill, decode = named(spans, SpanName.PREFILL_LEG), named(spans, SpanName.DECODE_LEG)
    assert seen == [f"00-{TRACE}-{leg.span_id:016x}-01" for leg in (prefill, decode)]
    request = named(spans, SpanName.REQUEST)
    assert (request.parent_id, request.parent_is_remote) == (int(PARENT, 16), True)
    assert prefill.parent_id == decode.parent_id == request.span_id
    assert not below(spans, prefill)  # The worker creates that span itself.


def test_slow_unsampled_requests_are_traced_from_worker_reports():
    drawings, seen = Drawings(0.0), []

    async def scenario(world: World) -> None:
        _p1, d1 = await world.pair(takes_time, takes_time)
        await world.ask(prompt(stream=True, baton={"ttft_s": 0.1}))
        seen.append(d1.headers[-1].get("traceparent"))
        await world.ask(prompt(stream=True, baton={"ttft_s": 5}))

    run_in_world(scenario, drawings)

    ((trace_id, spans),) = drawings.traces
    request = named(spans, SpanName.REQUEST)
    assert request.about[Attribute.KEPT] == "slow"
    assert trace_id > 0
    assert seen == [None]  # Its worker created no spans.
    served = named(below(spans, named(spans, SpanName.DECODE_LEG)), SpanName.SERVE_LEG)
    assert served.about[Attribute.FROM_REPORT] is True
    names = [SpanName.ENGINE_QUEUE, SpanName.ENGINE_PREFILL, SpanName.ENGINE_DECODE, SpanName.LEASE, SpanName.READ]
    assert [span.name for span in below(spans, served)] == names
    read = named(spans, SpanName.READ)
    assert (read.about[Attribute.KV_SOURCE], read.about[Attribute.KV_BYTES]) == ("p1", 4096)
    assert read.about[Attribute.KV_GB_PER_S] == pytest.approx(4096 / 0.03 / 1e9)
    assert all(served.begun_at <= span.begun_at <= span.ended_at <= served.ended_at for span in below(spans, served))


def test_a_migrated_streams_trace_has_both_attempts_and_the_gap():
    drawings = Drawings(0.0)

    async def scenario(world: World) -> None:
        await world.worker("w1", script=streams(2, fails(Reason.ENGINE_DEAD)))
        await world.worker("w2", script=streams())
        give_legs(world, "w2", 5)
        await world.ask(prompt(stream=True))

    run_in_world(scenario, drawings)

    spans = drawings.last
    assert named(spans, SpanName.REQUEST).about[Attribute.KEPT] == "resumed"
    assert named(spans, SpanName.REQUEST).about[Attribute.RESUMED_TOKENS] == 2 <= len(TOKENS)
    assert [span.error for span in spans if span.name is SpanName.DECODE_LEG] == ["engine_dead", None]
    assert len([span for span in spans if span.name is SpanName.PLACE]) == 2
    resume = named(spans, SpanName.RESUME)
    first, second = [span for span in spans if span.name is SpanName.DECODE_LEG]
    assert first.begun_at <= resume.begun_at <= second.begun_at <= resume.ended_at <= second.ended_at


def test_unservable_requests_are_traced_as_failures():
    drawings = Drawings(0.0)

    async def scenario(world: World) -> None:
        await world.worker("w1", script=lambda _worker, _start, frames: fails(Reason.INTERNAL)(frames))
        assert (await world.ask(prompt())).status >= 500

    run_in_world(scenario, drawings)

    request = named(drawings.last, SpanName.REQUEST)
    assert request.error == request.about[Attribute.REASON] == request.about[Attribute.ERROR_TYPE]
    assert request.about[Attribute.KEPT] == "failed"


def test_the_clients_unsampled_flag_applies_to_slow_requests_too():
    drawings, seen = Drawings(1.0), []

    async def scenario(world: World) -> None:
        w1 = await world.worker("w1", script=takes_time)
        await world.ask(prompt(stream=True, baton={"ttft_s": 0.01}), traceparent=UNWANTED, tracestate="a=b")
        seen.append(w1.headers[-1])

    run_in_world(scenario, drawings)

    assert drawings.traces == []
    assert "traceparent" not in seen[0]


def test_without_a_sink_the_clients_context_is_forwarded():
    seen = []

    async def scenario(world: World) -> None:
        w1 = await world.worker("w1")
        await world.ask(prompt(), traceparent=WANTED)
        await world.ask(prompt())
        seen.extend(headers.get("traceparent") for headers in w1.headers)

    run_in_world(scenario)

    assert seen == [WANTED, None]


@pytest.mark.parametrize(
    "header",
    ["", f"ff-{TRACE}-{PARENT}-01", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01"],
    ids=["nothing", "version", "trace", "parent"],
)
def test_an_invalid_traceparent_gives_no_trace(header: str):
    assert Trace.below({"traceparent": header}, 1) is None


def test_the_marks_of_a_repeatedly_placed_request_are_bounded():
    trace = Trace(1, 2)
    for _ in range(MARKS_MAX + 10):
        trace.mark(SpanName.PLACE, 0.0, 0.1)

    assert len(trace.marks) == MARKS_MAX


def test_few_requests_are_all_traced_and_many_are_sampled():
    share, dice = TraceShare(0.25), random.Random(1)

    lone = [share.chosen(GREATEST, 10.0 * number) for number in range(20)]
    many = [share.chosen(dice.getrandbits(128), 200.0) for _ in range(4000)]

    assert all(lone)
    assert 900 < sum(many) - FEW_AT_ONCE < 1100
    assert share.chosen(LEAST, 200.0)
    assert not share.chosen(GREATEST, 200.0)


def test_ratio_zero_samples_nothing_and_one_samples_everything():
    assert not any(TraceShare(0.0).chosen(trace_id, 1e6) for trace_id in (LEAST, GREATEST))
    assert all(TraceShare(1.0).chosen(trace_id, 0.0) for trace_id in [LEAST, GREATEST] * 50)


def test_traces_of_simultaneous_failures_are_bounded():
    share = TraceShare(0.0)

    assert sum(share.allowed(5.0) for _ in range(10_000)) == ODD_AT_ONCE_MAX
    assert share.allowed(6.0)


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (finished(ttft_s=0.1), Kept.SHARE),
        (finished(ttft_s=2.5), Kept.SLOW),
        (finished(ttft_s=2.5, ttft_target_s=3.0), Kept.SHARE),
        (finished(ttft_s=0.5, ttft_target_s=0.4), Kept.SLOW),
        (finished(ttft_s=0.5, itl_s=0.2, itl_target_s=0.1), Kept.SLOW),
        (finished(e2e_s=9.0), Kept.SLOW),
        (finished(ttft_s=9.0, is_batch=True), Kept.SHARE),
        (finished(ttft_s=0.1, resumes=1), Kept.RESUMED),
        (finished(status=503, reason="no_worker", resumes=1), Kept.FAILED),
        (finished(status=429, reason="over_share"), Kept.FAILED),
        (finished(status=404, reason="model_unknown"), Kept.SHARE),
        (finished(status=499, reason="cancelled"), Kept.SHARE),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_kept_trace_has_its_reason(report: RequestFinished, why: Kept):
    assert kept(report, 2.0) is why


@pytest.mark.parametrize(
    ("report", "outcome"),
    [
        (finished(ttft_s=0.1, ttft_target_s=0.2), TargetOutcome.MET),
        (finished(ttft_s=0.1, itl_s=0.01, itl_target_s=0.02), TargetOutcome.MET),
        (finished(ttft_s=0.3, ttft_target_s=0.2, itl_s=1.0, itl_target_s=0.1), TargetOutcome.TTFT_MISSED),
        (finished(ttft_s=0.1, ttft_target_s=0.2, itl_s=1.0, itl_target_s=0.1), TargetOutcome.ITL_MISSED),
        (finished(ttft_s=0.1), TargetOutcome.NO_TARGET),
        (finished(status=503, reason="no_worker", ttft_target_s=0.2), TargetOutcome.FAILED),
        (finished(status=499, reason="cancelled", ttft_target_s=0.2), None),
        (finished(status=404, reason="model_unknown"), None),
    ],
)
def test_the_target_outcome_follows_from_targets_and_latencies(report: RequestFinished, outcome: TargetOutcome | None):
    assert target_outcome(report) is outcome
