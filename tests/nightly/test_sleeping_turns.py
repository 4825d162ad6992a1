"""Two models that may only be awake in turn: a client that comes again when it was told to is served."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.test_sleeping_models import FIRST, Models, models_of

pytestmark = pytest.mark.nats

TURN_S_MAX = 120.0


def insist(models: Models, model: str) -> int:
    """Ask again whenever Retry-After says; how often the answer was 503."""
    refused, deadline = 0, time.monotonic() + TURN_S_MAX
    while (answer := models.complete(model)).status_code == 503:
        assert answer.json()["error"]["code"] == "model_asleep"
        refused += 1
        assert time.monotonic() < deadline
        again_s = float(answer.headers["retry-after"])
        assert again_s >= 1
        time.sleep(again_s)
    assert answer.status_code == 200, answer.text
    return refused


@pytest.mark.parametrize("wake_s_max", ["0", "60"])
def test_models_take_turns(tmp_path: Path, wake_s_max: str):
    with models_of(tmp_path, "--awake-max", "1", env={"ROUTER_WAKE_S_MAX": wake_s_max}) as models:
        assert models.phases() == {"prefill-1": "ready", "decode-1": "ready", "both-1": "asleep"}

        for model in (models.second, FIRST):
            assert insist(models, model) >= 1

            phases = models.phases()  # Between its two processes a worker is gone.
            awake = {"both-1"} if model == models.second else {"prefill-1", "decode-1"}
            assert {name for name, phase in phases.items() if phase not in {"asleep", "gone"}} == awake
