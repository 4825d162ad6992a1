"""What the fleet does, added up: load reports, finished requests and the fleet's state become numbers to show."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from services.collector.core.windows import OTHER, Histogram, LabelSet, Rate, Totals
from shared.contracts.control import ServiceStatus
from shared.contracts.failures import Reason
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.inference import RequestFinished
from shared.contracts.load import LoadReport
from shared.contracts.workers import FleetState, WorkerLost

WORKERS_MAX = 1024
SERVICES_MAX = 1024
MODELS_MAX = 64
LIVES_MAX = 256
"""Lost lives that are told apart."""
STALE_S_MAX = 10.0
"""Who has said nothing for so long is no longer shown."""
FORGET_S = 3600.0
"""Totals of a silent worker are kept for so long, so that they don't count twice when it comes back."""
MODES = ("aggregated", "disaggregated")
REASONS = frozenset(reason.value for reason in Reason)
TOTALS = (
    "prompt_tokens",
    "computed_tokens",
    "cached_tokens",
    "received_tokens",
    "generation_tokens",
    "received_bytes",
    "received_seconds",
    "preemptions",
)
"""What load reports count since their epoch's start, in fields named ``<total>_total``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Upper bounds of the histograms' buckets, seconds."""

    ttft: tuple[float, ...]
    itl: tuple[float, ...]
    e2e: tuple[float, ...]


class Latencies:
    """TTFT, ITL and E2E of requests, seconds."""

    __slots__ = ("e2e", "itl", "ttft")

    def __init__(self, bounds: Bounds) -> None:
        self.ttft = Histogram(bounds.ttft)
        self.itl = Histogram(bounds.itl)
        self.e2e = Histogram(bounds.e2e)

    def observe(self, request: RequestFinished) -> None:
        """Add what the request's router knows of it; -1 is not known."""
        for histogram, value in ((self.ttft, request.ttft_s), (self.itl, request.itl_s), (self.e2e, request.e2e_s)):
            if value >= 0.0:
                histogram.observe(value)


class WorkerView:
    """One worker's numbers."""

    def __init__(self, load: LoadReport, bounds: Bounds, now: float) -> None:
        self.load = load
        self.heard = now
        self.totals = Totals()
        self.tokens_in = Rate(now)
        self.tokens_out = Rate(now)
        self.latencies = Latencies(bounds)
        """Of the requests whose tokens it generated."""
        self.requests: Counter[str] = Counter()
        """Requests that it generated tokens for, by mode."""


@dataclass(slots=True)
class CachePredictions:
    """Cached tokens as the router expected them and as the engines found them, where both are known."""

    predicted: int = 0
    actual: int = 0
    missed: int = 0
    """Sum of the distances: predictions that err both ways don't cancel out."""

    def compare(self, predicted: int, actual: int) -> None:
        """One more request; -1 is not known."""
        if predicted >= 0 and actual >= 0:
            self.predicted += predicted
            self.actual += actual
            self.missed += abs(predicted - actual)


@dataclass(slots=True)
class RequestTotals:
    """All requests since the start."""

    finished: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """By model, mode and HTTP status."""
    failed: Counter[str] = field(default_factory=Counter)
    """By reason."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    latencies: dict[tuple[str, str], Latencies] = field(default_factory=dict)
    """By model and mode."""
    predictions: CachePredictions = field(default_factory=CachePredictions)


class Ledger:
    """Everything that is shown. Bounded: workers, services and models each have a maximum."""

    def __init__(self, bounds: Bounds, now: float) -> None:
        self.bounds = bounds
        self.workers: dict[WorkerId, WorkerView] = {}
        self.services: dict[tuple[str, str], tuple[ServiceStatus, float]] = {}
        self.requests = RequestTotals()
        self.fleet: FleetState | None = None
        self.worker_totals: dict[str, float] = dict.fromkeys(TOTALS, 0.0)
        """Over all workers that ever were."""
        self.workers_lost = 0
        self.request_rate = Rate(now)
        self.tokens_in = Rate(now)
        """Prompt tokens of finished requests."""
        self.tokens_out = Rate(now)
        """Completion tokens of finished requests."""
        self._lives_lost: deque[tuple[WorkerId, Epoch]] = deque(maxlen=LIVES_MAX)
        self._fleet_heard = now
        self._models = LabelSet(MODELS_MAX)

    def load_reported(self, load: LoadReport, now: float) -> None:
        """A worker said how busy it is."""
        view = self.workers.get(load.worker_id)
        if view is not None and load.epoch < view.load.epoch:
            return
        first_look = view is None
        if view is None:
            if not self._room_for_worker(now):
                return
            view = self.workers[load.worker_id] = WorkerView(load, self.bounds, now)
        growth = view.totals.grow(load.epoch, {name: float(getattr(load, f"{name}_total")) for name in TOTALS})
        view.load, view.heard = load, now
        for name, amount in growth.items():
            self.worker_totals[name] += amount
        if not first_look:
            # What was counted before this process looked did not happen just now.
            view.tokens_in.add(growth["prompt_tokens"], now)
            view.tokens_out.add(growth["generation_tokens"], now)

    def request_finished(self, request: RequestFinished, now: float) -> None:
        """A router told a request's story."""
        totals = self.requests
        model = self._models.bounded(request.model)
        mode = request.mode if request.mode in MODES else OTHER
        totals.finished[model, mode, str(request.status)] += 1
        if request.reason:
            totals.failed[request.reason if request.reason in REASONS else OTHER] += 1
        totals.prompt_tokens += max(0, request.prompt_tokens)
        totals.completion_tokens += max(0, request.completion_tokens)
        totals.latencies.setdefault((model, mode), Latencies(self.bounds)).observe(request)
        totals.predictions.compare(request.predicted_cached_tokens, request.cached_tokens)
        self.request_rate.add(1, now)
        self.tokens_in.add(max(0, request.prompt_tokens), now)
        self.tokens_out.add(max(0, request.completion_tokens), now)
        if view := self.workers.get(WorkerId(request.decode_worker)):
            view.latencies.observe(request)
            view.requests[mode] += 1

    def fleet_told(self, fleet: FleetState, now: float) -> None:
        """The orchestrator said who is there. A leader of an earlier term has not heard that it was replaced."""
        fresh = now - self._fleet_heard < STALE_S_MAX
        if self.fleet is None or fleet.term >= self.fleet.term or not fresh:
            self.fleet, self._fleet_heard = fleet, now

    def worker_lost(self, lost: WorkerLost) -> None:
        """The orchestrator gave a worker up. A new leader says again what its predecessor said: a life counts once."""
        life = (lost.worker_id, lost.epoch)
        if life not in self._lives_lost:
            self._lives_lost.append(life)
            self.workers_lost += 1

    def service_told(self, status: ServiceStatus, now: float) -> None:
        """A process said in which phase it is."""
        key = (status.service, status.instance)
        if key in self.services or len(self.services) < SERVICES_MAX:
            self.services[key] = (status, now)

    def expire(self, now: float) -> None:
        """Drop what nobody speaks for any more."""
        if self.fleet and now - self._fleet_heard >= STALE_S_MAX:
            self.fleet = None
        for key in [key for key, (_status, heard) in self.services.items() if now - heard >= STALE_S_MAX]:
            del self.services[key]
        for worker_id in [each for each, view in self.workers.items() if now - view.heard >= FORGET_S]:
            del self.workers[worker_id]

    def live_workers(self, now: float) -> dict[WorkerId, WorkerView]:
        """Those that were heard lately, by name."""
        return {
            worker_id: self.workers[worker_id]
            for worker_id in sorted(self.workers)
            if now - self.workers[worker_id].heard < STALE_S_MAX
        }

    def _room_for_worker(self, now: float) -> bool:
        if len(self.workers) >= WORKERS_MAX:
            longest_silent = min(self.workers, key=lambda each: self.workers[each].heard)
            if now - self.workers[longest_silent].heard >= STALE_S_MAX:
                del self.workers[longest_silent]
        return len(self.workers) < WORKERS_MAX
