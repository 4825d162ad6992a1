"""Random histories of a router, on which its decisions are compared with those of another system's own code."""

from __future__ import annotations

import random
from enum import StrEnum

import msgspec

BLOCK_TOKENS = 64
CONVERSATIONS = 24
TURNS_BLOCKS_MAX = 40
"""A conversation that is longer starts anew."""


class StepKind(StrEnum):
    """What happens to a request."""

    ARRIVES = "arrives"
    COMPUTED = "computed"
    ENDED = "ended"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One event. ``blocks`` and ``tokens`` are the prompt's, of an arrival."""

    kind: StepKind
    number: int
    blocks: list[int] = []
    tokens: int = 0


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Events in their order, for so many workers."""

    workers: int
    block_tokens: int
    steps: list[Step]


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The peer's choice for one arrival, and what it knew then of each worker, if it tells."""

    number: int
    worker: int
    prefill_tokens: list[int] = []
    """Uncomputed prompt tokens with those of this request."""
    decode_blocks: list[int] = []
    """Blocks in use with those of this request."""
    overlap_blocks: list[int] = []
    requests: list[int] = []
    """In flight at each worker."""


def scenario(seed: int, *, workers: int = 6, arrivals: int = 2000, in_flight_max: int = 60) -> Scenario:
    """Turns of conversations with common system prompts, between 0 and ``in_flight_max`` of them in flight."""
    rng = random.Random(seed)
    histories: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
    fresh = iter(range(100, 1 << 20))
    computing: list[int] = []
    generating: list[int] = []
    steps: list[Step] = []
    level, number = in_flight_max, 0
    while number < arrivals:
        if number % 100 == 0:
            level = rng.randint(1, in_flight_max)  # light and heavy phases
        if len(computing) + len(generating) < level and rng.random() < 0.6:
            history = rng.choice(histories)
            if not history or len(history) > TURNS_BLOCKS_MAX:
                history[:] = range(rng.choice([0, 4, 12]))
            history += [next(fresh) for _ in range(rng.randint(1, 6))]
            tokens = len(history) * BLOCK_TOKENS + rng.randint(1, BLOCK_TOKENS - 1)
            steps.append(Step(kind=StepKind.ARRIVES, number=number, blocks=list(history), tokens=tokens))
            computing.append(number)
            number += 1
        elif computing and rng.random() < 0.5:
            generating.append(computing.pop(rng.randrange(len(computing))))
            steps.append(Step(kind=StepKind.COMPUTED, number=generating[-1]))
        elif generating:
            steps.append(Step(kind=StepKind.ENDED, number=generating.pop(rng.randrange(len(generating)))))
    return Scenario(workers=workers, block_tokens=BLOCK_TOKENS, steps=steps)
