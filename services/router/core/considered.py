"""What a placement weighed, kept small: the best few workers with the parts of their cost, rendered when asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from services.router.core import fleet_table as t
from services.router.core.cost_model import Answering, Computing
from shared.contracts.decisions import Candidate, Part
from shared.contracts.ids import WorkerId

Parts = TypeVar("Parts", Computing, Answering)
CANDIDATES_MAX = 8
"""Of each part."""


@dataclass(frozen=True, slots=True)
class Weighed:
    """The best workers for one part. Each array has one entry for each of them, cheapest first."""

    part: Part
    worker_ids: list[WorkerId]
    chosen: int
    """Which of them; -1: none."""
    cost_s: t.Floats
    fine: t.Bools
    """Whether it keeps the targets."""
    computing: Computing | None
    answering: Answering | None

    def candidates(self) -> list[Candidate]:
        """As the wire tells it."""
        return [self._candidate(place) for place in range(len(self.worker_ids))]

    def _candidate(self, place: int) -> Candidate:
        told: dict[str, Any] = {"queue_s": 0.0, "others_s": 0.0}
        if (one := self.computing) is not None:
            told |= {name: int(getattr(one, name.removesuffix("_tokens"))[place]) for name in TOKENS}
            told |= {name: float(getattr(one, name)[place]) for name in ("fetch_s", "prefill_s")}
        if (two := self.answering) is not None:
            told |= {name: float(getattr(two, name)[place]) for name in ("handoff_s", "decode_s")}
        for each in (one, two):
            if each is not None:
                told["queue_s"] += float(each.queue_s[place])
                told["others_s"] += float(each.others_s[place])
        return Candidate(
            worker_id=self.worker_ids[place],
            part=self.part,
            chosen=place == self.chosen,
            cost_s=float(self.cost_s[place]),
            meets_targets=bool(self.fine[place]),
            **told,
        )


TOKENS = ("cached_tokens", "fetched_tokens", "computed_tokens")


class Considered:
    """All that one placement weighed."""

    __slots__ = ("count", "parts")

    def __init__(self, count: int, parts: list[Weighed]) -> None:
        self.count = count
        """Workers that could have been chosen."""
        self.parts = parts

    def candidates(self) -> list[Candidate]:
        """The best of each part, the cheapest first."""
        return [candidate for part in self.parts for candidate in part.candidates()]


NOTHING_CONSIDERED = Considered(0, [])


def best_of(cost_s: t.Floats, chosen: int) -> t.Ints:
    """The places of the cheapest few, cheapest first, and of the chosen one."""
    if len(cost_s) > CANDIDATES_MAX:
        some = np.argpartition(cost_s, CANDIDATES_MAX - 1)[:CANDIDATES_MAX]
        places = some[np.argsort(cost_s[some], kind="stable")]
    else:
        places = np.argsort(cost_s, kind="stable")
    if chosen >= 0 and chosen not in places:
        places[-1] = chosen
    return places


def taken(places: t.Ints, arrays: Parts | None) -> Parts | None:
    """Only those places of each array."""
    kind: Any = type(arrays)
    return kind._make(array[places] for array in arrays) if arrays is not None else None
