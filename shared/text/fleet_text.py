"""What the planner decided and what a store lost, in a few words."""

from __future__ import annotations

from shared.contracts.load import StoreState
from shared.contracts.planning import PlanAction, PlanDecision


def loss_text(store: StoreState) -> str:
    """What a store has lost since it started."""
    losses = ((store.damaged_blocks_total, "damaged in its files"), (store.unsaved_blocks_total, "not saved"))
    return f"blocks lost so far: {', '.join(f'{count} {how}' for count, how in losses if count)}"


def plan_text(plan: PlanDecision) -> str:
    """What was decided."""
    role = plan.role.value if plan.role is not None else "worker"
    if plan.action is PlanAction.CHANGE_ROLE:
        return f"{plan.worker_id} becomes {role}"
    if plan.action is PlanAction.SCALE:
        return f"{abs(plan.change)} {'more' if plan.change > 0 else 'fewer'} {role}"
    return "nothing to do"
