"""What the fleet does, added up: load reports, finished requests and the fleet's state become numbers to show."""

from __future__ import annotations

from collections import Counter, deque

from services.collector.metrics.plans import PlanView
from services.collector.metrics.requests import Bounds, CachePredictions, Latencies, Requests, mode_of, reason_of
from services.collector.metrics.windows import Rate, Totals
from shared.contracts.control import ServiceStatus
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.inference import RequestFinished
from shared.contracts.kv_exchange import KvLedgerState
from shared.contracts.load import LoadReport, StoreState
from shared.contracts.workers import FleetState, WorkerLost

WORKERS_MAX = 1024
SERVICES_MAX = 1024
LIVES_MAX = 256
"""Lost lives that are told apart."""
STALE_S_MAX = 10.0
"""Who has said nothing for so long is no longer shown."""
FORGET_S = 3600.0
"""Totals of a silent worker are kept for so long, so that they don't count twice when it comes back."""
STEP_TOKENS_USUAL = 2048
HITS_S = 60
"""How much of its prompts a worker found in its cache is told of so many seconds."""
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
EXCHANGE_TOTALS = (
    "leases_granted",
    "leases_released",
    "leases_expired",
    "leases_refused",
    "reads",
    "reads_failed",
    "refused_requests",
    "recomputed_tokens",
)
"""The same of their ``exchange``."""
STORE_TOTALS = (
    "loaded_blocks",
    "saved_blocks",
    "damaged_blocks",
    "unsaved_blocks",
    "evicted_host_blocks",
    "evicted_disk_blocks",
    "granted_bytes",
)
"""The same of their ``store``."""


class WorkerView:
    """One worker's numbers."""

    def __init__(self, load: LoadReport, bounds: Bounds, now: float) -> None:
        self.load = load
        self.heard = now
        self.totals = Totals()
        self.tokens_in = Rate(now)
        self.tokens_out = Rate(now)
        self.prompt, self.cached = Rate(now, HITS_S), Rate(now, HITS_S)
        """Prompt tokens, and those of them that were in its own prefix cache."""
        self.latencies = Latencies(bounds)
        """Of the requests whose tokens it generated."""
        self.requests: Counter[str] = Counter()
        """Requests that it generated tokens for, by mode."""
        self.failures: Counter[str] = Counter()
        """Requests that it was to generate and that did not end well, by reason."""
        self.predictions = CachePredictions()
        """Of the requests whose prompts it computed."""

    def grow(self, load: LoadReport, now: float) -> dict[str, float]:
        """Take a newer report; answers what was added to each total."""
        self.load, self.heard = load, now
        exchange, store = load.exchange or KvLedgerState(), load.store or StoreState()
        totals = {name: float(getattr(load, f"{name}_total")) for name in TOTALS}
        totals |= {name: float(getattr(exchange, f"{name}_total")) for name in EXCHANGE_TOTALS}
        totals |= {name: float(getattr(store, f"{name}_total")) for name in STORE_TOTALS}
        totals["step_seconds"] = load.steps.seconds if load.steps is not None else 0.0
        return self.totals.grow(load.epoch, totals)


class FleetView:
    """What orchestrators say."""

    def __init__(self) -> None:
        self.state: FleetState | None = None
        """The newest of the leader's, until it is silent."""
        self.workers_lost = 0
        self._heard = 0.0
        self._lives_lost: deque[tuple[WorkerId, Epoch]] = deque(maxlen=LIVES_MAX)

    def told(self, state: FleetState, now: float) -> None:
        """Who is there. A leader of an earlier term has not heard that it was replaced."""
        self.expire(now)
        if self.state is None or state.term >= self.state.term:
            self.state, self._heard = state, now

    def lost(self, lost: WorkerLost) -> None:
        """A worker was given up. A new leader says again what its predecessor said: a life counts once."""
        life = (lost.worker_id, lost.epoch)
        if life not in self._lives_lost:
            self._lives_lost.append(life)
            self.workers_lost += 1

    def step_tokens(self, model: str) -> int:
        """What a model's engines compute in one step, at most; the wire's own default where nobody knows."""
        workers = self.state.workers if self.state is not None else []
        told = [one.record.step_tokens_max for one in workers if model in one.record.models]
        return max(told, default=STEP_TOKENS_USUAL)

    def expire(self, now: float) -> None:
        """Show no fleet that nobody vouches for."""
        if now - self._heard >= STALE_S_MAX:
            self.state = None


class Ledger:
    """Everything that is shown. Bounded: workers, services and labels each have a maximum."""

    def __init__(self, bounds: Bounds, now: float) -> None:
        self.workers: dict[WorkerId, WorkerView] = {}
        self.worker_totals: dict[str, float] = dict.fromkeys(TOTALS, 0.0)
        """Over all workers that ever were."""
        self.services: dict[tuple[str, str], tuple[ServiceStatus, float]] = {}
        """By service and instance: what it said last, and when."""
        self.requests = Requests(bounds, now)
        self.fleet = FleetView()
        self.plans = PlanView()
        self._bounds = bounds

    def load_reported(self, load: LoadReport, now: float) -> None:
        """A worker said how busy it is."""
        view = self.workers.get(load.worker_id)
        if view is None:
            if not self._room_for_worker(now):
                return
            view = self.workers[load.worker_id] = WorkerView(load, self._bounds, now)
            # What was counted before this process looked did not happen just now: totals, but no rate.
            growth = view.grow(load, now)
        elif load.epoch < view.load.epoch:
            return
        else:
            growth = view.grow(load, now)
            view.tokens_in.add(growth["prompt_tokens"], now)
            view.tokens_out.add(growth["generation_tokens"], now)
            view.prompt.add(growth["prompt_tokens"], now)
            view.cached.add(growth["cached_tokens"], now)
        for name in TOTALS:
            self.worker_totals[name] += growth[name]

    def request_finished(self, request: RequestFinished, now: float) -> None:
        """A router told a request's story."""
        self.requests.add(request, now)
        if view := self.workers.get(WorkerId(request.decode_worker)):
            view.latencies.observe(request)
            view.requests[mode_of(request)] += 1
            if request.reason:
                view.failures[reason_of(request)] += 1
        if view := self.workers.get(WorkerId(request.prefill_worker or request.decode_worker)):
            view.predictions.compare(request.predicted_cached_tokens, request.cached_tokens)

    def service_told(self, status: ServiceStatus, now: float) -> None:
        """A process said in which phase it is."""
        key = (status.service, status.instance)
        if key in self.services or len(self.services) < SERVICES_MAX:
            self.services[key] = (status, now)

    def expire(self, now: float) -> None:
        """Drop what nobody speaks for any more."""
        self.fleet.expire(now)
        self.plans.expire(now)
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
