"""Every span and every attribute of one, in one flat file. Metrics: see ``names``."""

from __future__ import annotations

from enum import StrEnum


class SpanName(StrEnum):
    """The parts of one request's trace."""

    REQUEST = "request"
    """Router: from the HTTP request to its last byte."""
    PLACE = "place"
    """Router: choosing the workers."""
    PREFILL_LEG = "prefill leg"
    """Router: from StartLeg to the prefill leg's END."""
    DECODE_LEG = "decode leg"
    """Router: from StartLeg to the decode (or aggregated) leg's END."""
    SERVE_LEG = "serve leg"
    """Worker: one leg, from its arrival to its last frame."""
    LEASE = "lease"
    """Worker, for each source of KV: from the ask to the first grant."""
    WAIT = "wait"
    """From the first grant to the first read."""
    READ = "read"
    """From the first read to the end of the last; of a followed source with the pauses between."""


class Attribute(StrEnum):
    """Attributes of spans; OpenTelemetry's names where there are any."""

    REQUEST_ID = "baton.request.id"
    DECISION_ID = "baton.decision.id"
    LEG_ID = "baton.leg.id"
    LEG_KIND = "baton.leg.kind"
    MODE = "baton.mode"
    PREFILL_WORKER = "baton.prefill.worker"
    DECODE_WORKER = "baton.decode.worker"
    WORKER_ID = "baton.worker.id"
    REASON = "baton.reason"
    RESUMES = "baton.resumes"
    RESUMED_TOKENS = "baton.resumed_tokens"
    PREDICTED_CACHED_TOKENS = "baton.cached_tokens.predicted"
    CACHED_TOKENS = "baton.cached_tokens.actual"
    RECEIVED_TOKENS = "baton.received_tokens"
    RECEIVED_BYTES = "baton.received_bytes"
    RECOMPUTED_TOKENS = "baton.recomputed_tokens"
    REPREFILLED_TOKENS = "baton.reprefilled_tokens"
    KV_SOURCE = "baton.kv.source"
    KV_TOKENS = "baton.kv.tokens"
    KV_BYTES = "baton.kv.bytes"
    KV_GB_PER_S = "baton.kv.gb_per_s"
    KV_FOLLOWED = "baton.kv.followed"
    KV_FAILURE = "baton.kv.failure"
    QUEUE_S = "baton.queue_s"
    PREFILL_S = "baton.prefill_s"
    FIRST_TOKEN_S = "baton.first_token_s"  # noqa: S105  # A time, not a secret.
    TTFT_ADMISSION_S = "baton.ttft.admission_s"
    TTFT_TOKENIZE_S = "baton.ttft.tokenize_s"
    TTFT_PLACE_S = "baton.ttft.place_s"
    TTFT_FAILED_S = "baton.ttft.failed_s"
    TTFT_QUEUE_S = "baton.ttft.queue_s"
    TTFT_FETCH_S = "baton.ttft.fetch_s"
    TTFT_PREFILL_S = "baton.ttft.prefill_s"
    TTFT_HANDOFF_S = "baton.ttft.handoff_s"
    TTFT_DECODE_QUEUE_S = "baton.ttft.decode_queue_s"
    TTFT_FIRST_TOKEN_S = "baton.ttft.first_token_s"  # noqa: S105  # A time, not a secret.
    TTFT_TRANSIT_S = "baton.ttft.transit_s"
    MODEL = "gen_ai.request.model"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    HTTP_ROUTE = "http.route"
    HTTP_STATUS = "http.response.status_code"
