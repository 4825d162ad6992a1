"""How good predictions are, and what they are made from, for Prometheus."""

from __future__ import annotations

from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from services.router.placement.placement import Placement
from services.router.placement.request_fields import Mode
from services.router.state.speed_feed import Measures
from shared.contracts.inference import RequestFinished
from shared.telemetry import names
from shared.telemetry.prometheus import histogram

MODES = tuple(mode.value for mode in Mode if mode is not Mode.AUTO)


class PredictionTimings:
    """Predicted times to the first token, against those that were measured."""

    def __init__(self, registry: CollectorRegistry) -> None:
        ratio = histogram(names.ROUTER_TTFT_PREDICTED, registry)
        self._by_mode: dict[str, Any] = {mode: ratio.labels(mode) for mode in MODES}

    def add(self, told: RequestFinished, placed: Placement | None) -> None:
        """One request that ended well. What came before its placement was none of the prediction's business."""
        parts = told.ttft_parts
        if placed is None or parts is None:
            return
        since_s = told.ttft_s - parts.admission_s - parts.tokenize_s - parts.place_s - parts.failed_s
        if since_s > 0.0:
            self._by_mode[told.mode].observe(placed.predicted.total_s() / since_s)


class LearnedMetrics(Collector):  # type: ignore[misc]  # prometheus_client is not typed for us
    """What is known of each worker, when somebody asks."""

    def __init__(self, measures: Measures) -> None:
        self._measures = measures

    def collect(self) -> list[GaugeMetricFamily]:
        """prometheus_client asks for this on each scrape."""
        metric = names.ROUTER_LEARNED
        speeds = GaugeMetricFamily(metric.name, metric.meaning, labels=metric.labels)
        for worker_id, known in self._measures.learned().items():
            for coefficient, value in msgspec.structs.asdict(known).items():
                if coefficient.endswith("_s") or "_s_per_" in coefficient:
                    speeds.add_metric([worker_id, coefficient], value)
        return [speeds]
