"""Workers and routers die, fall silent or leave: requests without a token are served elsewhere, and none hangs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import START_S_MAX
from tests.support.system import System, until

pytestmark = pytest.mark.nats

MODEL = "baton-tiny"
SLOW = {"WORKER_SIMULATED": "decode_base_s=0.02,prefill_tokens_per_s=4000"}
CLIENTS = 12


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Two prefill and two decode workers that take their time."""
    folder = tmp_path_factory.mktemp("failures")
    with System(folder, "--engine", "simulated", "--prefill", "2", "--decode", "2", env=SLOW) as system:
        yield system.wait_ready(START_S_MAX)


@pytest.fixture(autouse=True)
def all_well(system: System) -> None:
    """Every test begins with four workers and nothing to do."""
    until(lambda: ready(system) == {"prefill-1", "prefill-2", "decode-1", "decode-2"}, "all workers are ready")
    system.until_exact(4)
    system.until_idle()


def ready(system: System) -> set[str]:
    return {name for name, worker in system.fleet().items() if worker["phase"] == "ready"}


def ask(system: System, prompt: Any = "Who runs?", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 60, "ignore_eos": True, **fields}
    return system.http.post("/v1/completions", json=body)


@contextmanager
def running(system: System, **fields: Any) -> Iterator[list[Future[httpx.Response]]]:
    """Requests of many clients, which have reached the router."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = [clients.submit(ask, system, f"Runner {number}", **fields) for number in range(CLIENTS)]

        def came() -> int:
            done = sum(answer.done() for answer in answers)
            return done + int(system.metrics().sum("baton_router_requests_in_flight"))

        until(lambda: came() >= CLIENTS, "the requests have come")
        yield answers


@contextmanager
def decoding(system: System, worker_id: str, **baton: Any) -> Iterator[Iterator[str]]:
    """A stream that ``worker_id`` decodes, after its first token: the remaining events."""
    body = {"model": MODEL, "prompt": "Run!", "max_tokens": 250, "ignore_eos": True, "stream": True}
    body["baton"] = {"decode_worker": worker_id, **baton}
    with system.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["x-baton-decode-worker"] == worker_id
        events = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        assert "choices" in json.loads(next(events))
        yield events


def legs(system: System, worker_id: str) -> float:
    return system.fleet_metrics().sum("baton_worker_legs", worker_id=worker_id)


def busy(system: System, role: str) -> str:
    """A worker of the two of this role that has legs: the router may place all requests on one of them."""

    def found() -> str:
        return next((name for name in (f"{role}-1", f"{role}-2") if legs(system, name) > 0), "")

    return until(found, f"a {role} worker has legs")


def serves(system: System, worker_id: str) -> bool:
    """Whether it answers what is sent to it: by themselves, routers may find another one better."""
    answer = ask(system, max_tokens=2, baton={"decode_worker": worker_id})
    return answer.status_code == 200 and answer.headers["x-baton-decode-worker"] == worker_id


def kill(system: System, worker_id: str) -> int:
    pid = system.worker_pid(worker_id)
    os.kill(pid, signal.SIGKILL)
    return pid


def test_requests_of_a_killed_decode_worker_are_served_by_the_other(system: System):
    with running(system, max_tokens=250) as answers:
        kill(system, busy(system, "decode"))

        statuses = [answer.result().status_code for answer in answers]

    assert statuses == [200] * CLIENTS
    assert system.metrics().sum("baton_router_retries_total", reason="worker_lost") > 0


def test_requests_of_a_killed_prefill_worker_are_served_by_the_other(system: System):
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = [clients.submit(ask, system, [10 + n] * 4000, max_tokens=4) for n in range(CLIENTS)]
        kill(system, busy(system, "prefill"))

        statuses = [answer.result().status_code for answer in answers]

    assert statuses == [200] * CLIENTS


def test_a_stream_that_cannot_migrate_ends_with_an_error_event(system: System):
    pid = system.worker_pid("decode-1")
    with decoding(system, "decode-1", resumes_max=0) as events:
        os.kill(pid, signal.SIGKILL)
        *_, last = events

    assert json.loads(last)["error"]["code"] in {"worker_lost", "engine_dead"}


def test_a_killed_worker_is_started_again_and_serves(system: System):
    first = kill(system, "decode-2")

    until(lambda: system.worker_pid("decode-2") != first and "decode-2" in ready(system), "decode-2 is back")
    until(lambda: serves(system, "decode-2"), "it serves")


def test_a_silent_worker_gets_nothing_until_it_speaks_again(system: System):
    pid = system.worker_pid("decode-1")
    os.kill(pid, signal.SIGSTOP)
    try:
        with running(system, max_tokens=20) as answers:
            statuses = [answer.result().status_code for answer in answers]
        until(lambda: "decode-1" not in ready(system), "the orchestrator calls it lost")
        served_by = {ask(system, max_tokens=2).headers["x-baton-decode-worker"] for _ in range(6)}
    finally:
        os.kill(pid, signal.SIGCONT)

    assert statuses == [200] * CLIENTS
    assert served_by == {"decode-2"}
    until(lambda: "decode-1" in ready(system), "decode-1 is back")
    assert system.worker_pid("decode-1") == pid
    until(lambda: serves(system, "decode-1"), "it serves")


def test_a_worker_finishes_its_legs_on_sigterm(system: System):
    pid = system.worker_pid("decode-1")
    with running(system, max_tokens=100) as answers, decoding(system, "decode-1", resumes_max=0) as events:
        os.kill(pid, signal.SIGTERM)

        finished = [answer.result() for answer in answers]
        *_, last, done = events

    assert [answer.status_code for answer in finished] == [200] * CLIENTS
    assert {answer.json()["usage"]["completion_tokens"] for answer in finished} == {100}
    assert (json.loads(last)["choices"][0]["finish_reason"], done) == ("length", "[DONE]")


def test_a_router_finishes_its_requests_on_sigterm_and_another_takes_over(system: System):
    with running(system, max_tokens=100) as answers:
        (router,) = system.pids("services.router")

        os.kill(router, signal.SIGTERM)

        statuses = [answer.result().status_code for answer in answers]

    assert statuses == [200] * CLIENTS
    until(lambda: answers_again(system), "the new router answers")


def test_a_killed_router_is_started_again_and_its_legs_end(system: System):
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = [clients.submit(ask, system, f"Runner {n}", max_tokens=100_000) for n in range(CLIENTS)]
        until(lambda: legs(system, "decode-1") + legs(system, "decode-2") == CLIENTS, "the requests run")

        os.kill(system.pids("services.router")[0], signal.SIGKILL)

        for answer in answers:
            with pytest.raises(httpx.TransportError):
                answer.result()
    until(lambda: answers_again(system), "the new router answers")
    system.until_idle()


def answers_again(system: System) -> bool:
    try:
        return ask(system, max_tokens=2).status_code == 200
    except httpx.TransportError:
        return False


def test_requests_are_served_while_orchestrator_and_collector_are_down(system: System):
    for module in ("services.orchestrator", "services.collector"):
        os.kill(system.pids(module)[0], signal.SIGKILL)

    assert [ask(system, max_tokens=2).status_code for _ in range(5)] == [200] * 5
    until(lambda: system.pids("services.orchestrator") and system.pids("services.collector"), "both are back")
    until(lambda: answers_metrics(system), "the collector answers")


def answers_metrics(system: System) -> bool:
    try:
        return system.fleet_metrics().sum("baton_fleet_workers", phase="ready") == 4
    except httpx.HTTPError:
        return False
