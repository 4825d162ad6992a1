"""One worker for one request, and what it would cost there."""

from __future__ import annotations

from services.router.placement.cost import Answering, Computing, Cost
from services.router.placement.slo import Targets
from services.router.state import fleet_table as t
from services.router.state.cluster_view import WorkerView
from shared.contracts.decisions import Part

OF_OPTIONS = [t.LEGS, t.TURN, t.WAY_S]
"""The numbers of the fleet's table that an option keeps."""

Weighed = tuple[Computing, Answering, Cost]
"""What one worker would need, and what is compared of it."""


class Option:
    """Never changes: the log of decisions tells of it later."""

    __slots__ = ("answering", "computing", "cost", "group", "legs", "turn", "view", "way_s")

    def __init__(self, view: WorkerView, group: int, numbers: list[float], weighed: Weighed) -> None:
        """``numbers``: those of ``OF_OPTIONS``."""
        self.view = view
        self.group = group
        """Who may exchange KV with it is of the same group."""
        self.legs, self.turn, self.way_s = numbers
        self.computing, self.answering, self.cost = weighed

    def cost_s(self, part: Part) -> float:
        """What is compared."""
        return float(self.cost[0 if part is Part.PREFILL else 1 if part is Part.DECODE else 2])

    def fine(self, part: Part, targets: Targets) -> bool:
        """Whether the targets are kept."""
        late = part is not Part.DECODE and self.computing.ttft_s() > targets.ttft_s
        slow = part is not Part.PREFILL and self.answering.itl_s > targets.itl_s
        return not late and not slow
