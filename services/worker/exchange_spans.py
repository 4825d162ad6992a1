"""The KV exchange in a request's trace: for each source a lease, a wait and a read, drawn when the leg has ended."""

from __future__ import annotations

from opentelemetry.trace import Span, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue

from shared.contracts.kv_exchange import KvProof, KvRead
from shared.runtime.clock import Clock
from shared.telemetry.span_names import Attribute, SpanName

SOURCES_SHOWN_MAX = 16
"""Of one leg; more would hide the rest of the trace."""


def show_exchange(tracer: Tracer, leg: Span, proof: KvProof, clock: Clock) -> None:
    """Children of the leg's span, from what the engine proved. Costs nothing where nothing is traced."""
    if not leg.is_recording():
        return
    leg.set_attributes(
        {
            Attribute.RECOMPUTED_TOKENS: proof.recomputed_tokens,
            Attribute.REPREFILLED_TOKENS: proof.reprefilled_tokens,
        }
    )
    now = clock.now()
    wall_ns = clock.wall_ms() * 1_000_000
    context = set_span_in_context(leg)
    for read in proof.reads[:SOURCES_SHOWN_MAX]:
        steps = steps_of(read, now)
        for step in steps:
            name, *instants = step
            about = source_of(read) | outcome_of(read) if step is steps[-1] else source_of(read)
            begun_ns, ended_ns = (wall_ns - round((now - at) * 1e9) for at in instants)
            span = tracer.start_span(name, context=context, attributes=about, start_time=begun_ns)
            if Attribute.KV_FAILURE in about:
                span.set_status(Status(StatusCode.ERROR, read.failure))
            span.end(ended_ns)


def steps_of(read: KvRead, now: float) -> list[tuple[SpanName, float, float]]:
    """What was done with one source, from when to when; at least one step, and the last one has its outcome."""
    marks = ((SpanName.LEASE, read.asked_at), (SpanName.WAIT, read.granted_at), (SpanName.READ, read.read_at))
    ended = read.ended_at or now
    begun = [(name, at) for name, at in marks if at] or [(SpanName.LEASE, ended)]
    ends = [at for _name, at in begun[1:]] + [ended]
    steps = [(name, start, max(start, end)) for (name, start), end in zip(begun, ends, strict=True)]
    return [step for step in steps[:-1] if step[2] > step[1]] + steps[-1:]


def source_of(read: KvRead) -> dict[str, AttributeValue]:
    """From whom, and how."""
    return {Attribute.KV_SOURCE: read.worker_id, Attribute.KV_FOLLOWED: read.followed}


def outcome_of(read: KvRead) -> dict[str, AttributeValue]:
    """What came of it, and why not more."""
    outcome: dict[str, AttributeValue] = {Attribute.KV_TOKENS: read.tokens, Attribute.KV_BYTES: read.bytes}
    if read.read_s > 0.0:
        outcome[Attribute.KV_GB_PER_S] = read.bytes / read.read_s / 1e9
    if read.failure:
        outcome[Attribute.KV_FAILURE] = read.failure
    return outcome
