"""A worker attached to a plain ``vllm serve``, which Baton did not start: messages and responses pass, and its gauges are read."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.outside.targets import one_engine
from tests.support.system import System, until

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

START_S_MAX = 300.0
ANSWER_S_MAX = 120.0
THEIRS, OURS = "claude-theirs", "chat"
QUESTION = "Who takes the baton?"
GREEDY = {"temperature": 0.0}
BUSY = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with one_engine(tmp_path_factory.mktemp("vllm"), [THEIRS]) as target:
        yield target.url


@pytest.fixture(scope="module")
def system(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Its only worker is attached to the server."""
    folder = tmp_path_factory.mktemp("attached")
    with System(folder, "--model", OURS, "--attach", f"{server}={THEIRS}") as system:
        yield system.wait_ready(START_S_MAX)


def by_anthropic(url: str, model: str) -> tuple[str, str, Any]:
    """The same text whole and streamed, and its usage."""
    asked = {
        "model": model,
        "max_tokens": 24,
        "messages": [{"role": "user", "content": QUESTION}],
        "extra_body": GREEDY,
    }
    with anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0, timeout=ANSWER_S_MAX) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            final = stream.get_final_message()
    return whole.content[0].text, final.content[0].text, (whole.usage.input_tokens, whole.usage.output_tokens)


def by_openai(url: str, model: str) -> tuple[str, str, Any]:
    asked = {"model": model, "input": QUESTION, "max_output_tokens": 24, "extra_body": GREEDY}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=ANSWER_S_MAX) as client:
        whole = client.responses.create(**asked)
        events = list(client.responses.create(stream=True, **asked))
    final = events[-1].response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return whole.output_text, final.output_text, (whole.usage.input_tokens, whole.usage.output_tokens)


@pytest.mark.parametrize("ask", [by_anthropic, by_openai])
def test_messages_and_responses_are_the_servers_own(server: str, system: System, ask: Any):
    own = ask(server, THEIRS)

    passed_on = ask(system.endpoint, OURS)

    assert passed_on == own
    assert passed_on[0] == passed_on[1] != ""


def test_the_load_of_others_at_the_server_is_seen(server: str, system: System):
    body = {"model": THEIRS, "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}

    def running() -> float:
        return system.fleet_metrics().sum("baton_worker_requests_running", worker_id="attached-1")

    with ThreadPoolExecutor(BUSY) as threads, httpx.Client(trust_env=False, timeout=ANSWER_S_MAX) as http:
        streams = [http.stream("POST", f"{server}/v1/completions", json=body) for _ in range(BUSY)]
        opened = list(threads.map(lambda stream: stream.__enter__(), streams))
        try:
            until(lambda: running() == BUSY, "the worker has read the server's gauges", ANSWER_S_MAX)
        finally:
            for stream, _response in zip(streams, opened, strict=True):
                stream.__exit__(None, None, None)
    until(lambda: running() == 0, "the server is idle again", ANSWER_S_MAX)
