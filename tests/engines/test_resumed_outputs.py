"""vLLM's server gets the same outputs for a resumed response as for one that was never interrupted."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engines.port import LegInput
from services.worker.tiny_model import ensure_tiny_tokenizer
from shared.contracts.inference import LegKind
from tests.support.examples import examples

pytestmark = pytest.mark.vllm

VOCABULARY = 3180
PROMPT = [70, 71, 72]
BYTES = [133, 108, 168, 251, 104, 178, 259, 253, 230, 70]
"""Tokens that are single bytes, of letters of two, three and four of them."""
answers = st.lists(
    st.sampled_from(BYTES) | st.integers(0, VOCABULARY - 1) | st.sampled_from([100, 101, 102]), min_size=1, max_size=24
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(str(ensure_tiny_tokenizer(tmp_path_factory.mktemp("models"))))


class Front:
    """vLLM's front end without its engine: a test says what the engine would."""

    def __init__(self, tokenizer, **params: Any) -> None:
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

        asked = SamplingParams(**params, output_kind=RequestOutputKind.DELTA)
        asked.update_from_generation_config({}, tokenizer.eos_token_id)
        values = dict.fromkeys(("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank"))
        self.request = EngineCoreRequest(
            request_id="r-1",
            external_req_id="r",
            prompt_token_ids=list(PROMPT),
            sampling_params=asked,
            arrival_time=0.0,
            **values,
        )
        self.params = asked
        self.processor = OutputProcessor(tokenizer, log_stats=False)
        self.queue = RequestOutputCollector(asked.output_kind, "r-1")
        self.processor.add_request(self.request, None, None, 0, self.queue)
        self.told: list[tuple] = []

    def hear(self, output: Any) -> None:
        for one in output.outputs:
            said = [{token: rest.decoded_token for token, rest in each.items()} for each in one.logprobs or ()]
            self.told.append((one.text, list(one.token_ids), one.finish_reason, one.stop_reason, said))

    def say(self, tokens: list[int], already: int = 0) -> None:
        """The engine's own tokens, until one of them ends the answer."""
        from services.worker.engines.vllm import resume as vllm_resume

        for count, token in enumerate(tokens, start=already + 1):
            if "r-1" not in self.processor.request_states:
                return
            output = vllm_resume._output("r-1", token, count, self.params)
            vllm_resume._process(self.processor, output, vllm_resume.FIRST_WEIGHT_VERSION)
            self.hear(self.queue.get_nowait())


def catch_up_of(front: Front, tokens: list[int], cut: int) -> bool:
    from services.worker.engines.vllm.resume import CatchUp

    catch_up, most = CatchUp(tokens[:cut], LegKind.AGGREGATED), front.params.max_tokens
    goes_on = asyncio.run(catch_up.begin(front.processor, front.request, front.queue))
    for output in catch_up.outputs:
        front.hear(output)
    assert front.request.prompt_token_ids == PROMPT + tokens[:cut]
    assert front.params.max_tokens == most - cut
    front.params.max_tokens = most  # the test's own counting begins at the answer's first token
    return goes_on


@settings(max_examples=examples(60), deadline=None)
@given(
    answers,
    st.integers(0, 24),
    st.sampled_from([{}, {"logprobs": 0}, {"stop": ["\ufffd"]}, {"stop": ["e", "a the"], "include_stop_str_in_output": True}]),
    st.sampled_from([{}, {"min_tokens": 4}, {"ignore_eos": True}, {"stop_token_ids": [100]}]),
)  # fmt: skip
def test_resumed_outputs_equal_those_of_an_uncut_answer(tokenizer, tokens, cut, shown, ends):
    whole = Front(tokenizer, max_tokens=20, **shown, **ends)
    whole.say(tokens)
    cut = min(cut, len(whole.told))

    front = Front(tokenizer, max_tokens=20, **shown, **ends)
    goes_on = catch_up_of(front, tokens, cut)
    front.say(tokens[cut:], already=cut)

    assert front.told == whole.told
    assert goes_on == (not cut or whole.told[cut - 1][2] is None)


@pytest.mark.parametrize(
    ("params", "prompt", "word"),
    [
        ({"n": 2}, {"type": "token"}, "several"),
        ({"frequency_penalty": 1}, {"type": "token"}, "frequency_penalty"),
        ({}, {"type": "embeds"}, "tokens"),
        ({"prompt_token_ids": [1] * 95}, {"type": "token"}, "context"),
    ],
)
def test_state_that_only_the_lost_engine_had_is_refused(params, prompt, word):
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    from services.worker.engines.vllm.resume import obstacle

    tokens = params.pop("prompt_token_ids", PROMPT)
    asked = SamplingParams(**params, output_kind=RequestOutputKind.DELTA)
    given = LegInput(request_id="r", resume=[5] * 10)
    model = SimpleNamespace(max_model_len=100, get_vocab_size=lambda: VOCABULARY)

    assert word in obstacle({**prompt, "prompt_token_ids": tokens}, asked, given, model)
