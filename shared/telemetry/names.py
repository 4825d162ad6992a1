"""Every name that an operator sees: metrics, spans and attributes. Dashboards and alerts are checked against this file.

Metrics are named as OpenTelemetry does, with dots and units apart; ``Metric.prometheus`` is what Prometheus calls them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What may be done with a metric's values."""

    COUNTER = "counter"
    """Only grows while its process lives: look at its rate."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


UNIT_SUFFIXES = {
    "s": "_seconds",
    "By": "_bytes",
    "1": "_ratio",
    "{token}/s": "_per_second",
    "{request}/s": "_per_second",
}
"""Of Prometheus names, by UCUM unit; a unit in braces alone leaves no trace there."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: what it counts or measures, and by which labels it is split."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()

    @property
    def prometheus(self) -> str:
        """Its name in Prometheus; histograms add ``_bucket``, ``_sum`` and ``_count``."""
        name = self.name.replace(".", "_") + UNIT_SUFFIXES.get(self.unit, "")
        return name + "_total" if self.kind is Kind.COUNTER else name


WORKER = ("worker_id", "role")

# The fleet, as the metrics collector adds it up from load reports.

WORKER_RUNNING = Metric("baton.worker.running", Kind.GAUGE, "{request}", "Requests in the engine's batch", WORKER)
WORKER_WAITING = Metric("baton.worker.waiting", Kind.GAUGE, "{request}", "Requests in the engine's queue", WORKER)
WORKER_WAITING_TOKENS = Metric(
    "baton.worker.waiting_tokens", Kind.GAUGE, "{token}", "Prompt tokens accepted and not yet computed", WORKER
)
WORKER_LEGS = Metric("baton.worker.legs", Kind.GAUGE, "{leg}", "Legs being served", WORKER)
WORKER_KV_USED = Metric("baton.worker.kv_used", Kind.GAUGE, "1", "Part of the KV blocks in use, 0 to 1", WORKER)
WORKER_PROMPT_TOKENS = Metric(
    "baton.worker.prompt_tokens",
    Kind.COUNTER,
    "{token}",
    "Prompt tokens by where their KV came from: computed here, cached here, or received from another worker",
    (*WORKER, "source"),
)
WORKER_GENERATED_TOKENS = Metric("baton.worker.generated_tokens", Kind.COUNTER, "{token}", "Tokens generated", WORKER)
WORKER_RECEIVED_BYTES = Metric("baton.worker.received", Kind.COUNTER, "By", "KV received from other workers", WORKER)
WORKER_RECEIVING_SECONDS = Metric(
    "baton.worker.receiving", Kind.COUNTER, "s", "Time that KV transfers to this worker took", WORKER
)
WORKER_PREEMPTIONS = Metric(
    "baton.worker.preemptions", Kind.COUNTER, "{request}", "Requests put back into the queue for want of blocks", WORKER
)
WORKER_PREFILL_SPEED = Metric(
    "baton.worker.prefill_speed", Kind.GAUGE, "{token}/s", "Prompt tokens computed a second while computing", WORKER
)
WORKER_TOKEN_INTERVAL = Metric(
    "baton.worker.token_interval", Kind.GAUGE, "s", "Time between two tokens of a stream, measured lately", WORKER
)
WORKER_TOKENS_IN = Metric(
    "baton.worker.tokens_in", Kind.GAUGE, "{token}/s", "Prompt tokens finished, mean of 10 s", WORKER
)
WORKER_TOKENS_OUT = Metric("baton.worker.tokens_out", Kind.GAUGE, "{token}/s", "Tokens generated, mean of 10 s", WORKER)
WORKER_REQUESTS = Metric(
    "baton.worker.requests",
    Kind.COUNTER,
    "{request}",
    "Finished requests whose completion this worker generated",
    (*WORKER, "mode"),
)
WORKER_TTFT = Metric(
    "baton.worker.time_to_first_token", Kind.HISTOGRAM, "s", "TTFT of the requests that it generated", WORKER
)
WORKER_ITL = Metric(
    "baton.worker.inter_token_latency", Kind.HISTOGRAM, "s", "ITL of the requests that it generated", WORKER
)
WORKER_E2E = Metric(
    "baton.worker.request_duration", Kind.HISTOGRAM, "s", "Duration of the requests that it generated", WORKER
)
WORKER_PHASE = Metric(
    "baton.worker.phase", Kind.GAUGE, "{worker}", "1 for the phase that the worker is in", (*WORKER, "phase")
)
WORKER_SILENCE = Metric("baton.worker.silence", Kind.GAUGE, "s", "Since the worker was last heard", WORKER)

FLEET_WORKERS = Metric("baton.fleet.workers", Kind.GAUGE, "{worker}", "Workers by role and phase", ("role", "phase"))
FLEET_WORKERS_LOST = Metric("baton.fleet.workers_lost", Kind.COUNTER, "{worker}", "Workers that were declared lost")
FLEET_TERM = Metric("baton.fleet.term", Kind.GAUGE, "{term}", "How often the orchestrators' lead changed hands")
FLEET_REQUEST_RATE = Metric("baton.fleet.request_rate", Kind.GAUGE, "{request}/s", "Requests finished, mean of 10 s")
FLEET_TOKENS_IN = Metric(
    "baton.fleet.tokens_in", Kind.GAUGE, "{token}/s", "Prompt tokens of finished requests, mean of 10 s"
)
FLEET_TOKENS_OUT = Metric(
    "baton.fleet.tokens_out", Kind.GAUGE, "{token}/s", "Completion tokens of finished requests, mean of 10 s"
)
FLEET_PROMPT_TOKENS = Metric(
    "baton.fleet.prompt_tokens", Kind.COUNTER, "{token}", "Like baton.worker.prompt_tokens, of all workers", ("source",)
)
FLEET_GENERATED_TOKENS = Metric(
    "baton.fleet.generated_tokens", Kind.COUNTER, "{token}", "Tokens generated by all workers"
)
FLEET_RECEIVED_BYTES = Metric("baton.fleet.received", Kind.COUNTER, "By", "KV received by all workers")

# Requests, as routers tell the metrics collector.

REQUESTS = Metric(
    "baton.requests", Kind.COUNTER, "{request}", "Requests that ended, by HTTP status", ("model", "mode", "status")
)
REQUEST_FAILURES = Metric(
    "baton.request.failures", Kind.COUNTER, "{request}", "Requests that did not end well, by reason", ("reason",)
)
REQUEST_PROMPT_TOKENS = Metric("baton.request.prompt_tokens", Kind.COUNTER, "{token}", "Prompt tokens of requests")
REQUEST_COMPLETION_TOKENS = Metric(
    "baton.request.completion_tokens", Kind.COUNTER, "{token}", "Completion tokens of requests"
)
TTFT = Metric("gen_ai.server.time_to_first_token", Kind.HISTOGRAM, "s", "TTFT at the router", ("model", "mode"))
ITL = Metric(
    "gen_ai.server.time_per_output_token",
    Kind.HISTOGRAM,
    "s",
    "ITL at the router: a mean per request",
    ("model", "mode"),
)
E2E = Metric("gen_ai.server.request.duration", Kind.HISTOGRAM, "s", "E2E at the router", ("model", "mode"))
PREDICTION_REQUESTS = Metric(
    "baton.prediction.requests", Kind.COUNTER, "{request}", "Requests whose cached tokens were predicted and reported"
)
PREDICTION_EXPECTED = Metric(
    "baton.prediction.expected_cached_tokens", Kind.COUNTER, "{token}", "Cached tokens that routers expected"
)
PREDICTION_FOUND = Metric(
    "baton.prediction.found_cached_tokens", Kind.COUNTER, "{token}", "Cached tokens that engines then found"
)
PREDICTION_MISSED = Metric(
    "baton.prediction.missed_cached_tokens", Kind.COUNTER, "{token}", "Sum of the distances between the two"
)
SERVICE_PHASE = Metric(
    "baton.service.phase",
    Kind.GAUGE,
    "{process}",
    "1 for the phase that the process is in",
    ("service", "instance", "phase"),
)

METRICS: dict[str, Metric] = {each.name: each for each in list(globals().values()) if isinstance(each, Metric)}
"""Every metric by its name."""
