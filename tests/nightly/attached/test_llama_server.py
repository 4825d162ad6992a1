"""A worker attached to a server that is not ours: llama.cpp's for Python, with baton-tiny as its model."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from services.worker.tiny_model import ensure_tiny_model
from shared.runtime.settings import CommonSettings
from tests.support.nats_server import free_port
from tests.support.processes import ROOT
from tests.support.system import System, until

PYTHON = ROOT / ".venv-llama/bin/python"
HAS_SERVER = (PYTHON.parents[1] / "installed.txt").is_file()
pytestmark = [
    pytest.mark.nats,
    pytest.mark.skipif(not HAS_SERVER, reason="llama.cpp's server is not built here: make llama-server"),
]

KEY = "sk-of-the-operator-of-llama"
START_S_MAX = 120.0
ASKED = {"messages": [{"role": "user", "content": "Who runs?"}], "max_tokens": 24, "temperature": 0.0}
ENDLESS = {**ASKED, "max_tokens": 3500, "logit_bias": {"1": -100}}


class LlamaServer:
    """The server, which may be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self._file = folder / "tiny.gguf"
        self._log = folder / "llama.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._options = ["--host", "127.0.0.1", "--port", str(port), "--model", str(self._file), "--n_ctx", "4096"]
        self._options += ["--model_alias", "tiny-gguf", "--interrupt_requests", "False", "--api_key", KEY]
        model = ensure_tiny_model(Path(CommonSettings().cache_dir).expanduser())
        make = [str(PYTHON), str(Path(__file__).with_name("tiny_gguf.py")), str(model), str(self._file)]
        subprocess.run(make, check=True, timeout=START_S_MAX)

    def start(self) -> None:
        """Until it answers."""
        command = [str(PYTHON), "-m", "llama_cpp.server", *self._options]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        until(self._answers, f"{command} answers; see {self._log}", START_S_MAX)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/docs", trust_env=False, timeout=5.0).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    server = LlamaServer(tmp_path_factory.mktemp("llama"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def system(server: LlamaServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Its only worker is attached to the server, whose model clients call ``chat``."""
    folder = tmp_path_factory.mktemp("attached")
    (folder / "key").write_text(KEY)
    attach = ("--model", "chat", "--attach", f"{server.url}/v1=tiny-gguf", "--attach-key-file", str(folder / "key"))
    with System(folder, *attach, env={"WORKER_LEGS_MAX": "1"}) as system:
        yield system.wait_ready(START_S_MAX)


@pytest.fixture
def client(system: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{system.endpoint}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def text_of(stream) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def phase(system: System) -> str:
    return system.fleet()["attached-1"]["record"]["phase"]


def test_answers_are_the_servers_own_under_the_served_name(server: LlamaServer, client: openai.OpenAI):
    own = server.client().chat.completions.create(model="tiny-gguf", **ASKED)

    whole = client.chat.completions.create(model="chat", **ASKED)
    streamed = text_of(client.chat.completions.create(model="chat", stream=True, **ASKED))
    completion = client.completions.create(model="chat", prompt="Once upon a time", max_tokens=4)

    assert whole.choices[0].message.content == streamed == own.choices[0].message.content
    assert (whole.model, completion.model) == ("chat", "chat")
    assert whole.usage == own.usage


def test_the_decision_says_that_the_request_was_placed_by_load(system: System, client: openai.OpenAI):
    decision = client.chat.completions.with_raw_response.create(model="chat", **ASKED).headers["x-baton-decision"]

    record = system.http.get(f"/baton/decisions/{decision}").json()

    assert record["mode"] == "aggregated"
    assert "placed by load: its server is outside of Baton" in record["reason"]
    assert record["outcome"] == "ok"


def test_requests_wait_for_a_server_that_does_one_at_a_time(client: openai.OpenAI):
    def ask(_number: int) -> str:
        return client.chat.completions.create(model="chat", **ASKED).choices[0].message.content

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(ask, range(12)))

    assert len(set(answers)) == 1


def test_the_servers_errors_reach_the_client_and_its_missing_endpoints_are_named(system: System, client: openai.OpenAI):
    with pytest.raises(openai.APIStatusError, match="embedding=True"):
        client.embeddings.create(model="chat", input="hi")
    with pytest.raises(openai.NotFoundError, match="/v1/responses"):
        client.responses.create(model="chat", input="hi")
    message = {"model": "chat", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    refused = system.http.post("/v1/messages", json=message)
    error = refused.json()["error"]
    assert (refused.status_code, error["type"], error["code"]) == (404, "not_found_error", "path_not_served")
    assert "/v1/messages" in error["message"]


def test_a_client_that_leaves_frees_the_server(client: openai.OpenAI):
    """It does one request at a time, and this one would take it half a minute."""
    with client.chat.completions.create(model="chat", stream=True, **ENDLESS) as stream:
        next(iter(stream))

    answer = client.with_options(timeout=10).chat.completions.create(model="chat", **ASKED)

    assert answer.choices[0].message.content


def test_a_killed_server_ends_its_stream_and_serves_again_when_it_is_back(
    server: LlamaServer, system: System, client: openai.OpenAI
):
    stream = iter(client.chat.completions.create(model="chat", stream=True, **ENDLESS))
    next(stream)
    server.kill()

    with pytest.raises(openai.APIError, match="could not be resumed: a server outside of Baton"):
        list(stream)
    until(lambda: phase(system) == "probing", "the worker takes no requests")
    with pytest.raises(openai.APIStatusError) as away:
        client.chat.completions.create(model="chat", **ASKED)
    server.start()
    until(lambda: phase(system) == "ready", "the worker takes requests again")
    until(lambda: system.http.get("/ready").is_success, "the router has heard of it")

    assert away.value.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert "retry-after" in away.value.response.headers
    assert client.chat.completions.create(model="chat", **ASKED).choices[0].message.content


def test_the_key_is_nowhere_but_in_its_file(system: System):
    """Run last: logs, state and registry have all that happened before."""
    files = [file for file in system.folder.rglob("*") if file.is_file() and file.name != "key"]

    assert files
    assert [file for file in files if KEY.encode() in file.read_bytes()] == []
    assert KEY not in str(system.fleet())
