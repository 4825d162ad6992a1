"""A store of somebody else's package beside real engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.other_stores import reads_what_a_killed_engine_computed

pytestmark = [pytest.mark.vllm, pytest.mark.nats]


async def test_a_store_of_somebody_else_serves_real_engines(tmp_path: Path):
    await reads_what_a_killed_engine_computed(tmp_path, "vllm")
