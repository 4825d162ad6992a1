"""How long a step of a simulated engine takes."""

from __future__ import annotations

import pytest

from tests.unit.worker.simulated.builders import INSTANT, settings


def test_a_long_prompt_takes_more_than_its_parts():
    attending = settings(**INSTANT, prefill_s_per_pair=1e-9)

    first = attending.step_s(1000, 1000 * 500.0, 0, 0)
    second = attending.step_s(1000, 1000 * 1500.0, 0, 0)

    assert second == pytest.approx(3 * first)


def test_attention_takes_no_time_by_default():
    assert settings(**INSTANT).step_s(1000, 1e9, 0, 0) == 0.0
