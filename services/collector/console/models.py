"""The console's models: the workers of each, and its requests of the last minute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from services.collector.console.traffic import MINUTE_S, counts_as_failure
from services.collector.console.views import ModelRow, WorkerCard
from services.collector.metrics.requests import MODELS_MAX
from services.collector.metrics.windows import Rate
from shared.contracts.inference import RequestFinished
from shared.contracts.workers import WorkerPhase

READY = WorkerPhase.READY.value


class ModelTraffic:
    """One model's last minute."""

    __slots__ = ("failed", "requests", "tokens_in", "tokens_out", "ttft_s", "ttfts")

    def __init__(self, now: float) -> None:
        self.requests, self.failed, self.tokens_in, self.tokens_out = (Rate(now, MINUTE_S) for _ in range(4))
        self.ttft_s, self.ttfts = (Rate(now, MINUTE_S) for _ in range(2))
        """Sum and number of the known times to the first token."""

    def add(self, request: RequestFinished, now: float) -> None:
        """Add a finished request."""
        self.requests.add(1, now)
        self.tokens_in.add(max(0, request.prompt_tokens), now)
        self.tokens_out.add(max(0, request.completion_tokens), now)
        if counts_as_failure(request):
            self.failed.add(1, now)
        if request.ttft_s >= 0.0:
            self.ttft_s.add(request.ttft_s, now)
            self.ttfts.add(1, now)

    def mean_ttft_s(self, now: float) -> float | None:
        """None without a request that had a first token."""
        count = self.ttfts.per_second(now)
        return round(self.ttft_s.per_second(now) / count, 4) if count else None


class Models:
    """Models that have workers. Clients can name others; those are not shown."""

    def __init__(self) -> None:
        self._models: dict[str, ModelTraffic] = {}

    def add(self, request: RequestFinished, now: float) -> None:
        """Add a finished request."""
        if (traffic := self._models.get(request.model)) is not None:
            traffic.add(request, now)

    def update(self, cards: Iterable[WorkerCard], now: float) -> None:
        """Follow the models of these workers, and forget the others."""
        names = sorted({card.model for card in cards if card.model})[:MODELS_MAX]
        self._models = {name: self._models.get(name) or ModelTraffic(now) for name in names}

    def rows(self, cards: Iterable[WorkerCard], now: float) -> list[ModelRow]:
        """One row for each model, sorted by name."""
        ready = Counter((card.model, card.role) for card in cards if card.phase == READY)
        return [
            _row(name, {role: count for (model, role), count in sorted(ready.items()) if model == name}, traffic, now)
            for name, traffic in self._models.items()
        ]


def _row(model: str, ready: dict[str, int], traffic: ModelTraffic, now: float) -> ModelRow:
    return ModelRow(
        model=model,
        ready=ready,
        requests_per_s=round(traffic.requests.per_second(now), 2),
        tokens_in_per_s=round(traffic.tokens_in.per_second(now), 1),
        tokens_out_per_s=round(traffic.tokens_out.per_second(now), 1),
        failed_per_s=round(traffic.failed.per_second(now), 2),
        ttft_s=traffic.mean_ttft_s(now),
    )
