"""Traffic in virtual time that is reported to a collector, to compare its disaggregation report with a simulation."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from operator import attrgetter
from statistics import median
from typing import NamedTuple

import msgspec

from replay.legs import Leg, ReplayedRequest
from replay.profile import PROFILES
from replay.simworker import MODEL
from replay.split import Split
from replay.traces import Request
from replay.world import World
from services.collector.disaggregation_report import ReportBuilder
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.placement.placer import Placer
from services.router.request.facts import Mode
from shared.contracts.decisions import TtftParts
from shared.contracts.inference import LegKind, RequestFinished
from shared.contracts.planning import ReportBucket

REPORT_S = 1.0
SILENT_S_MAX = 1e9
PROFILE = replace(PROFILES["8b"], kv_blocks=4000)


class Truth(NamedTuple):
    """Medians, in seconds."""

    ttft_s: float
    itl_s: float
    e2e_s: float


class InMode:
    """A placer that is asked for one mode always."""

    def __init__(self, placer: Placer, mode: Mode) -> None:
        self._placer, self._mode = placer, mode

    def place(self, request: PlacementRequest, now: float) -> Placement | Rejection:
        return self._placer.place(msgspec.structs.replace(request, mode=self._mode), now)


class ReportingWorld(World):
    """Keeps its legs, and reports everything to a report builder."""

    def __init__(self, split: Split, mode: Mode, builder: ReportBuilder) -> None:
        super().__init__(split, PROFILE)
        self.fleet.placer = InMode(self.fleet.placer, mode)
        self.builder = builder
        self.legs: dict[int, dict[LegKind, Leg]] = defaultdict(dict)

    def serve(self, requests: list[Request]) -> list[ReplayedRequest]:
        for second in range(int(requests[-1].at_s)):
            self.at(second * REPORT_S, self._report)
        return self.run(requests)

    def _report(self, now: float) -> None:
        for worker in self.workers.values():
            self.builder.load_reported(worker.load_now(), now)

    def _leg(self, kind: LegKind, replayed: ReplayedRequest, placement: Placement, now: float) -> Leg:
        leg = super()._leg(kind, replayed, placement, now)
        self.legs[replayed.number][kind] = leg
        return leg

    def finished(self, engine, job, now: float) -> None:
        super().finished(engine, job, now)
        if job.owner.kind is not LegKind.PREFILL:
            self.builder.request_finished(self._finished_request(job.owner.replayed), now)

    def _finished_request(self, replayed: ReplayedRequest) -> RequestFinished:
        placement, legs = replayed.placement, self.legs[replayed.number]
        assert placement is not None
        assert replayed.first_token_at is not None
        assert replayed.finished_at is not None
        first = legs.get(LegKind.PREFILL) or legs[LegKind.AGGREGATED]
        job = first.job
        queue_s = job.scheduled_at - replayed.request.at_s
        prefill_s = job.first_token_at - job.scheduled_at
        return RequestFinished(
            request_id=str(replayed.number),
            model=MODEL,
            path="/v1/completions",
            mode=placement.mode.value,
            status=200,
            prefill_worker=first.worker.worker_id if placement.prefill else "",
            decode_worker=placement.decode.record.worker_id,
            prompt_tokens=replayed.request.input_tokens,
            completion_tokens=replayed.request.output_tokens,
            cached_tokens=replayed.cached_tokens,
            ttft_s=replayed.ttft_s,
            itl_s=replayed.tpot_s,
            e2e_s=replayed.finished_at - replayed.request.at_s,
            ttft_parts=TtftParts(
                queue_s=queue_s,
                prefill_s=prefill_s,
                handoff_s=max(0.0, replayed.ttft_s - queue_s - prefill_s) if placement.prefill else 0.0,
            ),
        )


def traffic(
    seconds: float, per_s: float, tokens: tuple[int, int], out: tuple[int, int], seed: int = 1
) -> list[Request]:
    """Uncached prompts at random times, with lengths in these ranges."""
    chance, at_s, made = random.Random(seed), 0.0, []
    while at_s < seconds:
        at_s += chance.expovariate(per_s)
        length = chance.randint(*tokens)
        blocks = tuple(1000 * len(made) + index for index in range(length // PROFILE.block_tokens))
        made.append(Request(at_s, blocks, length, chance.randint(*out)))
    return made


def reported(requests: list[Request], split: Split) -> list[ReportBucket]:
    """The collector's report after disaggregated serving."""
    builder = ReportBuilder(SILENT_S_MAX)
    world = ReportingWorld(split, Mode.DISAGGREGATED, builder)
    world.serve(requests)
    return builder.build("", world.now, lambda _model: PROFILE.max_num_batched_tokens).buckets


def truth(requests: list[Request], engines: int, low: int, high: int) -> Truth:
    """Simulated latencies of aggregated serving on as many engines, for prompts of these lengths."""
    world = ReportingWorld(Split(both=engines), Mode.AGGREGATED, ReportBuilder(SILENT_S_MAX))
    outcomes = [one for one in world.serve(requests) if low <= one.request.input_tokens <= high]
    assert all(one.finished_at is not None for one in outcomes)
    of_each = [attrgetter(name) for name in ("ttft_s", "tpot_s")]
    ttft_s, itl_s = (median(map(get, outcomes)) for get in of_each)
    return Truth(ttft_s, itl_s, median((one.finished_at or 0.0) - one.request.at_s for one in outcomes))
