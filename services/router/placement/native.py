"""Placement in C, where it was built: ``native/placement.c`` does what ``specification`` says."""

from __future__ import annotations

from services.router.placement.specification import PACKED, PythonPlacement
from services.router.state import fleet_table as t

try:
    from services.router.native._placement import CANDIDATE_BYTES, NativePlacement
except ImportError:
    IS_COMPILED = False
else:
    # What was built of other sources is not used: it packs candidates differently.
    IS_COMPILED = PACKED.size == CANDIDATE_BYTES


def placement_of(
    table: t.FleetTable, sources: t.Bools, *, compiled: bool = IS_COMPILED
) -> NativePlacement | PythonPlacement:
    """Weighs the workers of a fleet table, in C or in Python. ``sources``: see ``PythonPlacement``."""
    form = NativePlacement if compiled else PythonPlacement
    return form(table.numbers, table.flags, sources)
