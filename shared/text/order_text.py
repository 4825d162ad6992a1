"""What a person is told of a worker that leaves, or that changes its role."""

from __future__ import annotations

from shared.contracts.fleet_orders import RoleChanged, WorkerDrained
from shared.text.quantities import in_bytes


def draining(worker_id: str, legs: int | None, *, evacuate: bool) -> str:
    """While it goes on; ``legs`` is None until the worker has told."""
    running = "" if legs is None else f": {many(legs, 'leg')} still running" if legs else ": no leg runs any more"
    moving = ", its hot prefixes go to those that stay" if evacuate else ""
    return f"{worker_id} drains{running}{moving}"


def drained(told: WorkerDrained) -> str:
    """When it has left."""
    ended = told.legs - told.legs_cut
    legs = f"{many(told.legs, 'leg')} ran, " + (
        f"{ended} of them to their end; {told.legs_cut} had to go on elsewhere" if told.legs_cut else "all to their end"
    )
    parts = [legs if told.legs else "nothing ran"]
    if told.prefixes or told.prefixes_left:
        moved = f"{many(told.prefixes, 'hot prefix', 'hot prefixes')} moved ({many(told.blocks, 'block')}"
        parts.append(f"{moved}, {in_bytes(told.bytes)}, {told.evacuation_s:.1f} s)")
    if told.prefixes_left:
        parts.append(f"{told.prefixes_left} found nobody to take them")
    return f"{told.worker_id} has left after {told.seconds:.1f} s: {'; '.join(parts)}."


def role_changed(told: RoleChanged) -> str:
    """When it has happened."""
    if told.before is told.role:
        return f"{told.worker_id} is a {told.role.value} worker already."
    legs = f"; {many(told.legs, 'running leg')} went on undisturbed" if told.legs else ""
    words = f"{told.worker_id} is a {told.role.value} worker now, no longer {told.before.value}"
    return f"{words}: verified and registered in {told.seconds:.2f} s{legs}."


def many(count: int, one: str, more: str = "") -> str:
    """``1 leg``, ``2 legs``."""
    return f"{count} {one if count == 1 else more or one + 's'}"
