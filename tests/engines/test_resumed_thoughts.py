"""The budget of a thought follows from the tokens alone: an engine that takes up an answer ends the thought where the
first one would have.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples

pytestmark = pytest.mark.vllm

VOCABULARY = 16
START, END, THEN = 10, 11, 12
LENGTH = 16


def answer(prompt: list[int], budget: int, wishes: list[int], mark: list[int], said: list[int]) -> list[int]:
    """What vLLM lets a model say that wishes for ``wishes``, after ``said`` of it."""
    import torch
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

    marks = SimpleNamespace(reasoning_start_token_ids=[START], reasoning_end_token_ids=mark)
    holder = ThinkingBudgetStateHolder(marks, 1, 0, torch.device("cpu"), False)  # type: ignore[arg-type]
    own: list[int] = []
    params = SimpleNamespace(thinking_token_budget=budget)
    added: Any = SimpleNamespace(removed=[], moved=[], added=[(0, params, [*prompt, *said], own)])
    holder.sync_batch(added)
    for wish in wishes[len(said) :]:
        holder.update_state([own], None)
        logits = torch.zeros(1, VOCABULARY)
        logits[0, wish] = 1.0
        holder.apply_to_logits(logits, predict_bonus_token=False, spec_token_ids=None)
        own.append(int(logits[0].argmax()))
    return [*said, *own]


@settings(max_examples=examples(150), deadline=None)
@given(
    prompt=st.sampled_from([[1, 2], [1, START], [1, START, 4, 4]]),
    budget=st.integers(0, 8),
    begins=st.integers(0, LENGTH),
    ends=st.integers(0, LENGTH),
    mark=st.sampled_from([[END], [END, THEN]]),
    cut=st.integers(1, LENGTH - 1),
)
def test_a_thought_that_was_cut_ends_where_it_would_have_ended(prompt, budget, begins, ends, mark, cut):
    from services.worker.engines.vllm.resume import _ends_within

    wishes = [5] * LENGTH
    if START not in prompt:
        wishes[begins:begins] = [START]
    wishes[ends:ends] = mark
    whole = answer(prompt, budget, wishes[:LENGTH], mark, [])
    assume(not _ends_within(whole[:cut], mark))

    assert answer(prompt, budget, wishes[:LENGTH], mark, whole[:cut]) == whole


def test_a_cut_within_the_end_of_a_thought_is_refused():
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    from services.worker.engines.port import LegInput
    from services.worker.engines.vllm.resume import obstacle

    model: Any = SimpleNamespace(max_model_len=100, get_vocab_size=lambda: VOCABULARY)
    prompt = {"type": "token", "prompt_token_ids": [1, 2]}

    def why_not(said: list[int], **params: Any) -> str:
        asked = SamplingParams(output_kind=RequestOutputKind.DELTA, **params)
        return obstacle(prompt, asked, LegInput(request_id="r", resume=said), model, [END, THEN])

    assert "within the end of a thought" in why_not([START, 5, END], thinking_token_budget=1)
    assert [why_not(said, thinking_token_budget=1) for said in ([], [START, 5], [START, 5, END, THEN])] == [""] * 3
    assert why_not([START, 5, END]) == ""
