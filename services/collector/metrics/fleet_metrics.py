"""The fleet's metrics: load reports, totals and latencies of finished requests, fleet states and plans, added up."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass

from services.collector.metrics.windows import OTHER, Histogram, LabelSet, Rate, Totals
from shared.contracts.control import ServiceStatus
from shared.contracts.failures import Reason
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.inference import RequestFinished
from shared.contracts.kv_exchange import KvExchangeState
from shared.contracts.load import LoadReport, StoreState
from shared.contracts.planning import PlanAction, PlanDecision
from shared.contracts.workers import FleetState, Role, WorkerLost, WorkerRecord

MODELS_MAX = 64
STREAMED, OFFERED = HANDOFFS = ("streamed", "offered")
NO_HANDOFF = "none"
ACCEPTED, REJECTED = DRAFTS = ("accepted", "rejected")
MODES = ("aggregated", "disaggregated", "decode_first")
TOKENS_MAX = 1 << 32
"""Largest token count of one request that is added. Workers report the counts; a total that has taken in more is a
float too coarse to count on.
"""
REASONS = frozenset(reason.value for reason in Reason)


def plausible(tokens: int) -> int:
    """The tokens of one request; 0 where they are not known (-1), and for more than any request has."""
    return tokens if 0 <= tokens <= TOKENS_MAX else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Upper bounds of the histograms' buckets, seconds."""

    ttft: tuple[float, ...]
    itl: tuple[float, ...]
    e2e: tuple[float, ...]
    kv: tuple[float, ...]
    """KV wait and KV read times."""


class Latencies:
    """TTFT, ITL and E2E of requests, seconds."""

    __slots__ = ("e2e", "itl", "ttft")

    def __init__(self, bounds: Bounds) -> None:
        self.ttft = Histogram(bounds.ttft)
        self.itl = Histogram(bounds.itl)
        self.e2e = Histogram(bounds.e2e)

    def observe(self, request: RequestFinished) -> None:
        """Add one request's latencies; -1 means not known and is skipped, and so is a line of a batch."""
        if request.is_batch:
            return
        for histogram, value in ((self.ttft, request.ttft_s), (self.itl, request.itl_s), (self.e2e, request.e2e_s)):
            if value >= 0.0:
                histogram.observe(value)


@dataclass(slots=True)
class CachePredictions:
    """Cached tokens as the router predicted them and as the engines found them, where both are known."""

    predicted: int = 0
    actual: int = 0
    missed: int = 0
    """Sum of absolute errors, so that errors in both directions do not cancel out."""

    def compare(self, predicted: int, actual: int) -> None:
        """Add one request; -1 means not known."""
        if 0 <= predicted <= TOKENS_MAX and 0 <= actual <= TOKENS_MAX:
            self.predicted += predicted
            self.actual += actual
            self.missed += abs(predicted - actual)


class Handoffs:
    """KV handoffs of disaggregated requests: streamed during prefill, or offered after it."""

    def __init__(self, bounds: Bounds) -> None:
        self.count = dict.fromkeys(HANDOFFS, 0)
        self.waits = {each: Histogram(bounds.kv) for each in HANDOFFS}
        self.reads = {each: Histogram(bounds.kv) for each in HANDOFFS}
        self.recomputed = 0
        """Tokens that were computed again after a failed transfer: the first sign of trouble with the KV exchange."""
        self.reprefilled = 0
        self.read_back = 0
        self.drafts = {(how, result): 0 for how in (*HANDOFFS, NO_HANDOFF) for result in DRAFTS}
        """Drafted tokens by the handoff before, and whether the model agreed with them."""

    def add(self, request: RequestFinished) -> None:
        """Add one request; -1 means not known."""
        self.recomputed += plausible(request.recomputed_tokens)
        self.reprefilled += plausible(request.reprefilled_tokens)
        self.read_back += plausible(request.readback_tokens)
        handoff = NO_HANDOFF
        if request.mode == "disaggregated" and request.received_tokens > 0:
            handoff = STREAMED if request.streamed_handoff else OFFERED
        drafted = plausible(request.drafted_tokens)
        accepted = min(plausible(request.accepted_tokens), drafted)
        self.drafts[handoff, ACCEPTED] += accepted
        self.drafts[handoff, REJECTED] += drafted - accepted
        if handoff == NO_HANDOFF:
            return
        self.count[handoff] += 1
        for histogram, value in ((self.waits[handoff], request.kv_wait_s), (self.reads[handoff], request.kv_read_s)):
            if value >= 0.0:
                histogram.observe(value)


class Requests:
    """All requests since the start. Label values are bounded."""

    def __init__(self, bounds: Bounds, now: float) -> None:
        self.finished: Counter[tuple[str, str, str]] = Counter()
        """Requests by model, mode and HTTP status."""
        self.failed: Counter[tuple[str, str]] = Counter()
        """Failed requests by model and reason."""
        self.tokens: Counter[tuple[str, str]] = Counter()
        """Tokens by model and kind: prompt or completion."""
        self.latencies: dict[tuple[str, str], Latencies] = {}
        """Latencies by model and mode."""
        self.predictions = CachePredictions()
        self.handoffs = Handoffs(bounds)
        self.rate = Rate(now)
        self.prompt_tokens, self.completion_tokens = Rate(now), Rate(now)
        self._bounds = bounds
        self._models = LabelSet(MODELS_MAX)

    def add(self, request: RequestFinished, now: float) -> None:
        # Clients can send any model name. Unknown ones would fill the label set and displace served models.
        is_unknown = request.reason == Reason.MODEL_UNKNOWN
        model, mode = OTHER if is_unknown else self._models.bounded(request.model), mode_of(request)
        self.finished[model, mode, str(request.status)] += 1
        if request.reason:
            self.failed[model, reason_of(request)] += 1
        if (model, mode) not in self.latencies:
            self.latencies[model, mode] = Latencies(self._bounds)
        self.latencies[model, mode].observe(request)
        self.predictions.compare(request.predicted_cached_tokens, request.cached_tokens)
        self.handoffs.add(request)
        self.rate.add(1, now)
        for kind, tokens, rate in (
            ("prompt", request.prompt_tokens, self.prompt_tokens),
            ("completion", request.completion_tokens, self.completion_tokens),
        ):
            known = plausible(tokens)
            self.tokens[model, kind] += known
            rate.add(known, now)


def mode_of(request: RequestFinished) -> str:
    return request.mode if request.mode in MODES else OTHER


def reason_of(request: RequestFinished) -> str:
    """The failure reason as a label."""
    return request.reason if request.reason in REASONS else OTHER


PLAN_STALE_S_MAX = 60.0
"""A plan that is not renewed for this long is no longer shown."""
FAMILIES_MAX = 64


class PlanView:
    """Wanted workers and load by model and role, and the changes since this process started."""

    def __init__(self) -> None:
        self.changes: Counter[tuple[str, str]] = Counter()
        """Changes by action and role."""
        self._plans: dict[tuple[str, str], tuple[PlanDecision, float]] = {}

    def update(self, decision: PlanDecision, now: float) -> None:
        """The planner made a decision, or the outcome of one is known."""
        key = (decision.model, decision.fingerprint)
        if key in self._plans or len(self._plans) < FAMILIES_MAX:
            self._plans[key] = (decision, now)
        if decision.action is not PlanAction.NOTHING and not decision.outcome:
            self.changes[decision.action.value, decision.role.value if decision.role else ""] += 1

    def expire(self, now: float) -> None:
        """Drop old plans."""
        self._plans = {key: (plan, at) for key, (plan, at) in self._plans.items() if now - at < PLAN_STALE_S_MAX}

    def wanted(self) -> dict[tuple[str, str], int]:
        """Workers by model and role, summed over the model's fingerprints."""
        wanted: Counter[tuple[str, str]] = Counter()
        for decision, _at in self._plans.values():
            for each in decision.roles:
                wanted[decision.model, each.role.value] += each.wanted
        return dict(wanted)

    def load(self) -> dict[tuple[str, str], float]:
        """Load by model and role: the highest among the model's fingerprints."""
        load: dict[tuple[str, str], float] = {}
        for decision, _at in self._plans.values():
            for each in decision.roles:
                key = (decision.model, each.role.value)
                load[key] = max(load.get(key, 0.0), each.load)
        return load


WORKERS_MAX = 1024
SERVICES_MAX = 1024
LIVES_MAX = 256
"""Lost worker lives (id and epoch) that are remembered."""
STALE_S_MAX = 10.0
"""A source that has not reported for this long is no longer shown."""
FORGET_S = 3600.0
"""A silent worker's totals are kept for this long, so that they do not count twice when it comes back."""
STEP_TOKENS_DEFAULT = 2048
HITS_S = 60
"""Window of a worker's cache hit ratio."""
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
"""Counters of load reports since the start of their epoch, in fields named ``<total>_total``."""
EXCHANGE_TOTALS = (
    "leases_granted",
    "leases_released",
    "leases_expired",
    "leases_refused",
    "reads",
    "reads_failed",
    "refused_requests",
    "recomputed_tokens",
    "first_tokens_received",
    "recompute_slowed_seconds",
    "copied_blocks",
    "lost_blocks",
    "prefetched_blocks",
    "prefetch_used_blocks",
    "prefetch_wasted_blocks",
)
"""Counters in a load report's ``exchange`` since the start of the epoch, in fields named ``<total>_total``."""
STORE_TOTALS = (
    "loaded_blocks",
    "saved_blocks",
    "damaged_blocks",
    "unsaved_blocks",
    "evicted_host_blocks",
    "evicted_disk_blocks",
    "evicted_object_blocks",
    "granted_bytes",
)
"""Counters in a load report's ``store`` since the start of the epoch, in fields named ``<total>_total``."""


class InRole:
    """What a worker has counted in one of its roles. Its counters have the role as a label: after a change of roles
    they begin at zero, and those of the role before stay as they are.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.totals: defaultdict[str, float] = defaultdict(float)
        self.latencies = Latencies(bounds)
        """Latencies of requests that the worker decoded."""
        self.requests: Counter[str] = Counter()
        """Requests that it decoded, by mode."""
        self.failures: Counter[str] = Counter()
        """Failed requests that were placed on it for decode, by reason."""
        self.predictions = CachePredictions()
        """Predictions of requests whose prompts the worker computed."""


class WorkerView:
    """One worker's metrics."""

    def __init__(self, load: LoadReport, bounds: Bounds, now: float) -> None:
        self.load = load
        self.heard = now
        self.totals = Totals()
        self.tokens_in = Rate(now)
        self.tokens_out = Rate(now)
        self.prompt, self.cached = Rate(now, HITS_S), Rate(now, HITS_S)
        """Prompt tokens, and how many of them were in its own prefix cache."""
        self.roles: dict[Role, InRole] = {}
        """The counters of each role that it has had."""
        self._bounds = bounds

    @property
    def in_role(self) -> InRole:
        """The counters of its present role."""
        role = self.load.role
        if role not in self.roles:
            self.roles[role] = InRole(self._bounds)
        return self.roles[role]

    def grow(self, load: LoadReport, now: float) -> dict[str, float]:
        """Take a newer report; returns the increase of each total."""
        self.load, self.heard = load, now
        exchange, store = load.exchange or KvExchangeState(), load.store or StoreState()
        totals = {name: float(getattr(load, f"{name}_total")) for name in TOTALS}
        totals |= {name: float(getattr(exchange, f"{name}_total")) for name in EXCHANGE_TOTALS}
        totals |= {name: float(getattr(store, f"{name}_total")) for name in STORE_TOTALS}
        totals["step_seconds"] = load.steps.seconds if load.steps is not None else 0.0
        growth = self.totals.grow(load.epoch, totals)
        totals_in_role = self.in_role.totals
        for name, amount in growth.items():
            totals_in_role[name] += amount
        return growth


class FleetView:
    """The fleet as the leading orchestrator publishes it."""

    def __init__(self) -> None:
        self.state: FleetState | None = None
        """The leader's newest state; None after it has stopped publishing."""
        self.records: dict[WorkerId, WorkerRecord] = {}
        """Records in the newest state that was published."""
        self.workers_lost = 0
        self._heard = 0.0
        self._lives_lost: deque[tuple[WorkerId, Epoch]] = deque(maxlen=LIVES_MAX)

    def update(self, state: FleetState, now: float) -> None:
        """Take a state, unless it comes from a leader of an earlier term, which may not know that it was replaced."""
        self.expire(now)
        if self.state is None or state.term >= self.state.term:
            self.state, self._heard = state, now
            self.records = {each.record.worker_id: each.record for each in state.workers}

    def lost(self, lost: WorkerLost) -> None:
        """Count a lost worker. A new leader repeats its predecessor's losses, so each life counts once."""
        life = (lost.worker_id, lost.epoch)
        if life not in self._lives_lost:
            self._lives_lost.append(life)
            self.workers_lost += 1

    def step_tokens(self, model: str) -> int:
        """Most tokens that a model's engines compute in one step; a default when no worker is known."""
        workers = self.state.workers if self.state is not None else []
        known = [one.record.step_tokens_max for one in workers if model in one.record.models]
        return max(known, default=STEP_TOKENS_DEFAULT)

    def expire(self, now: float) -> None:
        """Drop the state when the leader has stopped publishing."""
        if now - self._heard >= STALE_S_MAX:
            self.state = None


class FleetMetrics:
    """All metrics of the fleet. Workers, services and label values are bounded."""

    def __init__(self, bounds: Bounds, now: float) -> None:
        self.workers: dict[WorkerId, WorkerView] = {}
        self.worker_totals: dict[str, float] = dict.fromkeys(TOTALS, 0.0)
        """Over all workers, past and present."""
        self.services: dict[tuple[str, str], tuple[ServiceStatus, float]] = {}
        """The last status of each service and instance, and when it arrived."""
        self.requests = Requests(bounds, now)
        self.fleet = FleetView()
        self.plans = PlanView()
        self._bounds = bounds

    def load_reported(self, load: LoadReport, now: float) -> None:
        view = self.workers.get(load.worker_id)
        if view is None:
            if not self._can_add_worker(now):
                return
            view = self.workers[load.worker_id] = WorkerView(load, self._bounds, now)
            # What the worker counted before this process started adds to totals, but not to rates.
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
        self.requests.add(request, now)
        if view := self.workers.get(WorkerId(request.decode_worker)):
            counted = view.in_role
            counted.latencies.observe(request)
            counted.requests[mode_of(request)] += 1
            if request.reason:
                counted.failures[reason_of(request)] += 1
        if view := self.workers.get(WorkerId(request.prefill_worker or request.decode_worker)):
            view.in_role.predictions.compare(request.predicted_cached_tokens, request.cached_tokens)

    def service_status(self, status: ServiceStatus, now: float) -> None:
        key = (status.service, status.instance)
        if key in self.services or len(self.services) < SERVICES_MAX:
            self.services[key] = (status, now)

    def expire(self, now: float) -> None:
        """Drop everything whose source has stopped reporting."""
        self.fleet.expire(now)
        self.plans.expire(now)
        for key in [key for key, (_status, heard) in self.services.items() if now - heard >= STALE_S_MAX]:
            del self.services[key]
        for worker_id in [each for each, view in self.workers.items() if now - view.heard >= FORGET_S]:
            del self.workers[worker_id]

    def live_workers(self, now: float) -> dict[WorkerId, WorkerView]:
        """Workers that have reported recently, sorted by id."""
        return {
            worker_id: self.workers[worker_id]
            for worker_id in sorted(self.workers)
            if now - self.workers[worker_id].heard < STALE_S_MAX
        }

    def _can_add_worker(self, now: float) -> bool:
        if len(self.workers) >= WORKERS_MAX:
            longest_silent = min(self.workers, key=lambda each: self.workers[each].heard)
            if now - self.workers[longest_silent].heard >= STALE_S_MAX:
                del self.workers[longest_silent]
        return len(self.workers) < WORKERS_MAX
