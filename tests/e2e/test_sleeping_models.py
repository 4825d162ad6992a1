"""Models that sleep, and are woken by a request. The nightly ``test_sleeping_turns.py`` has models that are awake in turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.conftest import START_S_MAX
from tests.support.second_model import second_model
from tests.support.system import System, baton, until

pytestmark = pytest.mark.nats

FIRST = "baton-tiny"
SOON_S_MAX = 60.0


@dataclass
class Models:
    system: System
    second: str

    def complete(self, model: str) -> httpx.Response:
        body = {"model": model, "prompt": "Are you awake?", "max_tokens": 4, "temperature": 0}
        return self.system.http.post("/v1/completions", json=body)

    def phases(self) -> dict[str, str]:
        return {name: worker["phase"] for name, worker in self.system.fleet().items()}

    def asleep(self) -> dict[str, bool]:
        return {one["id"]: one["asleep"] for one in self.system.http.get("/v1/models").json()["data"]}

    def order(self, verb: str, model: str) -> tuple[int, str]:
        code, out, err = baton(verb, model, "--state-dir", str(self.system.folder))
        return code, " ".join((out + err).split())


@contextmanager
def models_of(folder: Path, *options: str, env: dict[str, str] | None = None) -> Iterator[Models]:
    second = second_model(folder)
    models = ("--model", FIRST, "--prefill", "1", "--decode", "1", "--model", second, "--both", "1", *options)
    with System(folder, "--engine", "simulated", *models, env=env) as system:
        yield Models(system.wait_ready(START_S_MAX), second)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    with models_of(tmp_path_factory.mktemp("sleeping")) as models:
        yield models


def test_a_model_is_put_to_sleep_and_a_request_wakes_it(models: Models):
    before = models.complete(FIRST)
    pid = models.system.worker_pid("prefill-1")

    code, said = models.order("sleep", FIRST)

    assert code == 0
    assert "2 engines will end" in said
    until(lambda: models.phases() == {"prefill-1": "asleep", "decode-1": "asleep", "both-1": "ready"}, "it sleeps")
    until(lambda: models.asleep() == {FIRST: True, models.second: False}, "the router knows")
    assert models.system.worker_pid("prefill-1") == pid
    assert models.complete(models.second).status_code == 200

    after = models.complete(FIRST)

    assert after.status_code == 200
    assert after.json()["choices"] == before.json()["choices"]
    until(lambda: set(models.phases().values()) == {"ready"}, "all its workers are awake")
    assert models.asleep() == {FIRST: False, models.second: False}


def test_what_sleeps_has_no_engines_memory(models: Models):
    def memory() -> int:
        return psutil.Process(models.system.worker_pid("both-1")).memory_info().rss

    awake = memory()
    models.order("sleep", models.second)
    until(lambda: models.phases()["both-1"] == "asleep", "it sleeps")

    assert memory() < awake
    code, said = models.order("wake", models.second)
    assert code == 0
    assert "1 engine will start" in said
    until(lambda: models.phases()["both-1"] == "ready", "it is awake")


def test_orders_for_unknown_models_are_refused_with_those_there_are(models: Models):
    code, said = models.order("sleep", "nothing")

    assert code == 1
    assert f"no worker serves nothing; models: {models.second}, {FIRST}" in said


def test_a_drained_worker_that_sleeps_leaves(models: Models):
    models.order("sleep", models.second)
    until(lambda: models.phases()["both-1"] == "asleep", "it sleeps")

    assert baton("drain", "both-1", "--state-dir", str(models.system.folder))[0] == 0
    until(lambda: not models.system.pids("services.worker", "both-1"), "it has left")


def test_an_unused_model_falls_asleep_by_itself(tmp_path: Path):
    second = second_model(tmp_path)
    models = ("--model", FIRST, "--both", "1", "--model", second, "--both", "1", "--sleep-after", "3")
    with System(tmp_path, "--engine", "simulated", *models) as system:
        system.wait_ready(START_S_MAX)

        until(lambda: system.fleet()["both-2"]["phase"] == "asleep", "the second model sleeps", SOON_S_MAX)

        assert system.fleet()["both-1"]["phase"] == "ready"
        told = next(
            process.environ()["ORCHESTRATOR_SLEEP_AFTER_S"]
            for process in system.processes()
            if "services.orchestrator" in process.cmdline()
        )
        assert json.loads(told) == {second: 3.0}
        assert system.http.get("/ready").status_code == 200
