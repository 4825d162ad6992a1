"""Two real engines and one more: the engine that decodes is killed mid-stream, and no client can tell."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.nats_server import NatsServer
from tests.support.system import System, until

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

MODEL = "baton-tiny"
ENGINES_START_S_MAX = 400.0
TOKENS = 160
SOME = 10
"""Events that every client has had when the engine is killed."""
WORDS = ("Tell me more. ", "Läufer, 走れ! 🏃 ", "def run(baton):\n    return ", "1, 2, 3, ")
DECODERS = ("decode-1", "decode-2")


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One prefill and two decode engines."""
    folder = tmp_path_factory.mktemp("vllm-resume")
    with (
        NatsServer(folder) as nats,
        System(folder / "state", "--prefill", "1", "--decode", "2", nats_url=nats.url) as system,
    ):
        system.wait_ready(ENGINES_START_S_MAX).until_exact(3)
        yield system


class Client:
    """One stream, and what it has told so far."""

    def __init__(self, number: int) -> None:
        words = WORDS[number % len(WORDS)] * (8 + 12 * number)
        common = {"model": MODEL, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
        common |= {"stream_options": {"include_usage": True}}
        chat = {"messages": [{"role": "user", "content": words}]}
        self.path = "/v1/chat/completions" if number % 2 else "/v1/completions"
        self.body: dict[str, Any] = {**common, **(chat if number % 2 else {"prompt": words})}
        self.worker = ""
        self.events: list[dict[str, Any]] = []
        self.ends = 0

    def run(self, system: System) -> Client:
        headers = {"x-baton-mode": "disaggregated"}
        with system.http.stream("POST", self.path, json=self.body, headers=headers) as response:
            self.worker = response.headers["x-baton-decode-worker"]
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    self.ends += 1
                elif line:
                    self.events.append(json.loads(line.removeprefix("data: ")))
        return self

    def said(self) -> tuple[Any, ...]:
        """All that must not depend on what happened to the engines."""
        assert not [event for event in self.events if "error" in event], self.events[-1]
        choices = [choice for event in self.events for choice in event["choices"]]
        texts = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
        usage = self.events[-1]["usage"]
        return (
            "".join(texts),
            [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
            [choice["delta"]["role"] for choice in choices if choice.get("delta", {}).get("role")],
            (usage["prompt_tokens"], usage["completion_tokens"]),
            len({event["id"] for event in self.events}),
            self.ends,
        )


def test_the_greedy_text_of_streams_whose_engine_is_killed_equals_the_undisturbed_one(system: System):
    numbers = range(len(WORDS))
    undisturbed = [Client(number).run(system).said() for number in numbers]

    runners = [Client(number) for number in numbers]
    with ThreadPoolExecutor(len(runners)) as threads:
        running = [threads.submit(runner.run, system) for runner in runners]
        until(lambda: all(len(runner.events) > SOME for runner in runners), "every client has had some", 60.0)
        victim = max(DECODERS, key=lambda name: sum(runner.worker == name for runner in runners))
        had = [len(runner.events) for runner in runners]
        os.kill(system.worker_pid(victim), signal.SIGKILL)
        said = [one.result().said() for one in running]

    assert max(had) < TOKENS, "the engine was killed too late to prove anything"
    assert said == undisturbed
    resumes = system.metrics()
    assert (
        resumes.sum("baton_router_resumes_total") > 0
    )  # An engine may be done with a stream that its client still reads.
    print(f"\nresumed within {resumes.sum('baton_router_resume_seconds_sum'):.1f} s, all together; had {had} events")
