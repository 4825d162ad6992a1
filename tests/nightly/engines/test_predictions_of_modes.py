"""The router's predictions of the time to the first token in the modes that ``test_predictions.py`` leaves out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.system.fleet import Fleet, fleet_of_short_prompts
from tests.engines.system.test_predictions import prove_predictions

pytestmark = [pytest.mark.vllm, pytest.mark.nats]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet_of_short_prompts(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.mark.parametrize(
    ("mode", "handoff"), [("aggregated", "streamed"), ("disaggregated", "offered"), ("decode_first", "streamed")]
)
async def test_the_median_prediction_is_near_what_is_measured(fleet: Fleet, mode: str, handoff: str):
    await prove_predictions(fleet, mode, handoff)
