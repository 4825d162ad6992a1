"""What the proof's page says of its parts."""

from __future__ import annotations

import time

import pytest

from bench.peer_checks import RunFailed


@pytest.mark.slow
def test_a_part_that_fails_is_told_and_ends_nothing():
    from bench import gpu_proof

    def fails() -> list[str]:
        raise RunFailed("no KV was read")

    failed, holds = gpu_proof.run("up", fails, time.monotonic())

    assert not holds
    assert "Part up FAILED:" in failed.lines
    assert "no KV was read" in failed.lines


def test_no_part_begins_when_ten_minutes_are_over():
    from bench import gpu_proof

    begun_at = time.monotonic() - gpu_proof.PROOF_S_MAX - 1.0
    late, holds = gpu_proof.run("up", lambda: ["never"], begun_at)

    assert not holds
    assert "not run, because 10 minutes were over" in late.lines[0]


def test_a_model_is_proved_by_equal_answers_that_were_handed_over():
    from bench.gpu_proof import PROMPTS, Model

    proved = Model("gemma-3", equal=len(PROMPTS), handoffs=3, handoff_bytes=10, read_back_tokens=64, turn_is_equal=True)
    recomputed = Model("gemma-3", equal=len(PROMPTS), handoffs=0, read_back_tokens=64, turn_is_equal=True)
    not_read_back = Model("gemma-3", equal=len(PROMPTS), handoffs=3, read_back_tokens=0, turn_is_equal=True)
    wrong = Model("gemma-3", equal=len(PROMPTS) - 1, handoffs=3, read_back_tokens=64, turn_is_equal=True)

    assert [one.is_proved for one in (proved, recomputed, not_read_back, wrong)] == [True, False, False, False]


def test_a_refused_model_is_listed_with_the_layouts_reason():
    from bench.gpu_proof import REFUSAL, Model

    said = "worker: The Baton connector cannot exchange this engine's KV: it has a state.\nmore"
    found = REFUSAL.search(said)
    assert found is not None

    row = Model("falcon-h1", refused=found[0]).row()

    assert row[:2] == ["falcon-h1", "refused: The Baton connector cannot exchange this engine's KV: it has a state."]
