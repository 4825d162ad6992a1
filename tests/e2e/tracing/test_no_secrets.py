"""Prompts, keys and cookies appear in no log, at any level, in no span and in no error."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shared.telemetry.span_names import SpanName
from tests.support.nats_server import NatsServer
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.simulated_system import REQUEST_S_MAX, SimulatedSystem, simulated_system, until_ready
from tests.support.spans import name_of

pytestmark = pytest.mark.nats

PROMPT = "MARKED-prompt-text"
KEY = "MARKED-api-key"
QUERY = "MARKED-key-in-the-query"
COOKIE = "MARKED-cookie"
NESTED = "MARKED-metadata"
MARK = "MARKED-"
HEADERS = {
    "authorization": f"Bearer {KEY}",
    "x-api-key": KEY,
    "cookie": f"session={COOKIE}",
    "content-type": "application/json",
}
GOOD = {"model": "baton-tiny", "prompt": PROMPT * 20, "max_tokens": 8, "user": NESTED, "metadata": {"a": NESTED}}
CHAT = {"model": "baton-tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8}
TOO_LONG = 140_000


class Keeping(OtlpReceiver):
    """Forgets nothing of what it was sent, events of spans included."""

    def __init__(self) -> None:
        super().__init__()
        self.exports: list[bytes] = []

    def take(self, path: str, body: bytes) -> None:
        self.exports.append(body)
        super().take(path, body)


@pytest.fixture(scope="module")
def receiver() -> Iterator[Keeping]:
    with Keeping() as one:
        yield one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("secrets")


@pytest.fixture(scope="module")
def system(folder: Path, receiver: Keeping) -> Iterator[SimulatedSystem]:
    settings = {
        "BATON_OTLP_ENDPOINT": receiver.endpoint,
        "BATON_LOG_LEVEL": "debug",
        "BATON_LOG_FORMAT": "json",
        "BATON_TRACE_SAMPLE_RATIO": "1",
    }
    with NatsServer(folder) as nats, simulated_system(folder, nats, **settings) as one:
        yield one


def ask(system: SimulatedSystem, body: object, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = f"{system.router_url}{path}?api_key={QUERY}"
    return httpx.post(url, content=content, headers={**HEADERS, **headers}, timeout=REQUEST_S_MAX)


def raw(system: SimulatedSystem, sent: bytes) -> str:
    """The answer to bytes that are no HTTP."""
    with socket.create_connection(("127.0.0.1", httpx.URL(system.router_url).port), REQUEST_S_MAX) as client:
        client.sendall(sent)
        return client.recv(65536).decode()


WRONG: list[tuple[str, object, dict[str, str]]] = [
    ("/v1/completions", {**GOOD, "model": "nobody-has-this"}, {}),
    ("/v1/completions", GOOD, {"x-baton-mode": "sideways"}),
    ("/v1/completions", GOOD, {"x-baton-tenant": "not a tenant"}),
    ("/v1/completions", {**GOOD, "baton": {"ttft_s": "soon"}}, {}),
    ("/v1/completions", {**GOOD, "baton": {"decode_worker": "nobody"}}, {}),
    ("/v1/completions", {**GOOD, "prompt": [7] * TOO_LONG}, {}),
    ("/v1/completions", b'{"model":"baton-tiny","prompt":"%b' % PROMPT.encode(), {}),
    ("/v1/completions", b'{"model":"nobody","prompt":"%b"]' % PROMPT.encode(), {}),
    ("/v1/models", GOOD, {}),
    ("/v1/nothing", GOOD, {}),
]


def test_what_is_marked_is_found_nowhere(system: SimulatedSystem, receiver: Keeping, folder: Path):
    answers = [ask(system, {**GOOD, "stream": stream}) for stream in (False, True)]
    answers += [ask(system, CHAT, "/v1/chat/completions", **{"x-baton-mode": "aggregated"})]
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    errors = [ask(system, body, path, **headers) for path, body, headers in WRONG]
    assert all(400 <= answer.status_code < 500 for answer in errors), errors
    no_http = raw(system, f"POST /v1/completions?api_key={QUERY} HTTP/1.1\r\nauthorization : {KEY}\r\n\r\n".encode())
    assert no_http.startswith("HTTP/1.1 400")
    served = {SpanName.REQUEST, SpanName.SERVE_LEG}  # A killed worker exports no more spans.
    assert receiver.wait_for(lambda: served <= {name_of(span.name) for span in receiver.spans})

    for worker in ("p1", "d1"):
        system.processes[worker].kill()
    failed = ask(system, {**GOOD, "stream": True})
    assert failed.status_code >= 500 or "error" in failed.text
    until_ready(f"{system.collector_url}/ready")
    metrics = [httpx.get(f"{url}/metrics").text for url in (system.router_url, system.collector_url)]
    decisions = httpx.get(f"{system.router_url}/baton/decisions?limit=20").text

    logs = {log.name: log.read_text() for log in folder.glob("*.log")}
    assert {name.partition("-")[0] for name in logs} >= {"router", "worker", "collector", "orchestrator"}
    assert "request" in next(text for name, text in logs.items() if name.startswith("router"))
    found = {
        "logs": [line for text in logs.values() for line in text.splitlines() if MARK in line],
        "spans and metrics": [export for export in receiver.exports if MARK.encode() in export],
        "errors": [answer.text for answer in [*errors, failed] if MARK in answer.text],
        "headers": [answer.headers for answer in [*answers, *errors, failed] if MARK in str(answer.headers)],
        "what is no HTTP": [no_http] if MARK in no_http else [],
        "metrics": [text for text in metrics if MARK in text],
        "decisions": [decisions] if MARK in decisions else [],
    }
    assert found == {what: [] for what in found}


def logged(folder: Path) -> list[dict]:
    """Every whole line so far."""
    logs = [log.read_bytes().rpartition(b"\n")[0] for log in folder.glob("*-*.log")]
    return [json.loads(line) for log in logs for line in log.splitlines()]


def test_every_line_of_every_log_is_json_whatever_clients_send(system: SimulatedSystem, folder: Path):
    forged = 'nobody\n{"message": "request", "model": "forged"}\x1b[31m\u2028'
    answer = ask(system, {**GOOD, "model": forged}, traceparent=f"00-{7:032x}-{9:016x}-01")
    assert answer.status_code == 404

    deadline = time.monotonic() + REQUEST_S_MAX
    while not (requests := [line for line in logged(folder) if line.get("model") == forged]):
        assert time.monotonic() < deadline, "a client may have its answer before the line is written, and no more"
    (request,), lines = requests, logged(folder)
    assert (request["status"], request["trace_id"]) == (404, f"{7:032x}")
    assert {line["service"] for line in lines} == {"router", "worker", "collector", "orchestrator"}
    assert not [line for line in lines if line.get("model") == "forged"]
