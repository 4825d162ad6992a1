"""The dense profile: one fault has not ended when the next one begins, so requests meet several of them."""

from __future__ import annotations

from pathlib import Path

from services.worker.engines.simulated.core.groups import Kind
from tests.nightly.chaos.chaos import Report, opened_run
from tests.nightly.chaos.fleet import Size
from tests.nightly.chaos.trace import Shape

EVERY_S = 1.2
SECONDS = 90.0
REQUESTS_PER_S = 15.0
PREFILL, DECODE = 3, 6


async def run_dense(seed: int, folder: Path, groups: Kind = "full") -> Report:
    """A fleet of its own for each seed."""
    size = Size(prefill=PREFILL, decode=DECODE, both=0, groups=groups, seed=seed)
    async with opened_run(size, folder) as run:
        shape = Shape(seed=seed, seconds=SECONDS, requests_per_s=REQUESTS_PER_S)
        return await run.chaos(shape, EVERY_S)
