"""What aggregated serving would have given: the same requests on the same engines, each of them doing both phases.

Each engine would compute its share of all prompts, and each of its steps would carry its share of all completions:

* Between two tokens of a completion lies a step, and the prompts in between. If prompts take the part ``u`` of an
  engine's time, a step of ``d`` seconds comes every ``d / (1 - u)``.
* A chunk of a prompt shares its step with the completions that run there, so it takes that much longer.
* More engines take prompts, but each is slower at it: the queue follows Pollaczek and Khinchine.
* Nothing is handed over, and nobody waits for a second worker.

What is measured is scaled by the ratio of two answers of this model, for aggregated serving and for what is there; so
what it does not know of (the network, the context's length, the placement's skill) counts on both sides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.collector.metrics.engine_work import FleetWork
from shared.contracts.decisions import TtftParts
from shared.engine_speed.steps import StepTimeModel

ROOM_MIN = 0.05
"""Of an engine's time: with less to spare, no queue is steady."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request that was served disaggregated, as its router measured it."""

    ttft_s: float
    itl_s: float
    e2e_s: float
    completion_tokens: int
    computed_tokens: int
    """Of the prompt."""
    parts: TtftParts

    def with_itl(self, ttft_s: float, itl_s: float) -> float:
        """The whole time of this request, if these had been its latencies."""
        between = max(0, self.completion_tokens - 1)
        return self.e2e_s + (ttft_s - self.ttft_s) + between * (itl_s - self.itl_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Of one request, in seconds."""

    ttft_s: float
    itl_s: float
    e2e_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregated:
    """The fleet as it would be. ``None`` instead of one (see ``aggregated``): it could not carry the load."""

    itl_ratio: float
    """The time between tokens, against what it is now."""
    itl_now_s: float
    """What this model says of the present: if that is far from what is measured, it knows too little."""
    shared_s: float
    """What completions add to a step that computes a prompt."""
    queue_ratio: float
    """How the queue would grow if prompts took as long as they do; and with ``busy`` and ``busy_now`` how it does."""
    busy: float
    """The part of each engine's time that prompts would take; ``busy_now``: of those that compute prompts now."""
    busy_now: float
    step_tokens: int

    def of(self, sample: Sample) -> Latencies | None:
        """What that request would have experienced; None: prompts would have queued without end."""
        parts = sample.parts
        prefill_s = parts.prefill_s + math.ceil(sample.computed_tokens / self.step_tokens) * self.shared_s
        slower = prefill_s / parts.prefill_s if parts.prefill_s > 0 else 1.0
        room, room_now = 1.0 - self.busy * slower, 1.0 - self.busy_now
        if room < ROOM_MIN:
            return None
        queue_s = parts.queue_s * self.queue_ratio * slower**2 * max(room_now, ROOM_MIN) / room + self.shared_s / 2
        gone_s = parts.queue_s + parts.prefill_s + parts.handoff_s + parts.decode_queue_s + parts.first_token_s
        ttft_s = max(0.0, sample.ttft_s - gone_s) + queue_s + prefill_s
        itl_s = sample.itl_s * self.itl_ratio
        return Latencies(ttft_s=ttft_s, itl_s=itl_s, e2e_s=sample.with_itl(ttft_s, itl_s))


def aggregated(work: FleetWork, law: StepTimeModel, step_tokens: int) -> Aggregated | None:
    """``work`` must have engines of both kinds."""
    busy = law.prefill_s(work.work) / work.engines
    tokens_per_s = work.work.decode_requests
    per_engine = tokens_per_s / work.engines
    step_s = law.decode_step_s + law.decode_request_s
    room = 1.0 - busy - law.decode_request_s * per_engine
    if room < ROOM_MIN:
        return None
    room_now = 1.0 - law.prefill_s(work.decode_work) / work.decodes
    room_now -= law.decode_request_s * tokens_per_s / work.decodes
    itl_s, itl_now_s = step_s / room, step_s / max(room_now, ROOM_MIN)
    batch = per_engine * itl_s
    return Aggregated(
        itl_ratio=itl_s / itl_now_s if itl_now_s > 0 else 1.0,
        itl_now_s=itl_now_s,
        shared_s=law.decode_step_s * (1.0 - math.exp(-batch)) + law.decode_request_s * batch,
        queue_ratio=work.prefills / work.engines,
        busy=busy,
        busy_now=law.prefill_s(work.prefill_work) / work.prefills,
        step_tokens=max(1, step_tokens),
    )
