"""An oracle: greedy, with perfect knowledge of the present.

It reads the simulator's true state at the instant of each arrival, with no delay: every engine's queue, what each
running request still has to compute and to say (exact output lengths, this request's too), what each cache really
holds, how busy each link is. For each worker, with and without fetching the prompt's beginning from the worker that has
most of it, it rolls the engine's own law forward until its first token. The soonest wins; all that comes after it (its
own decoding, the time that its prompt adds to each request that decodes meanwhile, what its tokens add to theirs)
counts a fiftieth, so that it decides between what is nearly as soon.

What it does not know is the future: it does not know who arrives next, so it neither reserves nor replicates, and it
chooses for one request at a time. So it is no bound, but a mark for what knowledge alone can do. On a fleet of workers
that do both it gives each request to one worker.
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
"""What a second after the first token counts, own or others'."""


@dataclass(slots=True)
class Choice:
    """One way to compute a prompt."""

    worker: SimWorker
    depth: int
    """Blocks cached there."""
    source: SimWorker | None
    source_depth: int
    expected: Forecast

    @property
    def cost_s(self) -> float:
        """What is compared."""
        expected = self.expected
        return expected.ttft_s + LATER * (expected.total_s - expected.ttft_s)


class Oracle:
    """A ``Placer``."""

    def __init__(self, world: World) -> None:
        self._world = world

    def place(self, need: PlacementRequest, now: float) -> Placement | Rejection:
        """The least added time."""
        workers = list(self._world.workers.values())
        computing = [worker for worker in workers if worker.record.role is not Role.DECODE]
        answering = [worker for worker in workers if worker.record.role is Role.DECODE]
        if not computing:
            return Rejection(reason=Reason.NO_WORKER, message="No worker is there.")
        flight = self._world.ledger.flight
        assert flight is not None
        tokens_out = 1 if answering else flight.request.output_tokens
        choice = min(self._choices(need, computing, tokens_out, now), key=lambda one: one.cost_s)
        views = self._world.fleet.cluster.workers
        size = self._world.profile.block_tokens
        cached = choice.depth * size
        fetched = max(0, choice.source_depth - choice.depth) * size
        view = views[choice.worker.worker_id]
        decode = view
        if answering:
            slowest = min(answering, key=lambda worker: self._decode_s(worker, need, flight.request.output_tokens))
            decode = views[slowest.worker_id]
        uncached = need.prompt_tokens - cached - fetched
        return Placement(
            mode=Mode.DISAGGREGATED if answering else Mode.AGGREGATED,
            decode=decode,
            prefill=view if answering else None,
            cached_tokens=cached,
            fetched_tokens=fetched,
            uncached_tokens=uncached,
            context_tokens=need.prompt_tokens + flight.request.output_tokens,
            sources=() if choice.source is None else (source_of(choice),),
            streamed=bool(answering) and uncached >= self._world.fleet.policy.stream_tokens_min,
        )

    def _choices(self, need: PlacementRequest, workers: list[SimWorker], tokens_out: int, now: float) -> list[Choice]:
        size = self._world.profile.block_tokens
        limit = (need.prompt_tokens - 1) // size
        depths = [worker.engine.pool.depth(need.hashes, limit) for worker in workers]
        deepest = max(range(len(workers)), key=depths.__getitem__)
        choices = []
        for worker, depth in zip(workers, depths, strict=True):
            options: list[tuple[SimWorker | None, int]] = [(None, depth)]
            if depths[deepest] > depth:
                options.append((workers[deepest], depths[deepest]))
            for source, has in options:
                expected = forecast(worker, (need.prompt_tokens, tokens_out), (depth * size, has * size), now)
                choices.append(Choice(worker, depth, source, has, expected))
        return choices

    def _decode_s(self, worker: SimWorker, need: PlacementRequest, tokens_out: int) -> float:
        """Its own time there and what it adds to that of the others; no room: until others have ended."""
        engine, profile = worker.engine, self._world.profile
        pending = list(engine.waiting) + list(engine.receiving) + list(engine.received_jobs)
        decoding = len(engine.decoders) + len(pending)
        context = engine.decoders.context_tokens + sum(job.tokens for job in pending)
        step_s = profile.decode_s(decoding + 1, context + need.prompt_tokens + tokens_out / 2)
        added_s = profile.decode_per_sequence_s + need.prompt_tokens * profile.decode_per_context_token_s
        blocks = -(-(need.prompt_tokens + tokens_out) // profile.block_tokens)
        wanted = blocks + sum(-(-job.tokens // profile.block_tokens) for job in engine.waiting)
        crowded = max(0.0, wanted - engine.pool.free)
        reading_s = max(0.0, worker.link.free_at - self._world.now)
        return tokens_out * (step_s + decoding * added_s) + reading_s + crowded * step_s * 100


def source_of(choice: Choice) -> KvSource:
    """Whom the worker should ask."""
    assert choice.source is not None
    record = choice.source.record
    return KvSource(worker_id=record.worker_id, epoch=record.epoch, first=choice.depth, end=choice.source_depth)
