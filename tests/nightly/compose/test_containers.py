"""The containers serve requests, and go on when one of them is lost."""

from __future__ import annotations

import json
import subprocess
import time

import httpx
import pytest

from tests.nightly.compose.conftest import POLL_S, Compose, wait_until_ready

pytestmark = pytest.mark.compose

REQUEST = {"model": "baton-tiny", "prompt": "Once upon a time there was a relay race", "max_tokens": 12}
REQUEST_S_MAX = 60.0


def complete(system: Compose, **more: object) -> httpx.Response:
    return httpx.post(f"{system.endpoint}/v1/completions", json={**REQUEST, **more}, timeout=REQUEST_S_MAX)


def test_a_request_is_answered_by_two_workers(system: Compose):
    answer = complete(system, temperature=0)

    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 12
    assert answer.headers["x-baton-mode"] == "disaggregated"
    assert answer.headers["x-baton-prefill-worker"].startswith("prefill-")
    assert answer.headers["x-baton-decode-worker"].startswith("decode-")


def test_streamed_and_whole_responses_have_the_same_text(system: Compose):
    whole = complete(system, temperature=0).json()["choices"][0]["text"]

    streamed = complete(system, temperature=0, stream=True)

    events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == whole


def test_the_metrics_of_the_fleet_are_served(system: Compose):
    assert "baton_" in httpx.get(system.metrics, timeout=REQUEST_S_MAX).text


def test_the_light_image_holds_neither_torch_nor_vllm(system: Compose):
    looked = "import importlib.util as u; print([n for n in ('torch', 'vllm') if u.find_spec(n)])"

    assert system.run("exec", "-T", "router", "python", "-c", looked).strip() == "[]"


def test_no_container_of_ours_runs_as_root(system: Compose):
    for service in ("router", "orchestrator", "collector", "sim-prefill"):
        assert system.run("exec", "-T", service, "id", "-u").strip() == "10001", service


def test_requests_are_answered_after_a_worker_container_was_killed(system: Compose):
    victim = system.run("ps", "--quiet", "sim-decode").split()[0]

    subprocess.run(["docker", "kill", victim], env=system.environment, check=True, capture_output=True)

    answers = [complete(system, temperature=0) for _ in range(10)]
    assert [answer.status_code for answer in answers] == [200] * 10


def test_requests_are_answered_again_after_nats_was_restarted(system: Compose):
    system.run("restart", "nats")

    wait_until_ready(system)
    deadline = time.monotonic() + REQUEST_S_MAX
    while (answer := complete(system, temperature=0)).status_code == 503 and time.monotonic() < deadline:
        time.sleep(POLL_S)
    assert answer.status_code == 200, answer.text
