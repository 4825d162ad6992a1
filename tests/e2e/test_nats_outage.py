"""NATS dies under load and restarts without its data: the system recovers by itself."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.conftest import FAST, START_S_MAX
from tests.support.nats_server import NatsServer
from tests.support.prompts import VOCABULARY
from tests.support.system import System, until

pytestmark = pytest.mark.nats

MODEL = "baton-tiny"
BLOCK = 32
WORKERS = {"prefill-1", "prefill-2", "decode-1", "decode-2"}
BUS_WAIT_S = 4.0
SLACK_S = 2.0
"""For a busy machine."""
IMPATIENT = f"bus_wait_s_max = {BUS_WAIT_S}"
CLIENTS = 8
EXPECTED = {200, 502, 503}
"""Served, broken off, or told to try again: nothing else may happen to a request while NATS is away."""


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, nats: NatsServer) -> Iterator[System]:
    """A system on a NATS that is not its own."""
    arguments = ("--engine", "simulated", "--prefill", "2", "--decode", "2")
    folder = tmp_path_factory.mktemp("outage")
    (folder / "policy.toml").write_text(IMPATIENT)
    env = {**FAST, "ROUTER_FAILURE_POLICY": str(folder / "policy.toml")}
    with System(folder, *arguments, nats_url=nats.url, env=env) as system:
        yield system.wait_ready(START_S_MAX)


def ask(system: System, number: int, **fields) -> httpx.Response:
    prompt = [10 + number * 7 % 2000] * 400
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 20, "ignore_eos": True, **fields}
    return system.http.post("/v1/completions", json=body, headers={"x-baton-mode": "disaggregated"})


def well_again(system: System) -> bool:
    """The router is ready, every index exact, and the registry complete."""
    return (
        system.http.get("/ready").status_code == 200
        and system.exact_indexes() == len(WORKERS)
        and {name for name, worker in system.fleet().items() if worker["phase"] == "ready"} == WORKERS
    )


@pytest.mark.parametrize("forgets", [True, False], ids=["empty", "remembers"])
def test_nats_restarted_under_load_leaves_the_system_as_it_was(system: System, nats: NatsServer, forgets: bool):
    until(lambda: well_again(system), "all is well before")
    alive = {process.pid for process in system.processes()}
    before = ask(system, 1).json()["choices"][0]["text"]
    stop = []

    def client(number: int) -> set[int]:
        seen = set()
        while not stop:
            seen.add(ask(system, number * 1000 + len(seen)).status_code)
        return seen

    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = [clients.submit(client, number) for number in range(CLIENTS)]
        until(lambda: system.metrics().sum("baton_router_requests_total", status="200") > 2 * CLIENTS, "load is on")
        nats.kill()
        if forgets:
            nats.lose_storage()
        until(lambda: system.http.get("/ready").status_code == 503, "the router notices")
        refused = ask(system, 2)
        nats.start()
        until(lambda: system.http.get("/ready").status_code == 200, "the router is ready again")
        stop.append(True)
        statuses = set().union(*(answer.result() for answer in answers))

    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert statuses <= EXPECTED
    until(lambda: well_again(system), "all is well again")
    system.until_idle()
    assert ask(system, 1).json()["choices"][0]["text"] == before
    assert [ask(system, number).status_code for number in range(20)] == [200] * 20
    assert {process.pid for process in system.processes()} == alive


def test_while_nats_is_frozen_requests_are_refused_in_time_with_one_cause(system: System, nats: NatsServer):
    until(lambda: well_again(system), "all is well before")
    stop: list[bool] = []

    def client(number: int) -> list[tuple[int, str, float]]:
        """Status, code and seconds of each request. The first ones are in flight when the freeze begins."""
        seen = []
        while not stop:
            began_at = time.monotonic()
            response = ask(system, number * 1000 + len(seen))
            code = "" if response.status_code == 200 else response.json()["error"]["code"]
            seen.append((response.status_code, code, time.monotonic() - began_at))
        return seen

    with ThreadPoolExecutor(CLIENTS) as clients:
        asked = [clients.submit(client, number) for number in range(CLIENTS)]
        served = system.metrics().sum("baton_router_requests_total", status="200")
        until(
            lambda: system.metrics().sum("baton_router_requests_total", status="200") > served + CLIENTS, "load is on"
        )
        refused = system.metrics().sum("baton_router_requests_total", status="503")
        nats.pause()
        frozen_at = time.monotonic()
        until(
            lambda: system.metrics().sum("baton_router_requests_total", status="503") >= refused + 2 * CLIENTS,
            "each client was refused, in flight and new",
        )
        nats.resume()
        thawed_s = time.monotonic() - frozen_at
        until(lambda: system.http.get("/ready").status_code == 200, "the router is ready again")
        stop.append(True)
        ends = [end for answer in asked for end in answer.result()]

    assert {(status, code) for status, code, _ in ends} == {(200, ""), (503, "bus_down")}
    assert max(took_s for _, _, took_s in ends) < BUS_WAIT_S + SLACK_S
    assert thawed_s < 2 * (BUS_WAIT_S + SLACK_S)
    until(lambda: well_again(system), "all is well again")
    system.until_idle()


def test_a_stream_that_cannot_resume_ends_with_an_error_event_when_nats_dies(system: System, nats: NatsServer):
    body = {"model": MODEL, "prompt": "Run!", "max_tokens": 50_000, "ignore_eos": True, "stream": True}
    body["baton"] = {"resumes_max": 0}
    with system.http.stream("POST", "/v1/completions", json=body) as answer:
        events = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        next(events)
        nats.kill()
        *_, last = events
    nats.start()

    assert json.loads(last)["error"]["code"] == "bus_down"
    until(lambda: well_again(system), "all is well again")
    system.until_idle()


def test_a_prefix_cached_before_the_outage_is_found_after_it(system: System, nats: NatsServer):
    until(lambda: well_again(system), "all is well before")
    prompt = random.Random(3).choices(VOCABULARY, k=160 * BLOCK)
    home = ask(system, 0, prompt=prompt).headers["x-baton-prefill-worker"]
    system.until_idle()

    nats.kill()
    nats.lose_storage()
    until(lambda: system.http.get("/ready").status_code == 503, "the router notices")
    nats.start()
    until(lambda: well_again(system), "all is well again")

    again = ask(system, 0, prompt=prompt, kv_fetch_min_tokens=1_000_000)
    assert again.headers["x-baton-prefill-worker"] == home
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 159 * BLOCK
