"""A recurrent state beside MTP and prefix caching in vLLM itself, with vLLM's own connector. Baton's refuses such engines
(``connector/layout/engine_layout.py``), because vLLM has open bugs there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from shared.contracts.inference import LegKind
from tests.gpu.conftest import DECODE, PREFILL, Pair, driver_of, running
from tests.gpu.places import ON_CPU
from tests.gpu.test_groups import place_for
from tests.support.drafters import Drafting
from tests.support.kv_driver import Driver
from tests.support.prompts import random_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.nats,
    pytest.mark.skipif(ON_CPU, reason="vLLM moves states of requests that draft by a Triton kernel, which needs a GPU"),
]

PLAIN, DRAFTS = PREFILL, DECODE
ANSWER = 48


@pytest.fixture(scope="module")
def states(one_gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """An engine without drafts, and one with."""
    folder = tmp_path_factory.mktemp("states")
    drafting = Drafting.by("state-mtp", folder)
    plain, drafts = (
        replace(where, settings={**where.settings, "connector": "upstream"})
        for where in (place_for(drafting.model, 0), place_for(drafting.model, 1))
    )
    arguments = f"{drafts.settings.get('engine_args', '')} {drafting.engine_args}"
    with running(folder, plain, replace(drafts, settings={**drafts.settings, "engine_args": arguments})) as pair:
        yield pair


async def test_a_cached_state_is_continued_right_with_drafts(states: Pair):
    """Proves: an engine that drafts, and takes drafts back, answers a prompt, the same prompt from its cache, and the
    conversation's next turn as an engine without drafts does. When it passes on a GPU, the refusal of drafts beside a
    state can go, and ``test_groups.py`` gets a pair that drafts.
    """
    async with driver_of(states) as driver:
        for tokens in (300, 1500):
            prompt = random_prompt(f"state {tokens}", tokens)
            for turn in range(2):
                expected = await answered(driver, PLAIN, prompt)
                assert await answered(driver, DRAFTS, prompt) == expected, (tokens, turn, "computed")
                assert await answered(driver, DRAFTS, prompt) == expected, (tokens, turn, "from its cache")
                prompt = [*prompt, *expected, *random_prompt(f"turn {tokens}", 100)]


async def answered(driver: Driver, worker: str, prompt: Sequence[int]) -> list[int]:
    answer = await driver.leg(worker, LegKind.AGGREGATED, prompt, fields={"max_tokens": ANSWER})
    assert answer.failure is None, answer.failure
    return answer.token_ids
