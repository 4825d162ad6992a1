"""What a placement weighed, kept as it is and rendered when somebody asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.router.core.cost_model import Answering, Computing
from services.router.core.targets import NO_TARGETS, Targets
from shared.contracts.decisions import Candidate, Part
from shared.contracts.ids import WorkerId

CANDIDATES_MAX = 8
"""Of each part."""


class Seen(NamedTuple):
    """One worker that was weighed for a part."""

    worker_id: WorkerId
    chosen: bool
    cost_s: float
    transit_s: float
    computing: Computing
    answering: Answering


@dataclass(frozen=True, slots=True)
class Considered:
    """All that one placement weighed."""

    count: int = 0
    """Workers that could have been chosen."""
    parts: Sequence[tuple[Part, Sequence[Seen]]] = ()
    targets: Targets = NO_TARGETS

    def candidates(self) -> list[Candidate]:
        """The best of each part, the cheapest first; the chosen one is among them."""
        told: list[Candidate] = []
        for part, seen in self.parts:
            ranked = sorted(seen, key=lambda one: one.cost_s)
            best = ranked[:CANDIDATES_MAX]
            best[-1:] = [one for one in ranked[CANDIDATES_MAX:] if one.chosen] or best[-1:]
            told += [self._candidate(part, one) for one in best]
        return told

    def _candidate(self, part: Part, seen: Seen) -> Candidate:
        computes, answers = part is not Part.DECODE, part is not Part.PREFILL
        one, two = seen.computing, seen.answering
        late = computes and one.ttft_s() > self.targets.ttft_s
        slow = answers and two.itl_s > self.targets.itl_s
        return Candidate(
            worker_id=seen.worker_id,
            part=part,
            chosen=seen.chosen,
            cached_tokens=one.cached,
            fetched_tokens=one.fetched if computes else 0,
            computed_tokens=one.computed if computes else 0,
            queue_s=(one.queue_s if computes else two.queue_s) + (two.room_s if answers else 0.0),
            fetch_s=one.fetch_s if computes else 0.0,
            prefill_s=one.prefill_s if computes else 0.0,
            handoff_s=0.0 if computes else two.handoff_s,
            first_token_s=0.0 if computes else two.first_s,
            transit_s=seen.transit_s,
            decode_s=two.decode_s if answers else 0.0,
            within_s=two.within_s if answers else 0.0,
            others_s=(one.others_s if computes else 0.0) + (two.others_s if answers else 0.0),
            cost_s=seen.cost_s,
            meets_targets=not late and not slow,
        )


NOTHING_CONSIDERED = Considered()
