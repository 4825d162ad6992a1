"""One request is one trace: from the HTTP edge, through NATS headers, to both workers."""

from __future__ import annotations

import pytest

from shared.contracts.decisions import TtftParts
from shared.telemetry.span_names import Attribute, SpanName
from tests.support.nats_server import NatsServer
from tests.support.otlp_receiver import OtlpReceiver, Span
from tests.support.simulated_system import simulated_system
from tests.support.spans import ADD_UP, length, name_of, time_to_first_token

pytestmark = pytest.mark.nats

CLIENT_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT_SPAN = "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"}
NOT_SAMPLED = {"traceparent": f"00-{'7' * 32}-{CLIENT_SPAN}-00"}
DISAGGREGATED_SPANS = sorted(
    [
        SpanName.REQUEST,
        SpanName.PLACE,
        SpanName.PREFILL_LEG,
        SpanName.DECODE_LEG,
        SpanName.SERVE_LEG,
        SpanName.SERVE_LEG,
    ]
)
STRUCTURE = set(DISAGGREGATED_SPANS)
"""All others are as many as there were things to do, or to wait for."""
LONG_PROMPT = "It was a very long story, and nobody had heard it before. " * 400
"""Its handoff is streamed."""
SETTINGS = {"BATON_TRACE_SAMPLE_RATIO": "1", "ROUTER_STREAM_TOKENS_MIN": "1024"}
"""Both kinds of handoff happen."""
CLOCKS_APART_S = 0.005
"""One machine's processes read one wall clock; spans are rounded."""


@pytest.fixture(scope="module")
def receiver():
    with OtlpReceiver() as one:
        yield one


@pytest.fixture(scope="module")
def system(tmp_path_factory, receiver):
    directory = tmp_path_factory.mktemp("tracing")
    with (
        NatsServer(directory) as nats,
        simulated_system(directory, nats, BATON_OTLP_ENDPOINT=receiver.endpoint, **SETTINGS) as one,
    ):
        yield one


def trace_of(receiver: OtlpReceiver, request_id: str, spans: int) -> list[Span]:
    """All spans of the trace that a request belongs to, as soon as so many of its structure are there."""

    def collected() -> list[Span]:
        mine = {each.trace_id for each in receiver.spans if each.attributes.get(Attribute.REQUEST_ID) == request_id}
        return [each for each in receiver.spans if each.trace_id in mine]

    def are_there() -> bool:
        return len([each for each in collected() if name_of(each.name) in STRUCTURE]) >= spans

    assert receiver.wait_for(are_there), [each.name for each in collected()]
    return collected()


def only(spans: list[Span], name: SpanName, instance: str = "") -> Span:
    (found,) = [each for each in spans if name_of(each.name) == name and (not instance or each.instance == instance)]
    return found


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_disaggregated_request_is_one_trace_through_both_workers(system, receiver, stream):
    answer = system.complete(f"Once upon a time ({stream}) " * 20, stream=stream)
    spans = trace_of(receiver, answer.headers["x-request-id"], len(DISAGGREGATED_SPANS))

    assert len({each.trace_id for each in spans}) == 1
    assert sorted(name_of(each.name) for each in spans if name_of(each.name) in STRUCTURE) == DISAGGREGATED_SPANS
    request = only(spans, SpanName.REQUEST)
    prefill, decode = only(spans, SpanName.PREFILL_LEG), only(spans, SpanName.DECODE_LEG)
    at_p1, at_d1 = only(spans, SpanName.SERVE_LEG, "p1"), only(spans, SpanName.SERVE_LEG, "d1")
    assert request.parent_id == ""
    assert {only(spans, SpanName.PLACE).parent_id, prefill.parent_id, decode.parent_id} == {request.span_id}
    assert at_p1.parent_id == prefill.span_id
    assert at_d1.parent_id == decode.span_id
    assert {each.service for each in spans} == {"baton-router", "baton-worker"}


def test_child_spans_lie_within_their_parents_and_prefill_precedes_decode(system, receiver):
    answer = system.complete("A quick brown fox. " * 40)
    spans = trace_of(receiver, answer.headers["x-request-id"], len(DISAGGREGATED_SPANS))
    request = only(spans, SpanName.REQUEST)

    for each in spans:
        assert request.start - CLOCKS_APART_S <= each.start <= each.end <= request.end + CLOCKS_APART_S
    assert only(spans, SpanName.SERVE_LEG, "p1").end <= only(spans, SpanName.SERVE_LEG, "d1").start + CLOCKS_APART_S


def test_spans_match_the_response(system, receiver):
    answer = system.complete("The moon is far away. " * 30)
    spans = trace_of(receiver, answer.headers["x-request-id"], len(DISAGGREGATED_SPANS))
    request, at_d1 = only(spans, SpanName.REQUEST), only(spans, SpanName.SERVE_LEG, "d1")
    usage = answer.json()["usage"]

    assert request.attributes[Attribute.MODE] == answer.headers["x-baton-mode"]
    assert request.attributes[Attribute.PREFILL_WORKER] == "p1"
    assert request.attributes[Attribute.DECODE_WORKER] == "d1"
    assert request.attributes[Attribute.INPUT_TOKENS] == usage["prompt_tokens"]
    assert request.attributes[Attribute.OUTPUT_TOKENS] == usage["completion_tokens"]
    assert at_d1.attributes[Attribute.RECEIVED_TOKENS] > 0
    assert at_d1.attributes[Attribute.RECEIVED_BYTES] > 0


def test_the_request_span_names_its_decision_and_the_parts_of_ttft(system, receiver):
    answer = system.complete("Who takes it further? " * 30, stream=True)
    spans = trace_of(receiver, answer.headers["x-request-id"], len(DISAGGREGATED_SPANS))
    request = only(spans, SpanName.REQUEST)
    prefix = "baton.ttft."
    parts = {name.removeprefix(prefix): value for name, value in request.attributes.items() if name.startswith(prefix)}

    assert request.attributes[Attribute.DECISION_ID] == answer.headers["x-baton-decision"]
    assert set(parts) == set(TtftParts.__struct_fields__)
    assert 0 < sum(parts.values()) <= request.end - request.start + CLOCKS_APART_S
    assert parts["prefill_s"] > 0


@pytest.mark.parametrize(
    ("mode", "prompt", "handoff"),
    [
        ("aggregated", "We run alone. " * 40, None),
        ("disaggregated", "We run in turns. " * 40, "offered"),
        ("disaggregated", "We run side by side. " * 800, "streamed"),
    ],
    ids=["aggregated", "offered", "streamed handoff"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_ttft_spans_add_up(system, receiver, mode: str, prompt: str, handoff: str | None, stream: bool):
    answer = system.complete(f"{stream}: {prompt}", stream=stream, headers={"x-baton-mode": mode})
    spans = trace_of(receiver, answer.headers["x-request-id"], 4 if handoff is None else len(DISAGGREGATED_SPANS))
    request = only(spans, SpanName.REQUEST)

    assert request.attributes.get(Attribute.HANDOFF) == handoff
    ttft_s, parts = time_to_first_token(spans)
    assert ttft_s == pytest.approx(request.attributes[Attribute.TIME_TO_FIRST_CHUNK], rel=ADD_UP)
    # What the workers drew on their own clocks says the same as the parts that the router made of their reports.
    computed_by = "d1" if handoff is None else "p1"
    assert length(only(spans, SpanName.ENGINE_PREFILL, computed_by)) == pytest.approx(
        parts[SpanName.TTFT_PREFILL], abs=ADD_UP * ttft_s
    )
    if handoff is not None:
        assert only(spans, SpanName.SERVE_LEG, "d1").attributes[Attribute.FIRST_TOKEN_RECEIVED]
        assert length(only(spans, SpanName.ENGINE_PREFILL, "d1")) == pytest.approx(
            parts.get(SpanName.TTFT_DECODE_PREFILL, 0.0), abs=ADD_UP * ttft_s
        )


def test_the_handoff_is_a_read_span_of_the_decode_leg(system, receiver):
    answer = system.complete("Pass it on, pass it on. " * 30)
    spans = trace_of(receiver, answer.headers["x-request-id"], len(DISAGGREGATED_SPANS))
    at_d1, read = only(spans, SpanName.SERVE_LEG, "d1"), only(spans, SpanName.READ)

    assert read.parent_id == at_d1.span_id
    assert at_d1.start - CLOCKS_APART_S <= read.start <= read.end <= at_d1.end + CLOCKS_APART_S
    assert read.attributes[Attribute.KV_SOURCE] == "p1"
    assert read.attributes[Attribute.KV_TOKENS] == at_d1.attributes[Attribute.RECEIVED_TOKENS] > 0
    assert read.attributes[Attribute.KV_BYTES] == at_d1.attributes[Attribute.RECEIVED_BYTES]
    assert read.attributes[Attribute.KV_GB_PER_S] > 0
    sources = (Attribute.CACHED_TOKENS, Attribute.RECEIVED_TOKENS, Attribute.RECOMPUTED_TOKENS)
    assert sum(at_d1.attributes[each] for each in sources) == at_d1.attributes[Attribute.INPUT_TOKENS]


def test_a_streamed_handoff_is_read_while_the_prompt_is_computed(system, receiver):
    answer = system.complete(LONG_PROMPT)
    spans = trace_of(receiver, answer.headers["x-request-id"], len(DISAGGREGATED_SPANS))
    at_p1, at_d1 = only(spans, SpanName.SERVE_LEG, "p1"), only(spans, SpanName.SERVE_LEG, "d1")
    lease, read = only(spans, SpanName.LEASE), only(spans, SpanName.READ)

    assert at_d1.start < at_p1.end
    assert {lease.parent_id, read.parent_id} == {at_d1.span_id}
    assert read.attributes[Attribute.KV_FOLLOWED]
    assert read.start < at_p1.end


def test_a_clients_own_trace_goes_on_in_ours(system, receiver):
    answer = system.complete("Who traces the tracers? " * 20, headers=TRACEPARENT)
    spans = trace_of(receiver, answer.headers["x-request-id"], len(DISAGGREGATED_SPANS))

    assert {each.trace_id for each in spans} == {CLIENT_TRACE}
    assert only(spans, SpanName.REQUEST).parent_id == CLIENT_SPAN


def test_a_client_that_does_not_want_to_be_traced_is_not(system, receiver):
    unseen = system.complete("Nobody saw this. " * 20, headers=NOT_SAMPLED)
    seen = system.complete("Everybody saw this. " * 20)
    trace_of(receiver, seen.headers["x-request-id"], len(DISAGGREGATED_SPANS))

    assert unseen.status_code == 200
    assert not [each for each in receiver.spans if each.trace_id == "7" * 32]


def test_an_aggregated_request_is_one_trace_with_one_leg(system, receiver):
    answer = system.complete("All by myself. " * 20, headers={"x-baton-mode": "aggregated"})
    spans = trace_of(receiver, answer.headers["x-request-id"], 4)

    assert sorted(name_of(each.name) for each in spans if name_of(each.name) in STRUCTURE) == sorted(
        [SpanName.REQUEST, SpanName.PLACE, SpanName.DECODE_LEG, SpanName.SERVE_LEG]
    )


def test_a_refused_request_is_a_trace_with_its_status(system, receiver):
    answer = system.complete("Is anybody there?", model="nobody")
    spans = trace_of(receiver, answer.headers["x-request-id"], 1)

    assert answer.status_code == 404
    assert only(spans, SpanName.REQUEST).attributes[Attribute.HTTP_STATUS] == 404


def test_every_span_and_attribute_has_a_name_from_the_one_file(system, receiver):
    answer = system.complete("What is in a name? " * 20)
    trace_of(receiver, answer.headers["x-request-id"], len(DISAGGREGATED_SPANS))

    # Over all that the other tests brought about, too.
    assert {name_of(each.name) for each in receiver.spans} <= {name.value for name in SpanName}
    assert {key for each in receiver.spans for key in each.attributes} <= {name.value for name in Attribute}
