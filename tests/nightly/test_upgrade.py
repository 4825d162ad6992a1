"""A rolling upgrade under traffic: a new revision starts and gets its share, the old one leaves, and no request
fails.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import FAST
from tests.support.nats_server import NatsServer, free_port
from tests.support.processes import ServiceProcess, service_process
from tests.support.system import until

pytestmark = pytest.mark.nats

MODEL = "baton-tiny"
START_S_MAX = 120.0
EQUAL_SHARES = {"old": 50, "new": 50}
CLIENTS = 2
PAUSE_S = 0.03
"""A client's, so that the machine has time for processes that start."""
CONVERSATIONS = 10
TOKENS = 12
SYSTEM_PROMPT = {"role": "system", "content": "You are a patient teller of long stories about the sea. " * 20}
ENOUGH = 2 * CONVERSATIONS
"""Answers, in each phase: every conversation has been there, with both of its turns."""


def turns(conversation: int, turn: int) -> list[dict[str, str]]:
    said = [{"role": "user", "content": f"Tell me story number {conversation}."}]
    if turn:
        said += [{"role": "assistant", "content": "Once upon a time. " * 30}, {"role": "user", "content": "Go on."}]
    return [SYSTEM_PROMPT, *said]


@dataclass(frozen=True)
class Told:
    """One answer as a client saw it."""

    question: tuple[int, int]
    begun_at: float
    ended_at: float
    status: int
    text: str
    events: int
    workers: tuple[str, ...]

    @property
    def revisions(self) -> set[str]:
        return {worker.partition("-")[0] for worker in self.workers}


@dataclass
class Clients:
    """They ask the same questions again and again until they are told to stop."""

    url: str
    told: list[Told] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def asking(self) -> Iterator[None]:
        questions = itertools.cycle(itertools.product(range(CONVERSATIONS), (0, 1)))
        with ThreadPoolExecutor(CLIENTS) as threads:
            asking = [threads.submit(self._ask_on, questions) for _ in range(CLIENTS)]
            try:
                yield
            finally:
                self.stopping.set()
        for one in asking:
            one.result()

    def until_more(self, count: int = ENOUGH) -> None:
        wanted = len(self.told) + count
        until(lambda: len(self.told) >= wanted, f"{count} more answers", START_S_MAX)

    def between(self, begin_at: float, end_at: float) -> list[Told]:
        return [one for one in self.told if begin_at <= one.begun_at and one.ended_at <= end_at]

    def _ask_on(self, questions: Iterator[tuple[int, int]]) -> None:
        with httpx.Client(base_url=self.url, timeout=60.0, trust_env=False) as http:
            while not self.stopping.wait(PAUSE_S):
                self.told.append(ask(http, next(questions)))


def ask(http: httpx.Client, question: tuple[int, int], **fields: object) -> Told:
    body = {
        "model": MODEL,
        "messages": turns(*question),
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        **fields,
    }
    begun_at = time.monotonic()
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    workers = tuple(
        name for leg in ("prefill", "decode") if (name := answer.headers.get(f"x-baton-{leg}-worker")) is not None
    )
    text, events = "", 0
    for line in lines[:-1]:
        for choice in json.loads(line).get("choices", []):
            text += choice["delta"].get("content") or ""
            events += bool(choice.get("finish_reason"))
    return Told(question, begun_at, time.monotonic(), answer.status_code, text, events, workers)


class Upgrade:
    """A router and its workers on one NATS: nothing else is needed to serve."""

    def __init__(self, processes: ExitStack, folder: Path, nats: NatsServer, **router: str) -> None:
        self._processes, self._folder = processes, folder
        self._common = {"BATON_NATS_URL": nats.url, **FAST}
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._http = processes.enter_context(httpx.Client(base_url=self.url, timeout=60.0, trust_env=False))
        self.start("router", ROUTER_PORT=str(self.port), **router)

    def start(self, name: str, **settings: str) -> ServiceProcess:
        process = service_process(name, self._folder, **self._common, **settings)
        return self._processes.enter_context(process)

    def start_pair(self, revision: str) -> list[ServiceProcess]:
        return [
            self.start(
                "worker",
                WORKER_ENGINE="simulated",
                WORKER_WORKER_ID=f"{revision}-{role}",
                WORKER_ROLE=role,
                WORKER_REVISION=revision,
            )
            for role in ("prefill", "decode")
        ]

    def revisions(self) -> dict[str, Any]:
        """As the router's list of models tells: who serves, with which share."""
        try:
            answer = self._http.get("/v1/models")
        except httpx.TransportError:
            return {}
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:  # it starts
            return {}
        (model,) = answer.raise_for_status().json()["data"] or [{"revisions": []}]
        return {one["revision"]: (one["share"], one["workers"]) for one in model["revisions"]}

    def until_serving(self, *revisions: str) -> None:
        whole = {revision: (0.5, {"prefill": 1, "decode": 1}) for revision in revisions}
        until(lambda: self.revisions() == whole, f"{revisions} serve", START_S_MAX)


@pytest.fixture
def upgrade(tmp_path: Path, nats_server: NatsServer) -> Iterator[Upgrade]:
    with ExitStack() as processes:
        yield Upgrade(processes, tmp_path, nats_server, ROUTER_REVISION_SHARES=json.dumps({MODEL: EQUAL_SHARES}))


def test_a_rolling_upgrade_under_traffic_loses_nothing(upgrade: Upgrade):
    old = upgrade.start_pair("old")
    upgrade.until_serving("old")
    clients = Clients(upgrade.url)
    with clients.asking():
        clients.until_more()
        new_began_at = time.monotonic()
        upgrade.start_pair("new")
        upgrade.until_serving("old", "new")
        both_at = time.monotonic()
        clients.until_more()
        drained_at = time.monotonic()
        assert [worker.stop() for worker in old] == [0, 0]
        upgrade.until_serving("new")
        alone_at = time.monotonic()
        clients.until_more()
        end_at = time.monotonic()

    nothing_is_lost(clients.told)
    assert served_by(clients.between(0.0, new_began_at)) == {"old"}
    each_conversation_stays(clients.between(both_at, drained_at))
    assert served_by(clients.between(alone_at, end_at)) == {"new"}


def nothing_is_lost(told: list[Told]) -> None:
    """Every answer is whole and right, whoever gave it; and KV never went from one revision to the other."""
    texts = defaultdict(set)
    for one in told:
        assert (one.status, one.events) == (200, 1), one
        assert len(one.revisions) == 1, one
        texts[one.question].add(one.text)
    assert all(len(different) == 1 and "" not in different for different in texts.values())
    assert len(texts) == 2 * CONVERSATIONS
    assert any(len(one.workers) == 2 for one in told)


def served_by(told: list[Told]) -> set[str]:
    assert told
    return set.union(*(one.revisions for one in told))


def each_conversation_stays(told: list[Told]) -> None:
    """All its turns with one revision; both have some."""
    of_each = defaultdict(set)
    for one in told:
        of_each[one.question[0]] |= one.revisions
    assert all(len(revisions) == 1 for revisions in of_each.values()), of_each
    assert set.union(*of_each.values()) == {"old", "new"}
