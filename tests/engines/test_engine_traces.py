"""One trace from the router's headers into both engines, exported by OTLP over HTTP from wherever its spans are made."""

from __future__ import annotations

import pytest

from shared.contracts.inference import LegKind
from shared.telemetry.span_names import Attribute, SpanName
from tests.engines.test_handover import completion, prompt_of
from tests.support.otlp_receiver import OtlpReceiver, Span

pytestmark = pytest.mark.vllm

ROUTERS_SPAN = "00f067aa0ba902b7"
ENGINE = "baton-engine"
ENGINE_SPAN = "llm_request"
"""vLLM's own."""
CLOCK_S = 0.002
"""A span's instant is put on the wall clock in milliseconds."""


def carried(trace_id: str, *, sampled: bool = True) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{ROUTERS_SPAN}-{int(sampled):02}"}


def spans_of(receiver: OtlpReceiver, trace_id: str, count: int) -> list[Span]:
    def mine() -> list[Span]:
        known = (SpanName.SERVE_LEG, ENGINE_SPAN)
        return [span for span in receiver.spans if span.trace_id == trace_id and span.name in known]

    assert receiver.wait_for(lambda: len(mine()) >= count), [(each.service, each.name) for each in mine()]
    return mine()


async def test_one_trace_goes_from_the_routers_headers_into_both_engines(pair, router, receiver):
    trace_id = "5" * 31 + "1"
    prefill, decode = await router.handed_over(*pair, completion(prompt_of(60, seed=77)), headers=carried(trace_id))
    assert (prefill.status, decode.status) == (200, 200)

    spans = spans_of(receiver, trace_id, 4)

    legs = {span.instance: span for span in spans if span.name == SpanName.SERVE_LEG}
    engines = [span for span in spans if span.service == ENGINE]
    assert sorted(legs) == ["d1", "p1"]
    assert [span.name for span in engines] == [ENGINE_SPAN, ENGINE_SPAN]
    assert {leg.parent_id for leg in legs.values()} == {ROUTERS_SPAN}
    assert {span.parent_id for span in engines} == {leg.span_id for leg in legs.values()}


async def test_the_handoffs_read_stands_below_the_decode_leg_within_its_time(pair, router, receiver):
    trace_id = "5" * 31 + "5"
    _prefill, decode = await router.handed_over(*pair, completion(prompt_of(60, seed=80)), headers=carried(trace_id))

    spans = spans_of(receiver, trace_id, 4)

    (leg,) = [span for span in spans if span.instance == "d1" and span.name == SpanName.SERVE_LEG]
    (read,) = [span for span in receiver.spans if span.trace_id == trace_id and span.name == SpanName.READ]
    assert read.parent_id == leg.span_id
    assert leg.start <= read.start + CLOCK_S <= read.end + CLOCK_S <= leg.end + 2 * CLOCK_S
    assert read.attributes[Attribute.KV_SOURCE] == "p1"
    assert read.attributes[Attribute.KV_TOKENS] == decode.report.kv.fetched_tokens > 0
    assert read.attributes[Attribute.KV_BYTES] == decode.report.received_bytes > 0
    assert leg.attributes[Attribute.RECOMPUTED_TOKENS] == decode.report.kv.recomputed_tokens


async def test_the_engines_span_counts_tokens_and_lies_within_its_leg(pair, router, receiver):
    trace_id = "5" * 31 + "2"
    answer = await router.leg(
        pair[1], LegKind.AGGREGATED, completion(prompt_of(20, seed=78)), headers=carried(trace_id)
    )

    spans = spans_of(receiver, trace_id, 2)

    (leg,) = [span for span in spans if span.name == SpanName.SERVE_LEG]
    (engine,) = [span for span in spans if span.name == ENGINE_SPAN]
    assert engine.attributes["gen_ai.usage.completion_tokens"] == answer.report.completion_tokens == 24
    assert engine.attributes["gen_ai.usage.prompt_tokens"] == leg.attributes[Attribute.INPUT_TOKENS]
    assert leg.start <= engine.start


async def test_unsampled_requests_make_no_engine_spans(pair, router, receiver):
    unwanted, wanted = "5" * 31 + "3", "5" * 31 + "4"
    body = completion(prompt_of(20, seed=79))
    await router.leg(pair[1], LegKind.AGGREGATED, body, headers=carried(unwanted, sampled=False))
    await router.leg(pair[1], LegKind.AGGREGATED, body)
    await router.leg(pair[1], LegKind.AGGREGATED, body, headers=carried(wanted))

    spans_of(receiver, wanted, 2)

    assert not [span for span in receiver.spans if span.trace_id == unwanted]
    assert {span.trace_id for span in receiver.spans if span.name in (SpanName.SERVE_LEG, ENGINE_SPAN)} <= {
        "5" * 31 + number for number in "1245"
    }
