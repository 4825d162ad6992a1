"""Every test in this folder runs on the memory bus and on real nats-servers."""

from __future__ import annotations

import pytest

from tests.integration.bus.worlds import WORLDS, make_world


@pytest.fixture(
    params=[pytest.param(kind, marks=pytest.mark.nats if "nats" in kind else ()) for kind in WORLDS],
    ids=[kind.replace(" ", "-") for kind in WORLDS],
)
async def world(request, tmp_path):
    async with make_world(request.param, tmp_path) as made:
        yield made
