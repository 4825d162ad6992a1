"""What a placement weighed, kept as it is and rendered when somebody asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import methodcaller

from services.router.placement.option import Option
from services.router.placement.slo import NO_TARGETS, Targets
from shared.contracts.decisions import Candidate, Part

CANDIDATES_MAX = 8
"""Of each part."""


Among = tuple[Part, Sequence[Option], Option | None]
"""Who was weighed for a part, and who was chosen for it."""


@dataclass(frozen=True, slots=True)
class Considered:
    """All that one placement weighed."""

    count: int = 0
    """Workers that could have been chosen."""
    parts: Sequence[Among] = ()
    targets: Targets = NO_TARGETS

    def candidates(self) -> list[Candidate]:
        """The best of each part, the cheapest first; the chosen one is among them."""
        told: list[Candidate] = []
        for part, options, chosen in self.parts:
            ranked = sorted(options, key=methodcaller("cost_s", part))
            best = ranked[:CANDIDATES_MAX]
            if chosen in ranked[CANDIDATES_MAX:]:
                best[-1:] = [chosen]
            told += [self._candidate(part, option, chosen=option is chosen) for option in best]
        return told

    def _candidate(self, part: Part, option: Option, *, chosen: bool) -> Candidate:
        computes, answers = part is not Part.DECODE, part is not Part.PREFILL
        one, two = option.computing, option.answering
        return Candidate(
            worker_id=option.view.record.worker_id,
            part=part,
            chosen=chosen,
            cached_tokens=one.cached,
            fetched_tokens=one.fetched if computes else 0,
            computed_tokens=one.computed if computes else 0,
            queue_s=(one.queue_s if computes else two.queue_s) + (two.room_s if answers else 0.0),
            fetch_s=one.fetch_s if computes else 0.0,
            prefill_s=one.prefill_s if computes else 0.0,
            handoff_s=0.0 if computes else two.handoff_s,
            first_token_s=0.0 if computes else two.first_s,
            transit_s=option.way_s,
            decode_s=two.decode_s if answers else 0.0,
            within_s=two.within_s if answers else 0.0,
            others_s=(one.others_s if computes else 0.0) + (two.others_s if answers else 0.0),
            cost_s=option.cost_s(part),
            meets_targets=option.fine(part, self.targets),
        )


NOTHING_CONSIDERED = Considered()
