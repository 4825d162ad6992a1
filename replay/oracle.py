"""An oracle: greedy placement with perfect knowledge of the present.

At each arrival it reads the simulator's true state without delay: every engine's queue, the remaining work of each
running request (exact output lengths, also the new request's), true cache contents, and link usage. For each worker,
with and without fetching the prefix from the worker that holds most of it, it simulates the engine's steps until the
first token. The earliest first token wins; later time (own decoding, time added to others) counts 1/50, as a tie-break.

It does not know future arrivals, so it neither reserves nor replicates: it is a reference point, not a bound. On a
fleet of workers with role ``both`` it gives each request to one worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from replay.forecast import Forecast, forecast
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.placement.request_fields import Mode
from shared.contracts.failures import Reason
from shared.contracts.kv_exchange import KvSource
from shared.contracts.workers import Role

if TYPE_CHECKING:
    from replay.simworker import SimWorker
    from replay.world import World


LATER = 0.02
"""Weight of a second after the first token."""


@dataclass(slots=True)
class Candidate:
    """One way to compute a prompt."""

    worker: SimWorker
    depth: int
    """Blocks cached at the worker."""
    source: SimWorker | None
    source_depth: int
    expected: Forecast

    @property
    def cost_s(self) -> float:
        """Weighted cost."""
        expected = self.expected
        return expected.ttft_s + LATER * (expected.total_s - expected.ttft_s)


class Oracle:
    """Implements ``Placer``."""

    def __init__(self, world: World) -> None:
        self._world = world

    def place(self, request: PlacementRequest, now: float) -> Placement | Rejection:
        """Place by the smallest cost."""
        workers = list(self._world.workers.values())
        computing = [worker for worker in workers if worker.record.role is not Role.DECODE]
        answering = [worker for worker in workers if worker.record.role is Role.DECODE]
        if not computing:
            return Rejection(reason=Reason.NO_WORKER, message="No worker is there.")
        replayed = self._world.counts.replayed
        assert replayed is not None
        tokens_out = 1 if answering else replayed.request.output_tokens
        choice = min(self._candidates(request, computing, tokens_out, now), key=lambda one: one.cost_s)
        views = self._world.fleet.cluster.workers
        size = self._world.profile.block_tokens
        cached = choice.depth * size
        fetched = max(0, choice.source_depth - choice.depth) * size
        view = views[choice.worker.worker_id]
        decode = view
        if answering:
            slowest = min(answering, key=lambda worker: self._decode_s(worker, request, replayed.request.output_tokens))
            decode = views[slowest.worker_id]
        uncached = request.prompt_tokens - cached - fetched
        return Placement(
            mode=Mode.DISAGGREGATED if answering else Mode.AGGREGATED,
            decode=decode,
            prefill=view if answering else None,
            cached_tokens=cached,
            fetched_tokens=fetched,
            uncached_tokens=uncached,
            context_tokens=request.prompt_tokens + replayed.request.output_tokens,
            sources=() if choice.source is None else (source_of(choice),),
            streamed=bool(answering) and uncached >= self._world.fleet.policy.stream_tokens_min,
        )

    def _candidates(
        self, request: PlacementRequest, workers: list[SimWorker], tokens_out: int, now: float
    ) -> list[Candidate]:
        size = self._world.profile.block_tokens
        limit = (request.prompt_tokens - 1) // size
        depths = [worker.engine.pool.depth(request.hashes, limit) for worker in workers]
        deepest = max(range(len(workers)), key=depths.__getitem__)
        choices = []
        for worker, depth in zip(workers, depths, strict=True):
            options: list[tuple[SimWorker | None, int]] = [(None, depth)]
            if depths[deepest] > depth:
                options.append((workers[deepest], depths[deepest]))
            for source, has in options:
                expected = forecast(worker, (request.prompt_tokens, tokens_out), (depth * size, has * size), now)
                choices.append(Candidate(worker, depth, source, has, expected))
        return choices

    def _decode_s(self, worker: SimWorker, request: PlacementRequest, tokens_out: int) -> float:
        """Decode time there plus time added to others, with a penalty for missing KV blocks."""
        engine, profile = worker.engine, self._world.profile
        pending = list(engine.waiting) + list(engine.receiving) + list(engine.received_jobs)
        decoding = len(engine.decoders) + len(pending)
        context = engine.decoders.context_tokens + sum(job.tokens for job in pending)
        step_s = profile.decode_s(decoding + 1, context + request.prompt_tokens + tokens_out / 2)
        added_s = profile.decode_per_sequence_s + request.prompt_tokens * profile.decode_per_context_token_s
        blocks = -(-(request.prompt_tokens + tokens_out) // profile.block_tokens)
        wanted = blocks + sum(-(-job.tokens // profile.block_tokens) for job in engine.waiting)
        crowded = max(0.0, wanted - engine.pool.free)
        reading_s = max(0.0, worker.link.free_at - self._world.now)
        return tokens_out * (step_s + decoding * added_s) + reading_s + crowded * step_s * 100


def source_of(choice: Candidate) -> KvSource:
    """The source of a candidate that fetches."""
    assert choice.source is not None
    record = choice.source.record
    return KvSource(worker_id=record.worker_id, epoch=record.epoch, first=choice.depth, end=choice.source_depth)
