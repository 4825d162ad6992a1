"""The official ``openai`` SDK works unchanged against the whole system."""

from __future__ import annotations

import asyncio

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.support.system import System, until

pytestmark = pytest.mark.nats

MODEL = "baton-tiny"
PROMPT = "The relay race was over when the last runner"
MESSAGES = [{"role": "system", "content": "You run."}, {"role": "user", "content": "Who runs the last leg?"}]


def completion(client: OpenAI, **fields):
    return client.completions.create(**{"model": MODEL, "prompt": PROMPT, "max_tokens": 24, **fields})


def chat(client: OpenAI, **fields):
    return client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "max_tokens": 24, **fields})


def test_the_served_model_is_listed_and_can_be_looked_at(client: OpenAI):
    models = client.models.list().data

    assert [model.id for model in models] == [MODEL]
    assert models[0].object == "model"


def test_a_completion_has_its_text_its_end_and_true_usage(client: OpenAI):
    answer = completion(client, extra_body={"ignore_eos": True})

    assert answer.model == MODEL
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


def test_a_streamed_completion_is_the_same_text_in_pieces(client: OpenAI):
    whole = completion(client).choices[0]
    events = list(completion(client, stream=True))

    assert "".join(event.choices[0].text for event in events) == whole.text
    assert [event.choices[0].finish_reason for event in events if event.choices[0].finish_reason] == [
        whole.finish_reason
    ]
    assert len({event.id for event in events}) == 1


def test_a_chat_answers_as_the_assistant(client: OpenAI):
    answer = chat(client)

    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage.prompt_tokens > 0


def test_a_streamed_chat_is_the_same_text_in_pieces(client: OpenAI):
    whole = chat(client).choices[0]
    events = list(chat(client, stream=True))

    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events) == whole.message.content
    assert events[-1].choices[0].finish_reason == whole.finish_reason


def test_usage_comes_in_the_last_event_when_asked_for(client: OpenAI):
    plain = chat(client)
    *rest, last = chat(client, stream=True, stream_options={"include_usage": True})

    assert last.choices == []
    assert last.usage.prompt_tokens == plain.usage.prompt_tokens
    assert last.usage.completion_tokens == plain.usage.completion_tokens
    assert all(event.usage is None for event in rest)


def test_n_gives_so_many_choices_streamed_and_not(client: OpenAI):
    whole = completion(client, n=3)
    streamed = {event.choices[0].index for event in completion(client, n=3, stream=True)}

    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert streamed == {0, 1, 2}


def test_a_stop_string_ends_the_answer_before_it(client: OpenAI):
    text = completion(client, extra_body={"ignore_eos": True}).choices[0].text
    stop = text.split()[5]

    stopped = completion(client, stop=[stop], extra_body={"ignore_eos": True}).choices[0]
    events = list(completion(client, stop=stop, stream=True, extra_body={"ignore_eos": True}))

    assert stopped.text == text[: text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert "".join(event.choices[0].text for event in events) == stopped.text


def test_logprobs_name_each_token(client: OpenAI):
    answer = completion(client, logprobs=1, max_tokens=8)

    assert len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens
    assert "".join(answer.choices[0].logprobs.tokens) == answer.choices[0].text


def test_an_unknown_model_is_not_found(client: OpenAI):
    with pytest.raises(openai.NotFoundError, match="nobody-has-this") as refused:
        completion(client, model="nobody-has-this")

    assert refused.value.code == "model_not_found"


@pytest.mark.parametrize(
    "wrong",
    [{"max_tokens": -1}, {"n": 0}, {"temperature": -2}, {"prompt": []}, {"stop": [""]}, {"max_tokens": "many"}],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_parameter_is_400_with_the_engines_message(client: OpenAI, wrong: dict, stream: bool):
    with pytest.raises(openai.BadRequestError) as refused:
        completion(client, stream=stream, **wrong)

    assert refused.value.message


def test_several_prompts_are_answered_in_their_order(client: OpenAI):
    prompts = ["One runner", "Two runners", "Three runners"]

    together = completion(client, prompt=prompts)

    assert [choice.text for choice in together.choices] == [
        completion(client, prompt=p).choices[0].text for p in prompts
    ]


async def test_many_requests_of_the_async_client_run_side_by_side(simulated: System):
    async with AsyncOpenAI(base_url=f"{simulated.endpoint}/v1", api_key="unused", max_retries=0) as client:

        async def text(number: int) -> str:
            stream = await client.completions.create(
                model=MODEL, prompt=f"Runner {number % 8}", max_tokens=16, stream=True
            )
            return "".join([event.choices[0].text async for event in stream])

        texts = await asyncio.gather(*(text(number) for number in range(64)))

    assert all(texts)
    assert texts[:8] * 8 == texts


def test_a_client_that_leaves_a_stream_ends_the_work_for_it(client: OpenAI, simulated: System):
    stream = completion(client, max_tokens=100_000, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    until(lambda: simulated.fleet_metrics().sum("baton_worker_requests_running") == 1, "the request runs")

    stream.close()

    simulated.until_idle()
    until(lambda: simulated.metrics().sum("baton_router_requests_in_flight") == 0, "the router is done with it")


def test_a_client_that_disconnects_before_the_first_token_cancels_its_legs(client: OpenAI, simulated: System):
    impatient = client.with_options(timeout=0.5)
    with pytest.raises(openai.APITimeoutError):
        completion(impatient, max_tokens=100_000, extra_body={"ignore_eos": True})

    simulated.until_idle()
