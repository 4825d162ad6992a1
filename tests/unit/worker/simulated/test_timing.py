"""How long a step of a simulated engine takes."""

from __future__ import annotations

import pytest

from services.worker.engines.simulated.core.timing import step_s
from tests.unit.worker.simulated.builders import INSTANT, settings


def test_a_long_prompt_takes_more_than_its_parts():
    attending = settings(**INSTANT, sim_prefill_s_per_pair=1e-9)

    first = step_s(attending, 1000, 0, 0, prefill_pairs=1000 * 500.0)
    second = step_s(attending, 1000, 0, 0, prefill_pairs=1000 * 1500.0)

    assert second == pytest.approx(3 * first)


def test_attention_takes_no_time_unless_it_is_said():
    assert step_s(settings(**INSTANT), 1000, 0, 0, prefill_pairs=1e9) == 0.0
