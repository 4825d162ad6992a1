"""The router's predictions from learned speeds, against what was then measured."""

from __future__ import annotations

import pytest

from tests.scenarios.predicted_fleet import APART, SPEEDS, TOGETHER, PredictedFleet, itl_errors, mixed, ttft_errors


@pytest.mark.parametrize("roles", [TOGETHER, APART], ids=["both", "prefill and decode"])
def test_a_lightly_loaded_fleet_is_predicted_accurately(roles):
    requests = PredictedFleet(1, roles).run(150, per_s=2.0, lengths=mixed)

    assert ttft_errors(requests).median < 0.15
    assert ttft_errors(requests).p90 < 0.6
    assert itl_errors(requests).median < 0.15


@pytest.mark.parametrize("roles", [TOGETHER, APART], ids=["both", "prefill and decode"])
def test_a_busy_fleet_is_predicted_without_bias(roles):
    """Later requests cannot be predicted, and a step ends for all of its prompts together."""
    requests = PredictedFleet(2, roles).run(250, per_s=6.0, lengths=mixed)

    assert ttft_errors(requests).median < 0.35
    assert 0.75 < ttft_errors(requests).bias < 1.25
    assert itl_errors(requests).median < 0.35


def test_default_speeds_predict_badly():
    """Shows that the tests above can fail."""
    requests = PredictedFleet(1, APART, learns=False).run(100, per_s=2.0, lengths=mixed)

    assert ttft_errors(requests).median > 0.5
    assert itl_errors(requests).median > 0.3


def test_speeds_are_learned_from_shared_steps():
    made = PredictedFleet(3, TOGETHER)
    made.run(250, per_s=6.0, lengths=mixed)

    for known in made.speeds.all().values():
        tokens_s, pairs = 2048 * known.prefill_token_s, 2048 * 1024
        assert tokens_s + pairs * known.prefill_pair_s == pytest.approx(2048 / 8000, rel=0.1)
        step_s = known.decode_step_s + 10 * known.decode_request_s + 10_000 * known.decode_context_token_s
        assert step_s == pytest.approx(0.01 + 9 * 0.0002 + 10_000 * 5e-8, rel=0.1)


def test_a_slow_worker_is_measured_as_slow_and_gets_less_work():
    made = PredictedFleet(4, TOGETHER)
    made.change("w1", prefill_tokens_per_s=2000.0, decode_base_s=0.04)
    requests = made.run(250, per_s=4.0, lengths=mixed)

    known = made.speeds.all()
    assert known["w1"].prefill_token_s > 2.5 * known["w0"].prefill_token_s
    assert known["w1"].decode_step_s > 2.5 * known["w0"].decode_step_s
    tokens = {
        name: sum(len(one.prompt) for one in requests if one.placement.decode.record.worker_id == name)
        for name in known
    }
    assert tokens["w1"] < 0.6 * min(tokens["w0"], tokens["w2"])


def test_a_worker_that_becomes_slow_is_noticed():
    made = PredictedFleet(5, TOGETHER)
    half = {name: SPEEDS[name] * (0.5 if name.endswith("per_s") else 2.0) for name in SPEEDS}
    made.fleet.at(25.0, lambda: [made.change(name, **half) for name in TOGETHER])
    before = made.run(200, per_s=4.0, lengths=mixed)

    known = made.speeds.all()["w0"]
    assert 1000 * known.prefill_token_s == pytest.approx(1000 / 4000, rel=0.25)
    assert known.decode_step_s == pytest.approx(0.02, rel=0.25)
    late = [one for one in before if one.at > 40.0]
    assert 0.6 < ttft_errors(late).bias < 1.3
