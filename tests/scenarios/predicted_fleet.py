"""A router's placement and a fleet of simulated engines, in virtual time: what was predicted, and what was measured.

The router sees of the engines what it sees in a real system: load reports, at most ten a second and a little late, and
the reports of legs that have ended.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from services.router.placement.fleet import Fleet as View
from services.router.placement.placement import Placement, PlacementPolicy, PlacementRequest
from services.router.state.worker_speeds import WorkerSpeeds
from services.router.state.worker_view import Sent, WorkerView
from services.worker.engines.simulated.core.batch import RequestParams, Sequence
from services.worker.engines.simulated.core.engine_core import ModelTokens
from services.worker.engines.simulated.core.settings import SimulationSettings
from shared.contracts.inference import LegReport
from shared.contracts.kv_exchange import KvTransferReport, LegOrder
from shared.contracts.load import LOAD_HZ_MAX
from shared.contracts.workers import Role
from shared.engine_speed.learner import SpeedLearner
from tests.support.fleet_builders import load, record
from tests.unit.worker.simulated.fleet import Fleet, Member

VOCABULARY = 1000
MODEL = ModelTokens(size=VOCABULARY, sayable=list(range(10, VOCABULARY)), eos=1)
TRANSIT_S = 0.003
"""Round trip to a worker."""
BLOCK = 32
SPEEDS = {
    "prefill_tokens_per_s": 8000.0,
    "prefill_base_s": 0.002,
    "decode_base_s": 0.01,
    "decode_per_sequence_s": 0.0002,
    "decode_per_context_token_s": 5e-8,
    "transfer_bytes_per_s": 2e8,
}
TOGETHER = {f"w{number}": Role.BOTH for number in range(3)}
APART = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}


@dataclass(eq=False)
class PredictedRequest:
    """One request. Instants are the fleet's."""

    placement: Placement
    prompt: list[int]
    tokens_out: int
    at: float
    first_at: float = 0.0
    ended_at: float = 0.0

    @property
    def predicted_ttft_s(self) -> float:
        return self.placement.predicted.total_s()

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.at

    @property
    def itl_s(self) -> float:
        return (self.ended_at - self.first_at) / max(1, self.tokens_out - 1)


@dataclass(eq=False)
class Leg:
    """A leg of one, as the router keeps it in its books."""

    requests: PredictedRequest
    view: WorkerView
    params: RequestParams
    tokens: int
    """To compute."""
    on_ended: Callable[[KvTransferReport | None], None]
    sent: Sent | None = None
    first_at: float = 0.0
    sequence: Sequence | None = None


class PredictedFleet:
    """Workers of equal or different speed, a router, and clients."""

    def __init__(self, seed: int, roles: dict[str, Role], *, learns: bool = True, **speeds: float) -> None:
        """``learns=False``: the router keeps the default speeds."""
        self.learns = learns
        self.draw = random.Random(seed)
        self.fleet = Fleet(MODEL)
        self.view = View(PlacementPolicy(tie_s=0.0, stream_tokens_min=-1))
        self.speeds = WorkerSpeeds(self.view.cluster)
        self.requests: list[PredictedRequest] = []
        self._roles = roles
        self._legs: dict[Sequence, Leg] = {}
        self._open = 0
        self._learners = {worker_id: SpeedLearner() for worker_id in roles}
        self.fleet.on_step = self._turned
        self.fleet.on_ended = self._ended
        for worker_id, role in roles.items():
            made = {"worker_id": worker_id, "epoch": 1, "block_size": BLOCK, **SPEEDS, **speeds}
            self.fleet.add(SimulationSettings(**made))
            told = record(worker_id, role=role, connector="baton")
            self.view.cluster.record(told, 0.0)
            if learns:
                self.speeds.joined(told)

    def run(
        self, count: int, *, per_s: float, lengths: Callable[[random.Random], tuple[int, int]]
    ) -> list[PredictedRequest]:
        """So many requests at random times; answers those that were placed after the first tenth."""
        at = 0.0
        for _ in range(count):
            at += self.draw.expovariate(per_s)
            tokens_in, tokens_out = lengths(self.draw)
            self.fleet.at(at, lambda n=tokens_in, m=tokens_out: self._ask(n, m))
        self._open = count
        for worker_id in self._roles:
            self.fleet.later(self.draw.random() / LOAD_HZ_MAX, lambda worker_id=worker_id: self._report(worker_id))
        self.fleet.run()
        return self.requests[count // 10 :]

    def change(self, worker_id: str, **speeds: float) -> None:
        """From its next step on."""
        core = self.member(worker_id).core
        core.settings = core._timing = replace(core.settings, **speeds)

    def member(self, worker_id: str) -> Member:
        return self.fleet.members[worker_id]

    def _ask(self, tokens_in: int, tokens_out: int) -> None:
        now = self.fleet.now
        placement = self.view.place(PlacementRequest(model="m", prompt_tokens=tokens_in, tokens_out=tokens_out), now)
        assert isinstance(placement, Placement)
        prompt = [self.draw.randrange(10, VOCABULARY) for _ in range(tokens_in)]
        requests = PredictedRequest(placement, prompt, tokens_out, now)
        self.requests.append(requests)
        answer = RequestParams(max_tokens=tokens_out, ignore_eos=True)
        if placement.prefill is None:
            self._send(Leg(requests, placement.decode, answer, tokens_in, lambda _transfer_report: self._answered()))
            return

        def handed_over(transfer_report: KvTransferReport | None) -> None:
            assert transfer_report is not None
            order = LegOrder(take=transfer_report.offer)
            params = RequestParams(max_tokens=tokens_out, ignore_eos=True, order=order)
            self._send(Leg(requests, placement.decode, params, 0, lambda _transfer_report: self._answered()))

        offer = RequestParams(max_tokens=1, ignore_eos=True, order=LegOrder(offer=True))
        self._send(Leg(requests, placement.prefill, offer, tokens_in, handed_over))

    def _answered(self) -> None:
        self._open -= 1

    def _send(self, leg: Leg) -> None:
        leg.sent = Sent(self.fleet.now, leg.tokens, context_tokens(leg.requests))
        self.view.cluster.leg_started(leg.view.record.worker_id, leg.sent)
        self.fleet.later(TRANSIT_S / 2, lambda: self._serve(leg))

    def _serve(self, leg: Leg) -> None:
        member = self.member(leg.view.record.worker_id)
        leg.sequence = member.core.add(None, list(leg.requests.prompt), leg.params, member.now())
        self._legs[leg.sequence] = leg
        self.fleet.step(member)

    def _turned(self, _member: Member) -> None:
        for sequence, leg in self._legs.items():
            if not leg.first_at and sequence.stats.first_token_at is not None:
                leg.first_at = self.fleet.now
                self.fleet.later(TRANSIT_S / 2, lambda leg=leg: self._first_token(leg))

    def _first_token(self, leg: Leg) -> None:
        leg.first_at = leg.requests.first_at = self.fleet.now
        assert leg.sent is not None
        self.view.cluster.prompt_computed(leg.view.record.worker_id, leg.sent, leg.tokens)

    def _ended(self, sequence: Sequence) -> None:
        leg = self._legs.pop(sequence)
        if not leg.first_at:
            leg.first_at = self.fleet.now
            self.fleet.later(TRANSIT_S / 2, lambda: self._first_token(leg))
        self.fleet.later(TRANSIT_S / 2, lambda: self._told(leg))

    def _told(self, leg: Leg) -> None:
        """Its report is at the router."""
        assert leg.sequence is not None
        assert leg.sent is not None
        leg.requests.ended_at = self.fleet.now
        stats, worker_id = leg.sequence.stats, leg.view.record.worker_id
        scheduled_at = min(stats.scheduled_at, stats.first_token_at)  # A received first token is before.
        report = LegReport(
            queue_s=scheduled_at - stats.arrived_at,
            prefill_s=stats.first_token_at - scheduled_at,
            kv=stats.transfer_report,
        )
        self.view.cluster.leg_ended(worker_id, leg.sent, context_tokens(leg.requests))
        if self.learns:
            self.speeds.leg_ended(worker_id, leg.sent.epoch, report, leg.first_at - leg.sent.at)
        leg.on_ended(stats.transfer_report)

    def _report(self, worker_id: str) -> None:
        core = self.member(worker_id).core
        batch, measures = core.batch, core.measures
        learner = self._learners[worker_id]
        learner.observe(measures.steps.totals(), measures.steps.prompt_totals())
        told = load(
            worker_id,
            role=self._roles[worker_id],
            running=len(batch.running),
            waiting=batch.queued,
            waiting_tokens=core.waiting_tokens(),
            kv_tokens_used=(core.cache.blocks - core.cache.free) * core.settings.block_size,
            kv_tokens_total=core.cache.blocks * core.settings.block_size,
            computed_tokens_total=measures.computed_tokens,
            generation_tokens_total=measures.generated_tokens,
            prefill_tokens_per_s=measures.steps.prefill_tokens_per_s,
            decode_s_per_token=measures.decode_s_per_token,
            steps=measures.steps.totals(),
            speed=learner.speed,
        )
        self.fleet.later(TRANSIT_S / 2, lambda: self._reported(told))
        if self._open:
            self.fleet.later(1 / LOAD_HZ_MAX, lambda: self._report(worker_id))

    def _reported(self, told) -> None:
        self.view.cluster.report(told, self.fleet.now)
        if self.learns:
            self.speeds.load(told)


@dataclass(frozen=True)
class Errors:
    """Relative, of predictions; ``bias``: the median of predicted / measured."""

    median: float
    p90: float
    bias: float

    @classmethod
    def of(cls, pairs: list[tuple[float, float]]) -> Errors:
        """From what was predicted and what was measured."""
        wrong = sorted(abs(predicted / measured - 1) for predicted, measured in pairs)
        ratios = [predicted / measured for predicted, measured in pairs]
        return cls(median(wrong), wrong[int(0.9 * len(wrong))], median(ratios))


def context_tokens(requests: PredictedRequest) -> int:
    return len(requests.prompt) + requests.tokens_out


def ttft_errors(requests: list[PredictedRequest]) -> Errors:
    return Errors.of([(one.predicted_ttft_s, one.ttft_s) for one in requests])


def itl_errors(requests: list[PredictedRequest]) -> Errors:
    return Errors.of([(one.placement.predicted_itl_s, one.itl_s) for one in requests if one.tokens_out > 8])


def mixed(draw: random.Random) -> tuple[int, int]:
    """Prompts of 50 to 6,000 tokens, answers of 10 to 200."""
    return round(50 * 120 ** draw.random()), round(10 * 20 ** draw.random())
