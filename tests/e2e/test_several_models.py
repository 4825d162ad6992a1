"""`baton up --model A ... --model B ...`: one system, whose models have workers, plans and metrics of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.e2e.conftest import START_S_MAX
from tests.support.second_model import second_model
from tests.support.system import Launched, System, baton, until

pytestmark = pytest.mark.nats

FIRST, ALIAS = "baton-tiny", "chat"


@dataclass
class TwoModels:
    system: System
    second: str

    def complete(self, model: str, **fields: object) -> tuple[int, dict[str, str]]:
        """Status, and the workers that served it."""
        body = {"model": model, "prompt": "Who serves this?", "max_tokens": 2, **fields}
        answer = self.system.http.post("/v1/completions", json=body)
        print(answer.status_code, answer.text)
        return answer.status_code, {role: answer.headers.get(f"x-baton-{role}-worker", "") for role in WORKERS}


WORKERS = ("prefill", "decode")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoModels]:
    folder = tmp_path_factory.mktemp("models")
    second = second_model(folder)
    models = ("--model", FIRST, "--prefill", "1", "--decode", "1", "--model", second, "--both", "1", "--alias", ALIAS)
    with System(folder, "--engine", "simulated", *models) as system:
        system.wait_ready(START_S_MAX).until_exact(3)
        yield TwoModels(system, second)


def test_both_models_are_announced_and_listed(two: TwoModels):
    listed = [each["id"] for each in two.system.http.get("/v1/models").json()["data"]]

    assert sorted(listed) == sorted([FIRST, two.second, ALIAS])
    assert all(name in two.system.said().replace("\n", "") for name in listed)


def test_each_request_goes_to_the_workers_of_its_model(two: TwoModels):
    for number in range(3):
        long = f"Who serves request {number}? " * 20  # It has KV to hand over, and nobody has it already.
        assert two.complete(FIRST, prompt=long, baton={"mode": "disaggregated"}) == (
            200,
            {"prefill": "prefill-1", "decode": "decode-1"},
        )
        status, workers = two.complete(two.second)
        assert (status, workers["decode"]) == (200, "both-1")

    assert two.complete("another")[0] == 404


def test_a_request_by_an_alias_counts_for_its_model(two: TwoModels):
    def counted(model: str) -> float:
        return two.system.fleet_metrics().sum("baton_fleet_requests_total", model=model)

    before = counted(two.second)
    status, workers = two.complete(ALIAS)

    assert (status, workers["decode"]) == (200, "both-1")
    until(lambda: counted(two.second) > before, "the collector knows of the request")
    assert counted(ALIAS) == 0


def test_a_request_that_names_no_model_is_told_to(two: TwoModels):
    answer = two.system.http.post("/v1/completions", json={"prompt": "Which model?", "max_tokens": 2})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"


def test_fleet_metrics_tell_the_models_apart(two: TwoModels):
    def ready(model: str, role: str) -> float:
        return two.system.fleet_metrics().sum("baton_fleet_workers", model=model, role=role, phase="ready")

    assert (ready(FIRST, "prefill"), ready(FIRST, "both")) == (1, 0)
    assert ready(two.second, "both") >= 1


def test_a_forced_worker_of_another_model_is_refused(two: TwoModels):
    status, _workers = two.complete(FIRST, baton={"decode_worker": "both-1"})

    assert status in {400, 503}


def test_workers_join_the_model_that_is_named(two: TwoModels):
    folder = str(two.system.folder)
    code, out, err = baton("up", "--engine", "simulated", "--join", "--both", "1", "--state-dir", folder)
    assert code == 1
    assert "serves several models: name one with --model" in " ".join((out + err).split())

    with Launched(two.system.folder, "--join", "--model", two.second, "--both", "1") as second_terminal:
        second_terminal.wait_said("joined", START_S_MAX)
        asked = {"baton": {"decode_worker": "both-2"}}
        until(lambda: two.complete(two.second, **asked)[1]["decode"] == "both-2", "the joined worker serves")
        second_terminal.end()
