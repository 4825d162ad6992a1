"""Errors that clients make, and the responses to them."""

from __future__ import annotations

import json
import os
import signal

import httpx
import pytest

from tests.e2e.conftest import START_S_MAX
from tests.support.nats_server import NatsServer
from tests.support.system import Metrics, System, until

pytestmark = pytest.mark.nats

MODEL = "baton-tiny"
PATHS = ["/v1/completions", "/v1/chat/completions"]
BODY_BYTES_MAX = 2 * 1024 * 1024


def error(answer: httpx.Response) -> dict:
    return answer.json()["error"]


@pytest.mark.parametrize("path", PATHS)
def test_an_unknown_model_is_404(simulated: System, path: str):
    answer = simulated.http.post(path, json={"model": "nobody-has-this", "prompt": "x", "messages": []})

    assert answer.status_code == 404
    assert error(answer)["code"] == "model_not_found"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"model": ', b"[]", b"null", b"\xff\xfe", b'{"model":"\xc3"}', b"[" * 9999]
)
def test_a_body_that_is_no_json_object_is_400(simulated: System, path: str, body: bytes):
    answer = simulated.http.post(path, content=body, headers={"content-type": "application/json"})

    assert answer.status_code == 400
    assert error(answer)["message"]


def test_malformed_json_gets_the_engines_error_message(simulated: System):
    answer = simulated.http.post("/v1/completions", content=b'{"model": "baton-tiny", ')

    assert answer.status_code == 400
    assert "JSON decode error" in error(answer)["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_longer_than_the_model_is_400(simulated: System, stream: bool):
    body = {"model": MODEL, "prompt": [7] * 140_000, "max_tokens": 4, "stream": stream}

    answer = simulated.http.post("/v1/completions", json=body)

    assert answer.status_code == 400
    assert "131072" in error(answer)["message"]


@pytest.mark.parametrize("mode", ["", "together", "Aggregated;q=1"])
def test_a_mode_that_does_not_exist_is_400(simulated: System, mode: str):
    answer = simulated.http.post(
        "/v1/completions", json={"model": MODEL, "prompt": "x"}, headers={"x-baton-mode": mode}
    )

    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/completions"), ("POST", "/v1/models"), ("DELETE", "/metrics")]
)
def test_a_method_that_a_path_does_not_have_is_405(simulated: System, method: str, path: str):
    answer = simulated.http.request(method, path)

    assert answer.status_code == 405
    assert error(answer)["message"]


@pytest.mark.parametrize("path", ["/v2/completions", "/v1/assistants", "/v1/models/../../etc"])
def test_other_paths_are_404(simulated: System, path: str):
    answer = simulated.http.get(path)

    assert answer.status_code == 404
    assert error(answer)["message"]


def test_a_valid_client_request_id_is_kept_an_invalid_one_replaced(simulated: System):
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}

    kept = simulated.http.post("/v1/completions", json=body, headers={"x-request-id": "my-id_1"})
    replaced = simulated.http.post("/v1/completions", json=body, headers={"x-request-id": "a.b c>*"})

    assert kept.headers["x-request-id"] == "my-id_1"
    assert replaced.headers["x-request-id"] != "a.b c>*"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_of_100k_tokens_travels_in_parts_and_works(simulated: System, stream: bool):
    prompt = [100 + number * 7919 % 3000 for number in range(100_000)]
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 8, "stream": stream, "ignore_eos": True})
    filled = body + " " * (1_500_000 - len(body))

    headers = {"content-type": "application/json", "x-baton-mode": "disaggregated"}
    answer = simulated.http.post("/v1/completions", content=filled, headers=headers)

    assert answer.status_code == 200, answer.text
    assert answer.headers["x-baton-mode"] == "disaggregated"
    if stream:
        assert answer.text.count("data: ") == 9
    else:
        assert answer.json()["usage"]["prompt_tokens"] == 100_000


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory):
    """A system with a small body limit and a small NATS payload, whose only worker a test may take away."""
    folder = tmp_path_factory.mktemp("lone")
    env = {"ROUTER_BODY_BYTES_MAX": str(BODY_BYTES_MAX)}
    with (
        NatsServer(folder, max_payload=64 * 1024) as nats,
        System(folder / "state", "--engine", "simulated", "--both", "1", nats_url=nats.url, env=env) as system,
    ):
        yield system.wait_ready(START_S_MAX)


def sent_to_workers(metrics: Metrics) -> float:
    return metrics.sum("baton_worker_prompt_tokens_total")


def test_a_body_over_the_limit_is_413_and_nothing_is_sent(lone: System):
    before = sent_to_workers(lone.fleet_metrics())
    body = json.dumps({"model": MODEL, "prompt": "word " * BODY_BYTES_MAX})

    answer = lone.http.post("/v1/completions", content=body)

    assert answer.status_code == 413
    assert error(answer)["code"] == "request_too_large"
    assert sent_to_workers(lone.fleet_metrics()) == before


def test_a_chunked_body_over_the_limit_is_413(lone: System):
    def pieces():
        for _ in range(4):
            yield b" " * (BODY_BYTES_MAX // 2)

    try:
        status = lone.http.post("/v1/completions", content=pieces()).status_code
    except httpx.TransportError:  # the connection was closed while the client still wrote
        status = 413

    assert status == 413


def test_bodies_beyond_a_small_nats_payload_work(lone: System):
    prompt = "the runner hands over the baton " * 10_000

    answer = lone.http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 4})

    assert answer.status_code == 200, answer.text
    assert len(prompt) > 4 * 64 * 1024


def test_without_a_usable_worker_requests_get_503_with_retry_after(lone: System):
    worker = lone.worker_pid("both-1")
    os.kill(worker, signal.SIGSTOP)
    until(lambda: lone.http.get("/ready").status_code == 503, "the router notices the silence")

    answer = lone.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
    models = lone.http.get("/v1/models")
    os.kill(worker, signal.SIGCONT)

    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert error(answer)["message"]
    assert models.json()["data"] == []
    until(lambda: lone.http.get("/ready").status_code == 200, "the worker is back")
