"""When a request is placed: at once if an engine would soon begin it, else when its turn has come.

What waits here can still go anywhere; what waits in an engine's queue cannot. So engines get what keeps them busy and
no more, and the rest waits in order: by priority, then by the fair shares of tenants, then by deadline. On each change
the first in order are placed anew, by what is known then. One that would still wait for a worker keeps it: those behind
may pass on other workers only, so nobody starves and nothing that could run stands in line.

Nothing waits for ever, nor without bound: a request that cannot begin in time to be of use is refused as soon as that
is predicted, and who waits with more than its share makes room first.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush

from services.router.admission.fair_share import cost_of
from services.router.admission.policy import LATE_SHARE_MAX, AdmissionPolicy
from services.router.admission.queues import ModelQueue, PriorityQueue, QueueEntry
from services.router.admission.scheduling_pass import Place, SchedulingPass, prompt_worker
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId

WORK_S_MIN = 0.001
"""Of an engine's time, for any request: also those whose prompt is cached take some."""
WAIT_SHARE_MIN = 0.05
"""Of a request's own time to its first token: for so long it may wait in any case."""
RETRY_AFTER_S_MIN, RETRY_AFTER_S_MAX = 1.0, 120.0
"""What clients are told lies between them, whatever is predicted."""
NEXT_READY = 1.5
"""Usual prompts that an engine may have before the one that is sent to it: the one that it computes, and some of the
next.
"""
LANES_IDLE_MAX = 64
"""Models whose counters are kept while nobody waits for them."""
EXPIRIES_SPARE = 64
"""Entries in the list of latest instants, of requests that wait no more."""


class Admission:
    """Requests that wait, and the shares of their tenants. ``place`` has the last word on where one goes."""

    def __init__(self, policy: AdmissionPolicy, place: Place) -> None:
        self._policy = policy
        self._place = place
        self._lanes: dict[str, ModelQueue] = {}
        self._numbers = 0
        self._expiries: list[tuple[float, int, QueueEntry]] = []
        self._evicted: list[tuple[QueueEntry, Placement | Rejection]] = []
        """Rejection to make room, and not told yet."""
        self._again = False
        """Something may begin that the last turn did not get to."""
        self._running: dict[WorkerId, int] = {}
        """Requests on the worker that completes them."""
        self.waiting = 0

    def offer(self, ticket: QueueEntry, now: float) -> Placement | Rejection | None:
        """A request comes: where it goes, why it is refused, or None when it has to wait."""
        need = ticket.need
        placed = self._place(need, now)
        if isinstance(placed, Rejection) and placed.reason is not Reason.WORKER_BUSY:
            return placed
        lane = self._lane(lane_of(need))
        line = ticket.line = lane.line(need.priority, self._policy.tenant_weights)
        self._judge(ticket, placed)
        if isinstance(placed, Placement):
            if (no := self._refuse_late(ticket, placed, now)) is not None:
                return no
            obstacle = self._obstacle(ticket, placed)
            if obstacle is None and lane.passable(prompt_worker(placed), placed.decode.record.worker_id):
                line.share.enter(need.tenant)
                self._begin(ticket, placed)
                line.share.leave(need.tenant)
                return placed
            ticket.wants = obstacle or prompt_worker(placed)
            self._again = self._again or obstacle is None
        return self._queue(ticket, placed, now)

    def withdraw(self, ticket: QueueEntry) -> None:
        """Nobody waits for it any more."""
        if ticket.waiting:
            self._leave(ticket)

    def turn(self, now: float) -> list[tuple[QueueEntry, Placement | Rejection]]:
        """Something has changed: who goes where now, and who is refused."""
        decided, self._evicted = self._evicted, []
        self._again = False
        expiries = self._expiries
        while expiries and expiries[0][0] <= now:
            ticket = heappop(expiries)[-1]
            if ticket.waiting:
                decided.append((ticket, self._too_late(ticket, now)))
                self._leave(ticket)
        for lane in [lane for lane in self._lanes.values() if lane.count]:
            lane.drain.passed(now)
            look = SchedulingPass(lane, self._place, self._obstacle)
            look.look(now)
            self._again = self._again or look.unfinished
            for ticket, placed in look.decided:
                self._leave(ticket)
                if isinstance(placed, Placement):
                    lane.drain.begun(ticket.work_s)
                    self._judge(ticket, placed)
                    self._begin(ticket, placed)
            decided += look.decided
        return decided

    def wakes_at(self, now: float) -> float | None:
        """When the next turn is due, whatever happens; None when nobody waits."""
        if self._again or self._evicted:
            return now
        while self._expiries and not self._expiries[0][-1].waiting:
            heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def ended(self, ticket: QueueEntry, computed_tokens: int = -1, tokens_out: int = -1) -> None:
        """A request that was placed is over, after so many tokens (-1: nobody knows): its tenant's account is settled.

        Whoever got no answer keeps paying for what was expected of it: somebody may have computed it.
        """
        placed, line = ticket.placed, ticket.line
        if placed is None or line is None:
            return
        ticket.placed = None
        worker_id = placed.decode.record.worker_id
        left = self._running[worker_id] - 1
        if left:
            self._running[worker_id] = left
        else:
            del self._running[worker_id]
        if computed_tokens >= 0 and tokens_out >= 0:
            tenant = ticket.need.tenant
            line.share.charge(tenant, cost_of(computed_tokens, tokens_out) - ticket.cost)
            line.share.completed(tenant, tokens_out)

    def _lane(self, model: str) -> ModelQueue:
        lane = self._lanes.get(model)
        if lane is None:
            if len(self._lanes) >= LANES_IDLE_MAX:
                self._lanes = {name: lane for name, lane in self._lanes.items() if lane.count}
            lane = self._lanes[model] = ModelQueue()
        return lane

    def _judge(self, ticket: QueueEntry, placed: Placement | Rejection) -> None:
        """What it will cost, as far as can be told now."""
        need, line = ticket.need, ticket.line
        assert line is not None
        tokens_out = line.share.expected_tokens_out(need.tenant, need.tokens_out)
        if isinstance(placed, Rejection):
            ticket.work_s = line.lane.work_s
            ticket.cost = cost_of(need.prompt_tokens, tokens_out)
        else:
            ticket.work_s = max(WORK_S_MIN, placed.predicted.fetch_s + placed.predicted.prefill_s)
            ticket.cost = cost_of(placed.uncached_tokens, tokens_out)
            line.lane.learn_work(ticket.work_s)

    def _obstacle(self, ticket: QueueEntry, placed: Placement, given_s: float = 0.0) -> WorkerId | None:
        """The worker that it had to wait for; None when it can begin. ``given_s``: more work in front of it than shows.

        A worker that completes nothing of ours just now is no obstacle to a completion: it will not get any faster.
        """
        predicted, line = placed.predicted, ticket.line
        # A worker tells that a prompt is computed only then, and a little late: another one must be there already.
        own_s = NEXT_READY * line.lane.work_s if line is not None else 0.0
        soon_s = max(self._policy.engine_queue_s_max, own_s)
        if predicted.queue_s + given_s > soon_s:
            return prompt_worker(placed)
        late = predicted.decode_queue_s > soon_s
        if late or placed.predicted_itl_s > ticket.need.targets.itl_s:
            decode = placed.decode.record.worker_id
            return decode if decode in self._running else None
        return None

    def _refuse_late(self, ticket: QueueEntry, placed: Placement, now: float) -> Rejection | None:
        """One that would miss its target on an idle worker, too, is served as long as that harms few."""
        assert ticket.line is not None
        own_s, lane = _own_s(ticket, placed), ticket.line.lane
        if own_s <= self._policy.late_ratio * ticket.need.targets.ttft_s:
            return None
        late_at = max(lane.drain.calm_at(now), lane.late_again_at if self._running else now)
        if not self._policy.serve_late:
            late_at = math.inf
        if late_at <= now:
            lane.late_again_at = now + own_s / (LATE_SHARE_MAX * max(1, placed.considered))
            return None
        message = "Even an idle worker would miss its target. Try again when nobody waits, or without a target."
        return refused(ticket, Reason.OVERLOADED, message, late_at - now)

    def _begin(self, ticket: QueueEntry, placed: Placement) -> None:
        assert ticket.line is not None
        ticket.placed = placed
        ticket.line.share.charge(ticket.need.tenant, ticket.cost)
        decode = placed.decode.record.worker_id
        self._running[decode] = self._running.get(decode, 0) + 1

    def _queue(self, ticket: QueueEntry, placed: Placement | Rejection, now: float) -> Rejection | None:
        line = ticket.line
        assert line is not None
        self._numbers += 1
        ticket.number = self._numbers
        self._set_deadline(ticket, placed)
        wait_s = line.lane.wait_s(ticket, line) or 0.0
        if now + wait_s > ticket.hopeless_at:
            return refused(ticket, Reason.OVERLOADED, "It would wait too long to be of use. Try again later.")
        if len(line.tenants.get(ticket.need.tenant, ())) >= self._policy.tenant_queue_max:
            return refused(ticket, Reason.OVER_SHARE, "Too many requests of this tenant wait already.")
        if self.waiting >= self._policy.queue_max and (no := self._make_room(ticket, line)) is not None:
            return no
        line.lane.drain.passed(now)
        line.add(ticket)
        self.waiting += 1
        heappush(self._expiries, (ticket.hopeless_at, ticket.number, ticket))
        if len(self._expiries) > 2 * self.waiting + EXPIRIES_SPARE:
            self._expiries = [entry for entry in self._expiries if entry[-1].waiting]
            heapify(self._expiries)
        return None

    def _set_deadline(self, ticket: QueueEntry, placed: Placement | Rejection) -> None:
        """Who could have its first token soonest, had it come to idle engines, comes first: the target counts from
        there, so that a short prompt passes a long one by as much as it is shorter, and never by more. A target that
        even an idle worker would miss is no reason to refuse a request: it may wait for a part of its own time.
        """
        policy, target_s, own_s = self._policy, ticket.need.targets.ttft_s, _own_s(ticket, placed)
        latest_at = ticket.arrived_at + policy.queue_s_max
        if target_s < math.inf:
            ticket.deadline = ticket.arrived_at + target_s + own_s
            wait_s = max(policy.late_ratio * target_s - own_s, WAIT_SHARE_MIN * own_s)
            latest_at = min(latest_at, ticket.arrived_at + wait_s)
        else:
            ticket.deadline = latest_at + own_s
        ticket.hopeless_at = min(latest_at, ticket.ends_at)

    def _make_room(self, ticket: QueueEntry, own: PriorityQueue) -> Rejection | None:
        """The queue is full: someone less urgent goes, or of the least urgent whoever waits with most. Answers why
        nobody does.
        """
        lines = [line for lane in self._lanes.values() for line in lane.lines.values() if line.count]
        fullest = max(lines, key=lambda line: (line.priority, line.count))
        greediest = fullest.greediest()
        if fullest.priority > own.priority:
            self._evict(fullest, greediest, Reason.OVERLOADED)
            return None
        mine = own.load(ticket.need.tenant, 1)
        if fullest.priority == own.priority and fullest.load(greediest) > mine:
            self._evict(fullest, greediest, Reason.OVER_SHARE)
            return None
        if len(own.tenants.keys() | {ticket.need.tenant}) > 1 and mine > own.load_mean():
            return refused(ticket, Reason.OVER_SHARE, "The queue is full, and this tenant has its share of it.")
        return refused(ticket, Reason.OVERLOADED, "The queue is full. Try again later.")

    def _evict(self, line: PriorityQueue, tenant: str, reason: Reason) -> None:
        last = line.tenants[tenant][-1]
        self._evicted.append((last, refused(last, reason, "The queue is full, and others come first.")))
        self._leave(last)

    def _leave(self, ticket: QueueEntry) -> None:
        assert ticket.line is not None
        ticket.line.remove(ticket)
        self.waiting -= 1

    def _too_late(self, ticket: QueueEntry, now: float) -> Rejection:
        if now >= ticket.ends_at:
            return Rejection(reason=Reason.DEADLINE, message="The request took too long.")
        return refused(ticket, Reason.OVERLOADED, "It waited too long to be of use. Try again later.")


def _own_s(ticket: QueueEntry, placed: Placement | Rejection) -> float:
    """To its first token on an idle worker."""
    if isinstance(placed, Rejection):
        return ticket.work_s
    predicted = placed.predicted
    return max(ticket.work_s, predicted.total_s() - predicted.queue_s - predicted.decode_queue_s)


def lane_of(need: PlacementRequest) -> str:
    """With whom it stands in line: with those who want the same workers."""
    return f"{need.model} {need.revisions[0]}" if need.revisions else need.model


def refused(ticket: QueueEntry, reason: Reason, message: str, again_s: float = 0.0) -> Rejection:
    """With when a request like this one could be begun: not before ``again_s`` from now."""
    line = ticket.line
    wait_s = line.lane.wait_s(ticket, line) if line is not None else None
    retry_after_s = min(max(wait_s or 0.0, again_s, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX)
    return Rejection(reason=reason, message=message, retry_after_s=retry_after_s)
