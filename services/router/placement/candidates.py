"""The workers that were weighed for a request, with the predicted cost of each part that they could serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from services.router.placement import specification as s
from services.router.placement.slo import Targets
from services.router.placement.specification import PACKED, Choice, Estimate
from services.router.state.worker_view import WorkerView
from shared.contracts.decisions import CandidateRecord, Part

WHY: Final = (
    "asked for",
    "asked for",
    "one worker is best for both legs",
    "one role is missing",
    "prefill and decode apart cost least",
    "there is less than one block of KV to hand over",
)
"""The reasons of ``specification``, for people."""


class Candidate:
    """A worker with its estimate, which never changes: the decision log renders it later."""

    __slots__ = ("estimate", "view")

    def __init__(self, view: WorkerView, estimate: Estimate) -> None:
        self.view = view
        self.estimate = estimate

    def cost_s(self, part: Part) -> float:
        """See ``Estimate``."""
        return float(self.estimate.cost_s(part))

    def record(self, part: Part, targets: Targets, *, chosen: bool) -> CandidateRecord:
        """The wire message about this candidate."""
        computes, generates = part is not Part.DECODE, part is not Part.PREFILL
        of = self.estimate
        return CandidateRecord(
            worker_id=self.view.record.worker_id,
            part=part,
            chosen=chosen,
            cached_tokens=of.cached,
            fetched_tokens=of.fetched if computes else 0,
            computed_tokens=of.computed if computes else 0,
            queue_s=of.queue_s + (of.kv_wait_s if generates else 0.0),
            fetch_s=of.fetch_s if computes else 0.0,
            prefill_s=of.prefill_s if computes else 0.0,
            handoff_s=0.0 if computes else of.handoff_s,
            decode_prefill_s=0.0 if computes else of.first_s,
            front_end_and_bus_s=of.transit_s if part is Part.WHOLE else of.leg_transit_s,
            decode_s=of.decode_s if generates else 0.0,
            within_s=of.within_s if generates else 0.0,
            others_s=(of.prefill_others_s if computes else 0.0) + (of.decode_others_s if generates else 0.0),
            cost_s=of.cost_s(part),
            meets_targets=of.meets(part, targets.ttft_s, targets.itl_s),
        )


PartCandidates = tuple[Part, Sequence[Candidate], Candidate | None]
"""The candidates for a part of the request, and the chosen one."""


class Candidates:
    """What ``Placement.candidates`` says, unpacked each time that it is read: when a decision is explained."""

    __slots__ = ("_choice", "considered")

    def __init__(self, choice: Choice, considered: int) -> None:
        """``considered``: the number of free workers."""
        self._choice = choice
        self.considered = considered

    @property
    def why(self) -> int:
        """The reason of the choice; see ``WHY``."""
        return self._choice[2]

    def chosen(self) -> tuple[Candidate | None, Candidate]:
        """The prefill worker, and the one that serves the answer or all of the request."""
        prefill, decode = self._choice[0], self._choice[1]
        return self.candidate(prefill) if prefill >= 0 else None, self.candidate(decode)

    @property
    def holders(self) -> tuple[tuple[int, int], ...]:
        """Rows to fetch KV from, with the block to stop before."""
        return self._choice[4]

    def candidate(self, number: int) -> Candidate:
        """Unpack one of them."""
        # Its own constructor would take longer than all else here.
        estimate = tuple.__new__(Estimate, PACKED.unpack_from(self._choice[5], number * PACKED.size))
        return Candidate(self._choice[6][number], estimate)

    def __iter__(self) -> Iterator[PartCandidates]:
        prefill, decode, why, has_pair = self._choice[:4]
        every = [self.candidate(number) for number in range(len(self._choice[6]))]

        def having(role: int) -> list[Candidate]:
            return [one for one in every if one.estimate.roles & role]

        chosen = every[decode]
        if prefill >= 0:
            yield Part.PREFILL, having(s.PREFILL_ROLE), every[prefill]
            yield Part.DECODE, having(s.RECEIVER_ROLE), chosen
            yield Part.WHOLE, having(s.ALONE_ROLE), None
            return
        is_alone = why in (s.ALONE_ASKED_FOR, s.BEST_FOR_BOTH, s.NOTHING_TO_HAND_OVER)
        among = having(s.ALONE_ROLE) if is_alone else having(s.DECODE_ROLE) or having(s.ANSWER_ROLE)
        yield Part.WHOLE, among, chosen
        if has_pair:
            yield Part.PREFILL, having(s.PREFILL_ROLE), None
            yield Part.DECODE, having(s.RECEIVER_ROLE), None
