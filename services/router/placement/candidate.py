"""One worker weighed for one request: the predicted cost of each part that it could serve."""

from __future__ import annotations

from collections.abc import Sequence

from services.router.placement.cost import Estimate
from services.router.placement.slo import Targets
from services.router.state import fleet_table as t
from services.router.state.cluster_view import WorkerView
from shared.contracts.decisions import CandidateRecord, Part

TABLE_COLUMNS = [t.LEGS, t.TURN, t.TRANSIT_S]
"""The numbers of the fleet table that a candidate keeps."""


class Candidate:
    """The fleet table changes with every report and every leg, so a candidate keeps the numbers of the moment at which
    its request was placed. It never changes: the decision log renders it later.
    """

    __slots__ = ("cost", "decode", "group", "legs", "prefill", "transit_s", "turn", "view")

    def __init__(self, view: WorkerView, group: int, numbers: list[float], estimate: Estimate) -> None:
        """``numbers`` are those of ``TABLE_COLUMNS``."""
        self.view = view
        self.group = group
        """Workers of the same group may exchange KV."""
        self.legs, self.turn, self.transit_s = numbers
        self.prefill, self.decode, self.cost = estimate

    def cost_s(self, part: Part) -> float:
        return float(self.cost[0 if part is Part.PREFILL else 1 if part is Part.DECODE else 2])

    def meets(self, targets: Targets, part: Part) -> bool:
        late = part is not Part.DECODE and self.prefill.ttft_s() > targets.ttft_s
        slow = part is not Part.PREFILL and self.decode.itl_s > targets.itl_s
        return not late and not slow

    def record(self, part: Part, targets: Targets, *, chosen: bool) -> CandidateRecord:
        """The wire message about this candidate."""
        computes, generates = part is not Part.DECODE, part is not Part.PREFILL
        prefill, decode = self.prefill, self.decode
        return CandidateRecord(
            worker_id=self.view.record.worker_id,
            part=part,
            chosen=chosen,
            cached_tokens=prefill.cached,
            fetched_tokens=prefill.fetched if computes else 0,
            computed_tokens=prefill.computed if computes else 0,
            queue_s=(prefill.queue_s if computes else decode.queue_s) + (decode.kv_wait_s if generates else 0.0),
            fetch_s=prefill.fetch_s if computes else 0.0,
            prefill_s=prefill.prefill_s if computes else 0.0,
            handoff_s=0.0 if computes else decode.handoff_s,
            first_token_s=0.0 if computes else decode.first_s,
            transit_s=self.transit_s,
            decode_s=decode.decode_s if generates else 0.0,
            within_s=decode.within_s if generates else 0.0,
            others_s=(prefill.others_s if computes else 0.0) + (decode.others_s if generates else 0.0),
            cost_s=self.cost_s(part),
            meets_targets=self.meets(targets, part),
        )


PartCandidates = tuple[Part, Sequence[Candidate], Candidate | None]
"""The candidates for a part of the request, and the chosen prefill."""
