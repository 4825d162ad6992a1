"""LiteLLM as a library, and as a proxy, in front of the server at $ATTACHED_URL.

Each test sends requests as a user of LiteLLM would. Answers are greedy: those of the first target, one engine, are kept
in the folder $ANSWERS, and the second target must say the same.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import litellm
import pytest

URL = os.environ.get("ATTACHED_URL", "")
MODEL = os.environ.get("ATTACHED_NAME", "")
CONTEXT_TOKENS = int(os.environ.get("CONTEXT_TOKENS", "0"))
ANSWERS = Path(os.environ.get("ANSWERS", "."))
WRITES = os.environ.get("WRITE_ANSWERS") == "1"
REQUEST_S_MAX = 120
PROXY_START_S_MAX = 300.0

DIRECT = {
    "openai": {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1"},
    "hosted_vllm": {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1"},
    "anthropic": {"model": f"anthropic/{MODEL}", "api_base": URL},
}
"""How LiteLLM's providers reach the server without a proxy: the last one sends to /v1/messages."""
COMMON = {"api_key": "unused", "temperature": 0, "timeout": REQUEST_S_MAX, "num_retries": 0}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"celsius": {"type": "boolean"}, "city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["celsius", "city"],
            "additionalProperties": False,
        },
    },
}
STORY = "There was a small house at the end of a long road. " * 12


@pytest.fixture(params=sorted(DIRECT))
def provider(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {**DIRECT[request.param], **COMMON}


@pytest.fixture(params=["openai", "hosted_vllm"])
def openai_provider(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {**DIRECT[request.param], **COMMON}


@pytest.fixture
def check_same(request: pytest.FixtureRequest) -> Callable[[Any], None]:
    """Keeps what one engine answered; compares what another server does."""

    def check(answer: Any) -> None:
        file = ANSWERS / f"{request.node.name}.json"
        if WRITES:
            ANSWERS.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(answer))
        else:
            assert answer == json.loads(file.read_text())

    return check


def asked(text: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": f"{STORY}{text}"}]


def said(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def counted(answer: Any) -> list[int]:
    """Without what was cached: that depends on what came before."""
    return [answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens]


def test_answer(provider, check_same):
    answer = litellm.completion(**provider, messages=asked("Who lived there?"), max_tokens=48)

    assert said(answer)
    check_same([said(answer), answer.choices[0].finish_reason, counted(answer)])


def test_stream_is_the_whole_answer_in_pieces(provider, check_same):
    messages = asked("What colour was the door?")
    whole = litellm.completion(**provider, messages=messages, max_tokens=48)
    pieces = list(
        litellm.completion(
            **provider, messages=messages, max_tokens=48, stream=True, stream_options={"include_usage": True}
        )
    )

    joined = litellm.stream_chunk_builder(pieces, messages=messages)
    assert len(pieces) > 2
    assert said(joined) == said(whole)
    assert counted(joined) == counted(whole)
    assert joined.choices[0].finish_reason == whole.choices[0].finish_reason
    check_same([said(joined), counted(joined)])


def test_requests_at_once(provider, check_same):
    async def all_of_them() -> list[Any]:
        return await asyncio.gather(
            *(litellm.acompletion(**provider, messages=asked(f"Number {i}?"), max_tokens=16) for i in range(12))
        )

    check_same([said(answer) for answer in asyncio.run(all_of_them())])


def test_conversation_of_eight_turns(provider, check_same):
    messages = asked("Begin.")
    for turn in range(8):
        answer = litellm.completion(**provider, messages=messages, max_tokens=24)
        messages = [
            *messages,
            {"role": "assistant", "content": said(answer)},
            {"role": "user", "content": f"And then, the {turn}th time?"},
        ]
    check_same([message["content"] for message in messages])


def test_forced_tool_call(provider, check_same):
    messages = asked("What is the weather?")
    choice = {"type": "function", "function": {"name": "get_weather"}}
    answer = litellm.completion(**provider, messages=messages, tools=[WEATHER], tool_choice=choice, max_tokens=96)

    calls = answer.choices[0].message.tool_calls or []
    check_same([[[call.function.name, json.loads(call.function.arguments)] for call in calls], said(answer)])


def test_result_of_a_tool(provider, check_same):
    arguments = json.dumps({"celsius": True, "city": "Rome"})
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    messages = [
        *asked("What is the weather in Rome?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"},
    ]
    answer = litellm.completion(**provider, messages=messages, tools=[WEATHER], max_tokens=24)

    check_same(said(answer))


def test_streamed_tool_call(openai_provider, check_same):
    messages = asked("What is the weather there?")
    choice = {"type": "function", "function": {"name": "get_weather"}}
    pieces = list(
        litellm.completion(
            **openai_provider, messages=messages, tools=[WEATHER], tool_choice=choice, max_tokens=96, stream=True
        )
    )

    (call,) = litellm.stream_chunk_builder(pieces, messages=messages).choices[0].message.tool_calls
    check_same([call.function.name, json.loads(call.function.arguments)])


def test_json_schema(openai_provider, check_same):
    schema = {"name": "weather", "schema": WEATHER["function"]["parameters"], "strict": True}
    answer = litellm.completion(
        **openai_provider,
        messages=asked("The weather as JSON."),
        response_format={"type": "json_schema", "json_schema": schema},
        max_tokens=96,
    )

    check_same(json.loads(said(answer)))


def test_logprobs_and_stop(openai_provider, check_same):
    answer = litellm.completion(
        **openai_provider, messages=asked("Which ones?"), logprobs=True, top_logprobs=2, stop=["e"], max_tokens=12
    )

    (choice,) = answer.choices
    check_same([[token.token for token in choice.logprobs.content], choice.finish_reason])


def test_text_completion(check_same):
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=f"{URL}/v1", prompt=STORY, max_tokens=32, **COMMON
    )

    check_same([answer.choices[0].text, answer.choices[0].finish_reason])


def test_unknown_model_is_not_found(provider):
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**provider, "model": f"{provider['model']}-missing"}, messages=asked("?"), max_tokens=4)


def test_too_long_a_prompt_is_the_context_window_error(openai_provider):
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(
            **openai_provider, messages=[{"role": "user", "content": "house " * CONTEXT_TOKENS}], max_tokens=4
        )


def test_wrong_parameter_is_a_bad_request(provider):
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**{**provider, "temperature": -5}, messages=asked("?"), max_tokens=4)


def test_responses(check_same):
    answer = litellm.responses(**responses_provider(), input=f"{STORY}Who came?", max_output_tokens=32)

    check_same([text_of(answer), answer.usage.input_tokens, answer.usage.output_tokens])


def test_responses_stream_in_order(check_same):
    stream = litellm.responses(**responses_provider(), input=f"{STORY}Who left?", max_output_tokens=32, stream=True)
    events = list(stream)

    kinds = [str(getattr(event.type, "value", event.type)) for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] in {"response.completed", "response.incomplete"}
    delta = "response.output_text.delta"
    deltas = [event.delta for event, kind in zip(events, kinds, strict=True) if kind == delta]
    assert "".join(deltas) == text_of(events[-1].response)
    once = [kind for i, kind in enumerate(kinds) if kind != delta or kinds[i - 1] != delta]
    check_same(["".join(deltas), once])


def test_responses_go_on_by_their_id(check_same):
    first = litellm.responses(**responses_provider(), input=f"{STORY}Begin.", max_output_tokens=24)
    kept = litellm.get_responses(response_id=first.id, **without_model(responses_provider()))
    second = litellm.responses(
        **responses_provider(), input="Go on.", previous_response_id=first.id, max_output_tokens=24
    )

    assert text_of(kept) == text_of(first)
    check_same([text_of(first), text_of(second), second.usage.input_tokens])


def test_messages_as_anthropic_clients_send_them(check_same):
    async def answer() -> Any:
        return await litellm.anthropic_messages(
            model=f"anthropic/{MODEL}",
            api_base=URL,
            api_key="unused",
            system="Answer briefly.",
            messages=[{"role": "user", "content": f"{STORY}Why?"}],
            temperature=0,
            max_tokens=32,
        )

    found = asyncio.run(answer())
    check_same([found["content"][0]["text"], found["stop_reason"], found["usage"]["output_tokens"]])


def responses_provider() -> dict[str, Any]:
    return {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", **COMMON}


def without_model(provider: dict[str, Any]) -> dict[str, Any]:
    return {"custom_llm_provider": "openai", **{name: provider[name] for name in ("api_base", "api_key", "timeout")}}


def text_of(response: Any) -> str:
    return "".join(part.text for item in response.output if item.type == "message" for part in item.content)


@pytest.fixture(scope="session")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of LiteLLM's proxy, which has two models: the server as vLLM, and as Anthropic's API."""
    folder = tmp_path_factory.mktemp("proxy")
    models = [
        {"model_name": name, "litellm_params": {**DIRECT[provider], "api_key": "unused"}}
        for name, provider in (("through", "hosted_vllm"), ("through-messages", "anthropic"))
    ]
    settings = {"num_retries": 0, "request_timeout": REQUEST_S_MAX}
    (folder / "config.yaml").write_text(json.dumps({"model_list": models, "litellm_settings": settings}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    key = secrets.token_hex(32)
    command = [Path(sys.executable).with_name("litellm"), "--config", folder / "config.yaml"]
    with (ANSWERS.parent / "proxy.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1", "--telemetry", "False"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, "LITELLM_MASTER_KEY": f"sk-{key}"},
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_alive(f"{url}/health/liveliness", process)
            headers = {"authorization": f"Bearer sk-{key}", "anthropic-version": "2023-06-01"}
            with httpx.Client(base_url=url, headers=headers, timeout=REQUEST_S_MAX, trust_env=False) as client:
                yield client
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_alive(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PROXY_START_S_MAX
    while time.monotonic() < deadline:
        assert process.poll() is None, "the proxy ended: see proxy.log"
        try:
            if httpx.get(url, trust_env=False).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(1)
    raise AssertionError("the proxy was not alive in time: see proxy.log")


def data_of(stream: str) -> list[dict[str, Any]]:
    lines = (line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("model", ["through", "through-messages"])
def test_proxy_passes_chat_on(proxy, model, check_same):
    body = {"model": model, "messages": asked("Through a proxy?"), "max_tokens": 24, "temperature": 0}
    whole = proxy.post("/v1/chat/completions", json=body)
    streamed = proxy.post("/v1/chat/completions", json={**body, "stream": True})

    assert whole.is_success, whole.text
    assert streamed.is_success, streamed.text
    text = whole.json()["choices"][0]["message"]["content"]
    pieces = [piece["choices"][0]["delta"].get("content") or "" for piece in data_of(streamed.text) if piece["choices"]]
    assert "".join(pieces) == text
    check_same(text)


@pytest.mark.parametrize("model", ["through", "through-messages"])
def test_proxy_passes_messages_on(proxy, model, check_same):
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"{STORY}Through?"}],
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = proxy.post("/v1/messages", json=body)
    streamed = proxy.post("/v1/messages", json={**body, "stream": True})

    assert whole.is_success, whole.text
    assert streamed.is_success, streamed.text
    text = whole.json()["content"][0]["text"]
    pieces = [piece["delta"].get("text", "") for piece in data_of(streamed.text) if "delta" in piece]
    assert "".join(pieces) == text
    check_same(text)


@pytest.mark.parametrize("model", ["through", "through-messages"])
def test_proxy_passes_responses_on(proxy, model, check_same):
    body = {"model": model, "input": f"{STORY}Through it?", "max_output_tokens": 24, "temperature": 0}
    answer = proxy.post("/v1/responses", json=body)

    assert answer.is_success, answer.text
    output = [item for item in answer.json()["output"] if item["type"] == "message"]
    check_same([part["text"] for item in output for part in item["content"]])


def test_proxy_passes_errors_on(proxy):
    body = {"model": "through", "messages": asked("?"), "temperature": -5, "max_tokens": 4}

    assert proxy.post("/v1/chat/completions", json=body).status_code == 400
