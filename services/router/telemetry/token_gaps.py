"""Times between the pieces of streams, one by one. There are too many of them to go through a metrics library each:
streams note them in a list, and what is in it is counted now and then.
"""

from __future__ import annotations

import time

import numpy as np
from prometheus_client.core import Exemplar, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from services.router.placement.request_fields import Mode
from shared.telemetry import names

MODES = tuple(mode.value for mode in Mode if mode is not Mode.AUTO)
NOTED_MAX = 4096
"""Beyond so many a request that ends has them counted."""
BOUNDS = np.array(names.ROUTER_ITL.buckets)
BUCKETS = (*map(floatToGoString, names.ROUTER_ITL.buckets), "+Inf")


class Gaps:
    """Of one mode."""

    def __init__(self) -> None:
        self.noted: list[float] = []
        """Seconds, not counted yet."""
        self._counts = np.zeros(len(BUCKETS), dtype=np.int64)
        self._sum_s = 0.0
        self._examples: list[Exemplar | None] = [None] * len(BUCKETS)

    def settle(self) -> None:
        """Count what is noted."""
        if not self.noted:
            return
        buckets = np.searchsorted(BOUNDS, self.noted)
        self._counts += np.bincount(buckets, minlength=len(BUCKETS))
        self._sum_s += sum(self.noted)
        self.noted.clear()

    def example(self, gap_s: float, trace_id: str) -> None:
        """In this trace there was such a gap."""
        bucket = int(np.searchsorted(BOUNDS, gap_s))
        self._examples[bucket] = Exemplar({"trace_id": trace_id}, gap_s, time.time())

    def add_to(self, family: HistogramMetricFamily, mode: str) -> None:
        """Show all that there were."""
        self.settle()
        counts = zip(BUCKETS, np.cumsum(self._counts).tolist(), self._examples, strict=True)
        family.add_metric([mode], [(bucket, count, example) for bucket, count, example in counts], self._sum_s)


class GapMetrics(Collector):  # type: ignore[misc]  # prometheus_client is not typed for us
    """Of all modes, when somebody asks."""

    def __init__(self) -> None:
        self.of = {mode: Gaps() for mode in MODES}

    def collect(self) -> list[HistogramMetricFamily]:
        """prometheus_client asks for this on each scrape."""
        family = HistogramMetricFamily(names.ROUTER_ITL.name, names.ROUTER_ITL.meaning, labels=names.ROUTER_ITL.labels)
        for mode, gaps in self.of.items():
            gaps.add_to(family, mode)
        return [family]

    def ended(self, mode: str, longest_s: float, trace_id: str) -> None:
        """A request has; ``trace_id``: its trace, if it is kept."""
        gaps = self.of[mode]
        if len(gaps.noted) > NOTED_MAX:
            gaps.settle()
        if trace_id and longest_s > 0.0:
            gaps.example(longest_s, trace_id)
