"""Streams whose worker or NATS is lost: every client gets the response of an undisturbed stream."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.e2e.conftest import START_S_MAX
from tests.support.nats_server import NatsServer
from tests.support.system import System, until

pytestmark = pytest.mark.nats

MODEL = "baton-tiny"
SLOW = {"WORKER_SIMULATED": "prefill_tokens_per_s=100000,decode_base_s=0.02", "WORKER_DRAIN_S_MAX": "0.5"}
CLIENTS = 8
TOKENS = 160
SOME = 10
"""Events that a client has had when something happens to its stream."""
DECODERS = ("decode-1", "decode-2")


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, nats: NatsServer) -> Iterator[System]:
    """One prefill and two decode workers that take their time, and do not wait long for streams when they leave."""
    arguments = ("--engine", "simulated", "--prefill", "1", "--decode", "2")
    folder = tmp_path_factory.mktemp("resume")
    (folder / "policy.toml").write_text("bus_wait_s_max = 20")
    env = {**SLOW, "ROUTER_FAILURE_POLICY": str(folder / "policy.toml")}
    with System(folder, *arguments, nats_url=nats.url, env=env) as system:
        yield system.wait_ready(START_S_MAX)


@pytest.fixture(autouse=True)
def all_well(system: System) -> None:
    until(lambda: {name for name, one in system.fleet().items() if one["phase"] == "ready"} >= {*DECODERS}, "all ready")
    system.until_exact(3)
    system.until_idle()


@dataclass
class Answer:
    """What a client makes of its events."""

    text: str = ""
    events: int = 0
    names: set[tuple[str, int]] = field(default_factory=set)
    """Of the answer, and when it began: every event says the same."""
    finish_reasons: list[str] = field(default_factory=list)
    usage: dict[str, int] | None = None
    roles: int = 0
    ends: int = 0
    errors: list[Any] = field(default_factory=list)
    worker: str = ""

    def take(self, data: str) -> None:
        if data == "[DONE]":
            self.ends += 1
            return
        event = json.loads(data)
        if "error" in event:
            self.errors.append(event["error"])
            return
        self.names.add((event["id"], event["created"]))
        self.events += 1
        if event.get("usage"):
            self.usage = {name: event["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
        for choice in event["choices"]:
            delta = choice.get("delta", {})
            self.roles += bool(delta.get("role"))
            self.text += choice.get("text") or delta.get("content") or ""
            self.finish_reasons += [choice["finish_reason"]] if choice["finish_reason"] else []

    def said(self) -> tuple[Any, ...]:
        """All that must not depend on what happened meanwhile, but the name of the request."""
        return (
            self.text,
            self.events,
            self.finish_reasons,
            self.usage,
            self.roles,
            self.ends,
            self.errors,
            len(self.names),
        )


def body_of(number: int) -> tuple[str, dict[str, Any]]:
    """Of one client: chats and completions by turns."""
    text = f"Läufer {number}: 走れ 🏃 " * (5 + 20 * number)
    common = {"model": MODEL, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    if number % 2:
        return "/v1/chat/completions", {**common, "messages": [{"role": "user", "content": text}]}
    return "/v1/completions", {**common, "prompt": text}


def stream(system: System, number: int, answer: Answer) -> Answer:
    path, body = body_of(number)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with system.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        answer.worker = response.headers["x-baton-decode-worker"]
        for line in response.iter_lines():
            if line.startswith("data: "):
                answer.take(line.removeprefix("data: "))
    return answer


@contextmanager
def streaming(system: System) -> Iterator[tuple[list[Answer], list[Future[Answer]]]]:
    """All clients, each of which has had some of its answer."""
    answers = [Answer() for _ in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as clients:
        futures = [clients.submit(stream, system, number, answer) for number, answer in enumerate(answers)]
        until(lambda: all(answer.events > SOME for answer in answers), "all clients have had some")
        yield answers, futures


@pytest.fixture(scope="module")
def undisturbed(system: System) -> list[tuple[Any, ...]]:
    """What every client gets on a good day."""
    with streaming(system) as (_answers, futures):
        return [future.result().said() for future in futures]


def resumes(system: System, reason: str) -> float:
    return system.metrics().sum("baton_router_resumes_total", reason=reason)


def test_streams_continue_exactly_after_a_nats_restart(system: System, nats: NatsServer, undisturbed: list[Any]):
    with streaming(system) as (_answers, futures):
        nats.kill()
        late = Answer()
        with ThreadPoolExecutor(1) as newcomer:
            asked = newcomer.submit(stream, system, 0, late)
            until(lambda: system.http.get("/ready").status_code == 503, "the router notices")
            nats.start()
            said = [future.result().said() for future in futures]
            said_late = asked.result().said()

    assert said == undisturbed
    assert said_late == undisturbed[0]
    assert resumes(system, "bus_down") > 0


def test_streams_of_a_frozen_worker_continue_and_its_late_frames_are_ignored(system: System, undisturbed: list[Any]):
    with streaming(system) as (answers, futures):
        frozen = max(DECODERS, key=lambda name: sum(answer.worker == name for answer in answers))
        pid = system.worker_pid(frozen)
        os.kill(pid, signal.SIGSTOP)
        try:
            until(futures[[answer.worker for answer in answers].index(frozen)].done, "its streams go on")
        finally:
            os.kill(pid, signal.SIGCONT)
        said = [future.result().said() for future in futures]

    assert said == undisturbed


def test_streams_of_a_killed_worker_continue_exactly_on_the_other(system: System, undisturbed: list[Any]):
    with streaming(system) as (answers, futures):
        victim = max(DECODERS, key=lambda name: sum(answer.worker == name for answer in answers))
        os.kill(system.worker_pid(victim), signal.SIGKILL)
        said = [future.result().said() for future in futures]

    assert said == undisturbed
    assert resumes(system, "worker_lost") + resumes(system, "engine_dead") > 0


def test_streams_of_a_draining_worker_past_its_deadline_continue_on_the_other(system: System, undisturbed: list[Any]):
    with streaming(system) as (answers, futures):
        leaver = max(DECODERS, key=lambda name: sum(answer.worker == name for answer in answers))
        os.kill(system.worker_pid(leaver), signal.SIGTERM)
        said = [future.result().said() for future in futures]

    assert said == undisturbed
    assert resumes(system, "worker_draining") > 0
