"""A fault every 1.2 seconds breaks no promise (see ``make chaos ARGS=--dense``)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.nightly.chaos.dense import run_dense

pytestmark = pytest.mark.nats


@pytest.mark.parametrize("seed", [31337, 7, 5])
def test_faults_that_overlap_break_no_promise(seed: int, tmp_path: Path):
    report = asyncio.run(run_dense(seed, tmp_path))

    assert len(report.happened) >= 20
    assert report.broken_promises() == [], report.summary()
