"""What operators read about workers, adapters and the planner."""

from __future__ import annotations

from shared.contracts.fleet_orders import AdapterAction, AdapterOrdered, ModelOrdered, RoleChanged, WorkerDrained
from shared.contracts.planning import PlanAction, PlanDecision
from shared.text.formats import in_bytes


def plan_text(plan: PlanDecision) -> str:
    """The change that the planner decided."""
    role = plan.role.value if plan.role is not None else ""
    if plan.action is PlanAction.CHANGE_ROLE:
        return f"{plan.worker_id} becomes {role}"
    if plan.action is PlanAction.SCALE:
        return f"{'add' if plan.change > 0 else 'remove'} {many(abs(plan.change), f'{role} worker'.strip())}"
    return "no change"


def draining(worker_id: str, legs: int | None, *, evacuate: bool) -> str:
    """The progress of a drain; ``legs`` is None until the worker has reported them."""
    running = "" if legs is None else f": {many(legs, 'request')} still running" if legs else ": no request running"
    moving = ", moving its hot prefixes to other workers" if evacuate else ""
    return f"{worker_id} is draining{moving}{running}"


def drained(report: WorkerDrained) -> str:
    requests = "no request was running"
    if report.legs:
        moved_on = f", {report.legs_cut} continued on other workers" if report.legs_cut else ""
        requests = f"{report.legs - report.legs_cut} of {report.legs} running requests finished{moved_on}"
    parts = [requests]
    if report.prefixes or report.prefixes_left:
        moved = f"{many(report.prefixes, 'hot prefix', 'hot prefixes')} moved ({many(report.blocks, 'block')}"
        parts.append(f"{moved}, {in_bytes(report.bytes)}, {report.evacuation_s:.1f} s)")
    if report.prefixes_left:
        parts.append(f"{report.prefixes_left} not moved, no worker could take them")
    return f"{report.worker_id} drained in {report.seconds:.1f} s: {'; '.join(parts)}."


def role_changed(report: RoleChanged) -> str:
    if report.before is report.role:
        return f"{report.worker_id} already has the role {report.role.value}."
    legs = f"; {many(report.legs, 'running request')} continued" if report.legs else ""
    return (
        f"{report.worker_id} changed its role from {report.before.value} to {report.role.value}: "
        f"verified and registered in {report.seconds:.2f} s{legs}."
    )


def adapter_ordered(done: AdapterOrdered) -> str:
    verb = "loaded" if done.order.action is AdapterAction.LOAD else "unloaded"
    if done.refusal:
        return f"{done.order.name} was not {verb}: {done.refusal}"
    failed = [f"{change.worker_id}: {change.failure}" for change in done.changes if change.failure]
    count = len(done.changes) - len(failed)
    return "; ".join((f"{done.order.name} was {verb} on {many(count, 'worker')}", *failed))


def model_ordered(model: str, ordered: ModelOrdered, *, asleep: bool) -> str:
    """The result of an order to sleep or to wake."""
    if not ordered.workers:
        return f"{model} has no worker that {'is ready' if asleep else 'sleeps'}: nothing is to be done."
    engines = many(len(ordered.workers), "engine")
    if asleep:
        return f"{model} goes to sleep: {engines} will end when running requests have finished. A request wakes it."
    return f"{model} wakes up: {engines} will start, which takes about {ordered.expected_s:.0f} s."


def many(count: int, one: str, more: str = "") -> str:
    """``1 leg``, ``2 legs``."""
    return f"{count} {one if count == 1 else more or one + 's'}"
