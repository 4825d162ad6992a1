"""Whether a worker may take on another role, and with which one its next life begins."""

from __future__ import annotations

import msgspec

from shared.contracts.workers import Role, WorkerPhase


class TakenRole(msgspec.Struct, frozen=True, kw_only=True):
    """A role that was taken on at run time, as it is kept for the next life."""

    role: Role
    of_settings: Role
    """What the settings said then."""


def refusal(before: Role, after: Role, phase: WorkerPhase, *, is_changing: bool) -> str:
    """Why not, in words; empty when it may."""
    if Role.STORE in (before, after) and before is not after:
        return "a store has no engine, and an engine is no store"
    if phase is not WorkerPhase.READY:
        return f"it is {phase.value}"
    return "another change of its role is under way" if is_changing else ""


def to_keep(role: Role, of_settings: Role) -> TakenRole | None:
    """None: the settings say it already."""
    return None if role is of_settings else TakenRole(role=role, of_settings=of_settings)


def begins_as(of_settings: Role, kept: TakenRole | None) -> tuple[Role, str]:
    """The role of a life that begins, and what there is to note about it. Settings that were changed since the role was
    taken on are the newer order.
    """
    if kept is None or kept.of_settings is not of_settings:
        return of_settings, ""
    return kept.role, f"{kept.role.value}, as it was told to be before it was started again"
