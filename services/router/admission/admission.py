"""Decides when a request is placed: at once if an engine would begin it soon, otherwise later from a queue.

A request that waits in the router can still go to any worker; one that waits in an engine's queue cannot. So each
engine gets enough work to be busy and no more. All other requests wait in the router, ordered by priority, then by the
fair shares of tenants, then by deadline. On each change a scheduling pass places the first ones again with current
data. A request that would still have to wait for a worker reserves that worker: later requests may begin on other
workers only. So no request starves, and no request waits that could run.

Where a step that computes a prompt is longer than the target between tokens, prompts leave gaps for steps without one:
see ``pacing``.

All waits are bounded. A request that cannot begin in time to be useful is rejected as soon as that is predicted. When
the queue is full, a request of a tenant with more than its share is rejected first.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import Final

import msgspec

from services.router.admission.fair_share import cost_of
from services.router.admission.pacing import Pacing
from services.router.admission.policy import AdmissionPolicy
from services.router.admission.queues import (
    ANY_WORKER,
    NONE_GIVEN,
    GivenWork,
    ModelQueue,
    Place,
    PrefillLoads,
    PriorityQueue,
    QueueEntry,
    SchedulingPass,
    prefill_worker,
)
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.request.timings import total_s
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId

LATE_SHARE_MAX: Final = 1 / 32
"""Share of the engines' time for prompts that even an idle engine would complete after their target. Each of them
delays other requests and gains nothing; without a bound, on the conversation trace at light load, they raised the p95
between tokens from 15 ms to 103 ms. While nothing else runs there is no bound.
"""
LATE_LOAD_MAX: Final = 0.5
"""Late prompts begin where prompts take at most this share of the engine's time, which leaves room for the next burst.
At the knees of the conversation trace and of the made agents prompts take two thirds and a fifth of it on average.
"""
WAIT_TARGET_SHARE: Final = 0.8
"""A waiting request is rejected when its first token is predicted for later than this share of its target. Predictions
are exceeded: with 1, 4 % of the conversation trace's requests began in overload and came just too late.
"""
WORK_S_MIN: Final = 0.001
"""Minimum engine time of a request; a fully cached prompt takes some time, too."""
WAIT_SHARE_MIN: Final = 0.05
"""A request may always wait for this share of its own time to the first token."""
RETRY_AFTER_S_MIN: Final = 1.0
RETRY_AFTER_S_MAX: Final = 120.0
"""Bounds of Retry-After, independent of the prediction."""
UNTARGETED_WAIT: Final = 10.0
"""Without a target, requests that wait as many times their own time as others count as equally late: short prompts go
first, and a longer one is overtaken for ten times the difference. In overload, first come, first served would make all
of them as late as the longest.
"""
MEAN_PROMPTS_AHEAD: Final = 1.5
"""Mean prompts that an engine may hold before the next is sent to it: the one that it computes and part of another. A
worker reports a prompt a little after it is computed; the next prompt must be there already.
"""
RECHECK_S: Final = 0.02
"""Changes in the fleet cause scheduling passes so far apart, unless a worker is predicted to be ready before. Engines
have work for longer than that; a pass costs a placement for each request that it tries.
"""
MODELS_IDLE_MAX: Final = 64
"""Models whose counters are kept while none of their requests waits."""
EXPIRIES_SPARE: Final = 64
"""Entries in the heap of expiries of requests that no longer wait: at most the number of waiting requests plus this."""


class Admission:
    """Waiting requests and the shares of their tenants. ``place`` decides on which workers a request may go."""

    def __init__(self, policy: AdmissionPolicy, place: Place) -> None:
        self._policy = policy
        self._place = place
        self._models: dict[str, ModelQueue] = {}
        self._numbers = 0
        self._expiries: list[tuple[float, int, QueueEntry]] = []
        self._evicted: list[tuple[QueueEntry, Placement | Rejection]] = []
        """Requests evicted from a full queue; returned by the next ``schedule``."""
        self._unfinished = False
        """The last scheduling passes did not reach all requests that may begin."""
        self._running: dict[WorkerId, int] = {}
        """Number of requests by the worker that generates their completion."""
        self._loads = PrefillLoads()
        self._pacing = Pacing()
        self._paced_at = math.inf
        """When the first gap ends that a waiting request waits for, according to the last scheduling pass."""
        self._ready_at = math.inf
        """When the first gap or queue ends that a waiting request waits for, as predicted in that pass."""
        self._is_open = False
        """Whether a request waits for something that is not predicted, according to the last scheduling pass."""
        self._passed_at = -math.inf
        """When the last scheduling pass ran."""
        self.waiting = 0

    def offer(self, entry: QueueEntry, now: float) -> Placement | Rejection | None:
        """Admit an arriving request. None if it must wait; ``schedule`` decides about it later."""
        request = entry.request
        result = self._place(request, now)
        if isinstance(result, Rejection) and result.reason is not Reason.WORKER_BUSY:
            return result
        models = self._model_queue(queue_name(request))
        queue = entry.queue = models.of_priority(request.priority, self._policy.tenant_weights)
        self._estimate(entry, result)
        if isinstance(result, Placement):
            if (rejection := self._reject_late(entry, result, now)) is not None:
                return rejection
            obstacle = self._obstacle(entry, result, now)
            if obstacle is not None and (other := self._elsewhere(entry, result, now)) is not None:
                result, obstacle = other, None
                entry.gap_worker, entry.gap_step_s = ANY_WORKER, 0.0
            if obstacle is None and models.may_overtake(prefill_worker(result), result.decode.record.worker_id):
                queue.share.enter(request.tenant)
                self._begin(entry, result, now)
                queue.share.leave(request.tenant)
                return result
            entry.awaits = obstacle or prefill_worker(result)
            self._unfinished = self._unfinished or obstacle is None
        else:
            self._is_open = True
        return self._enqueue(entry, result, now)

    def withdraw(self, entry: QueueEntry) -> None:
        """Remove a waiting request, for example of a client that has left; does nothing if it does not wait."""
        if entry.waiting:
            self._leave(entry)

    def schedule(self, now: float) -> list[tuple[QueueEntry, Placement | Rejection]]:
        """Run scheduling passes after a change; returns the requests that are placed or rejected now."""
        decided, self._evicted = self._evicted, []
        self._unfinished = False
        self._paced_at = self._ready_at = math.inf
        self._passed_at, self._is_open = now, False
        expiries = self._expiries
        while expiries and expiries[0][0] <= now:
            entry = heappop(expiries)[-1]
            if entry.waiting:
                decided.append((entry, self._expired(entry, now)))
                self._leave(entry)
        for queue in [queue for queue in self._models.values() if queue.count]:
            queue.throughput.advance(now)
            scheduling = SchedulingPass(queue, self._place, self._obstacle, self._elsewhere)
            scheduling.run(now)
            self._unfinished = self._unfinished or scheduling.unfinished
            self._is_open = self._is_open or not queue.may_overtake()
            for entry, result in scheduling.decided:
                self._leave(entry)
                if isinstance(result, Placement):
                    queue.throughput.begun(entry.work_s)
                    self._estimate(entry, result)
                    self._begin(entry, result, now)
            decided += scheduling.decided
        return decided

    def wakes_at(self, now: float) -> float | None:
        """When ``schedule`` must run even without a change; None if no request waits."""
        if self._unfinished or self._evicted:
            return now
        while self._expiries and not self._expiries[0][-1].waiting:
            heappop(self._expiries)
        return min(self._expiries[0][0], max(self._paced_at, now)) if self._expiries else None

    def pass_at(self, now: float) -> float:
        """When ``schedule`` must run after a change in the fleet."""
        return now if self._is_open or now >= self._ready_at else max(now, self._passed_at + RECHECK_S)

    def ended(self, entry: QueueEntry, computed_tokens: int = -1, tokens_out: int = -1) -> None:
        """A placed request has ended. Charge its tenant for the tokens (-1: unknown) instead of the estimate.

        A failed request stays charged with the estimate, since a worker may have computed it.
        """
        placement, queue = entry.placement, entry.queue
        if placement is None or queue is None:
            return
        entry.placement = None
        worker_id = placement.decode.record.worker_id
        left = self._running[worker_id] - 1
        if left:
            self._running[worker_id] = left
        else:
            del self._running[worker_id]
        if computed_tokens >= 0 and tokens_out >= 0:
            tenant = entry.request.tenant
            queue.share.charge(tenant, cost_of(computed_tokens, tokens_out) - entry.cost)
            queue.share.completed(tenant, tokens_out / entry.request.sequences)

    def _model_queue(self, name: str) -> ModelQueue:
        queue = self._models.get(name)
        if queue is None:
            if len(self._models) >= MODELS_IDLE_MAX:
                self._models = {model: queue for model, queue in self._models.items() if queue.count}
            queue = self._models[name] = ModelQueue()
        return queue

    def _estimate(self, entry: QueueEntry, result: Placement | Rejection) -> None:
        """Set the request's work and cost, from its placement or else from the model's mean."""
        request, queue = entry.request, entry.queue
        assert queue is not None
        tokens_out = request.sequences * queue.share.expected_tokens_out(request.tenant, request.tokens_out)
        if isinstance(result, Rejection):
            entry.work_s = queue.model_queue.work_s
            entry.cost = cost_of(request.prompt_tokens, tokens_out)
        else:
            entry.work_s = max(WORK_S_MIN, result.predicted.fetch_s + result.predicted.prefill_s)
            entry.cost = cost_of(result.uncached_tokens, tokens_out)
            queue.model_queue.learn_work(entry.work_s)

    def _obstacle(self, entry: QueueEntry, placement: Placement, now: float, given_s: float = 0.0) -> WorkerId | None:
        """The worker that the request must wait for; None if it can begin. ``given_s``: seconds of work that the worker
        got and that its predicted queue does not contain yet.

        A decode worker that serves none of this router's requests is no obstacle: waiting would not make it faster.
        Prompts that will be computed beside the answer do not count here: the worker's latest ones say nothing about
        them, and ``pacing`` decides when the next ones come.
        """
        predicted, queue = placement.predicted, entry.queue
        own_s = MEAN_PROMPTS_AHEAD * queue.model_queue.work_s if queue is not None else 0.0
        soon_s = max(self._policy.engine_queue_s_max, own_s)
        queued_s = predicted.queue_s + given_s - soon_s
        if queued_s > 0.0:
            self._ready_at = min(self._ready_at, now + queued_s)
            return prefill_worker(placement)
        wait_s = self._paced_s(entry, placement, now, given_s)
        if wait_s > 0.0:
            self._paced_at = min(self._paced_at, now + wait_s)
            self._ready_at = min(self._ready_at, self._paced_at)
            entry.gap_worker = prefill_worker(placement)
            entry.gap_step_s = placement.step_s + placement.prompt_step_s
            return entry.gap_worker
        late = predicted.decode_queue_s > soon_s
        if late or placement.answer_step_s > entry.request.targets.itl_s:
            decode = placement.decode.record.worker_id
            if decode in self._running:
                self._is_open = True
                return decode
        return None

    def _elsewhere(
        self, entry: QueueEntry, placement: Placement, now: float, given: GivenWork = NONE_GIVEN
    ) -> Placement | None:
        """Where the request can begin now, if it would have to wait for a gap and its first token comes no later there.
        Placement does not know of gaps: all waiting requests would wait for the same worker, which has the least to do.
        """
        worker_id = prefill_worker(placement)
        wait_s = self._paced_s(entry, placement, now, given.get(worker_id, 0.0))
        if wait_s <= 0.0:
            return None
        request = entry.request
        others = msgspec.structs.replace(
            request, excluded=request.excluded | {worker_id}, revisions=request.revisions[:1]
        )
        other = self._place(others, now)
        if isinstance(other, Rejection) or total_s(other.predicted) > total_s(placement.predicted) + wait_s:
            return None
        given_s = given.get(prefill_worker(other), 0.0)
        return other if self._obstacle(entry, other, now, given_s) is None else None

    def _paced_s(self, entry: QueueEntry, placement: Placement, now: float, given_s: float) -> float:
        """How long the request must wait for the end of a gap at the worker that computes its prompt."""
        if self._gap(entry, placement) <= 0.0:
            return 0.0
        return self._pacing.wait_s(placement, prefill_worker(placement), given_s, now)

    def _gap(self, entry: QueueEntry, placement: Placement) -> float:
        """See ``Pacing.gap``."""
        request, queue = entry.request, entry.queue
        if queue is None or request.targets.itl_s == math.inf:
            return 0.0
        tokens_out = queue.share.expected_tokens_out(request.tenant, request.tokens_out)
        return self._pacing.gap(placement, entry.work_s, request.targets.itl_s, tokens_out)

    def _reject_late(self, entry: QueueEntry, placement: Placement, now: float) -> Rejection | None:
        """Reject a request that would miss its target even on an idle worker, unless the engines have time for it: each
        occupies an engine for seconds without meeting its target (DECISIONS 27).

        They have time while no request waits, and if requests run, where the engine's prefill load is at most
        ``LATE_LOAD_MAX``, and for a share of ``LATE_SHARE_MAX`` of all engines' time.
        """
        assert entry.queue is not None
        own_s, queue = _own_s(entry, placement), entry.queue.model_queue
        if own_s <= self._policy.late_ratio * entry.request.targets.ttft_s:
            return None
        late_at = now if self._policy.serve_late else math.inf
        if self._running:
            calm_at = self._loads.falls_to(prefill_worker(placement), LATE_LOAD_MAX, now)
            late_at = max(late_at, queue.late_allowed_at, calm_at)
        if late_at <= now and not queue.count:
            queue.late_allowed_at = now + own_s / (LATE_SHARE_MAX * max(1, placement.considered))
            return None
        message = "Even an idle worker would miss the target. Try again under less load, or without a target."
        return rejection_of(entry, Reason.OVERLOADED, message, late_at - now)

    def _begin(self, entry: QueueEntry, placement: Placement, now: float) -> None:
        assert entry.queue is not None
        entry.placement = placement
        worker_id = prefill_worker(placement)
        self._loads.begun(worker_id, entry.work_s, now)
        self._pacing.begun(placement, worker_id, entry.work_s, self._gap(entry, placement), now)
        entry.queue.share.charge(entry.request.tenant, entry.cost)
        decode = placement.decode.record.worker_id
        self._running[decode] = self._running.get(decode, 0) + 1

    def _enqueue(self, entry: QueueEntry, result: Placement | Rejection, now: float) -> Rejection | None:
        queue = entry.queue
        assert queue is not None
        self._numbers += 1
        entry.number = self._numbers
        self._set_deadline(entry, result)
        wait_s = queue.model_queue.wait_s(entry, queue) or 0.0
        if now + wait_s > entry.expires_at:
            return rejection_of(
                entry, Reason.OVERLOADED, "The request would wait too long to be useful. Try again later."
            )
        if len(queue.tenants.get(entry.request.tenant, ())) >= self._policy.tenant_queue_max:
            return rejection_of(entry, Reason.OVER_SHARE, "Too many requests of this tenant wait already.")
        if self.waiting >= self._policy.queue_max and (rejection := self._evict_for(entry, queue)) is not None:
            return rejection
        queue.model_queue.throughput.advance(now)
        queue.add(entry)
        entry.expected = result if isinstance(result, Placement) else None
        self.waiting += 1
        heappush(self._expiries, (entry.expires_at, entry.number, entry))
        if len(self._expiries) > 2 * self.waiting + EXPIRIES_SPARE:
            self._expiries = [one for one in self._expiries if one[-1].waiting]
            heapify(self._expiries)
        return None

    def _set_deadline(self, entry: QueueEntry, result: Placement | Rejection) -> None:
        """The deadline is arrival + target + the request's own time on an idle worker (DECISIONS 20): a short prompt
        overtakes a long one by the difference of their times and no more. A request whose target even an idle worker
        would miss may still wait for a share of its own time. Without a target: see ``UNTARGETED_WAIT``.
        """
        policy, target_s, own_s = self._policy, entry.request.targets.ttft_s, _own_s(entry, result)
        latest_at = entry.arrived_at + policy.queue_s_max
        if target_s < math.inf:
            entry.deadline = entry.arrived_at + target_s + own_s
            wait_s = max(policy.late_ratio * WAIT_TARGET_SHARE * target_s - own_s, WAIT_SHARE_MIN * own_s)
            latest_at = min(latest_at, entry.arrived_at + wait_s)
        else:
            entry.deadline = latest_at + UNTARGETED_WAIT * own_s
        entry.expires_at = min(latest_at, entry.ends_at)

    def _evict_for(self, entry: QueueEntry, own: PriorityQueue) -> Rejection | None:
        """Evict a request from the full queue: a less urgent one, or among equally urgent ones the last request of the
        tenant with the highest load. Returns a rejection of the new request if no other one is evicted.
        """
        queues = [queue for models in self._models.values() for queue in models.priorities.values() if queue.count]
        fullest = max(queues, key=lambda queue: (queue.priority, queue.count))
        greediest = fullest.greediest()
        if fullest.priority > own.priority:
            self._evict(fullest, greediest, Reason.OVERLOADED)
            return None
        load = own.load(entry.request.tenant, 1)
        if fullest.priority == own.priority and fullest.load(greediest) > load:
            self._evict(fullest, greediest, Reason.OVER_SHARE)
            return None
        if len(own.tenants.keys() | {entry.request.tenant}) > 1 and load > own.load_mean():
            return rejection_of(entry, Reason.OVER_SHARE, "The queue is full, and this tenant has its share of it.")
        return rejection_of(entry, Reason.OVERLOADED, "The queue is full. Try again later.")

    def _evict(self, queue: PriorityQueue, tenant: str, reason: Reason) -> None:
        last = queue.tenants[tenant][-1]
        self._evicted.append((last, rejection_of(last, reason, "The queue is full, and other requests come first.")))
        self._leave(last)

    def _leave(self, entry: QueueEntry) -> None:
        assert entry.queue is not None
        entry.queue.remove(entry)
        self.waiting -= 1

    def _expired(self, entry: QueueEntry, now: float) -> Rejection:
        if now >= entry.ends_at:
            return Rejection(reason=Reason.DEADLINE, message="The request took too long.")
        return rejection_of(entry, Reason.OVERLOADED, "The request waited too long to be useful. Try again later.")


def _own_s(entry: QueueEntry, result: Placement | Rejection) -> float:
    """The request's time to the first token on an idle worker."""
    if isinstance(result, Rejection):
        return entry.work_s
    predicted = result.predicted
    return max(entry.work_s, total_s(predicted) - predicted.queue_s - predicted.decode_queue_s)


def queue_name(request: PlacementRequest) -> str:
    """Name of the request's queue. Requests that the same workers can serve share a queue."""
    return f"{request.model} {request.revisions[0]}" if request.revisions else request.model


def rejection_of(entry: QueueEntry, reason: Reason, message: str, again_s: float = 0.0) -> Rejection:
    """A rejection with the time after which a similar request could begin, at least ``again_s`` seconds."""
    queue = entry.queue
    wait_s = queue.model_queue.wait_s(entry, queue) if queue is not None else None
    retry_after_s = min(max(wait_s or 0.0, again_s, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX)
    return Rejection(reason=reason, message=message, retry_after_s=retry_after_s)
