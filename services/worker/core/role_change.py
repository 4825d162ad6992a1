"""Whether a worker may take on another role."""

from __future__ import annotations

from shared.contracts.workers import Role, WorkerPhase


def refusal(before: Role, after: Role, phase: WorkerPhase, *, is_changing: bool) -> str:
    """Why not, in words; empty when it may."""
    if Role.STORE in (before, after) and before is not after:
        return "a store has no engine, and an engine is no store"
    if phase is not WorkerPhase.READY:
        return f"it is {phase.value}"
    return "another change of its role is under way" if is_changing else ""
