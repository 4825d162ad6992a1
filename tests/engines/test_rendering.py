"""What a chat makes vLLM's server render is bounded while it is rendered: its own checks come after that."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.worker.legs.asgi_call import ask_app
from shared.contracts.request_body import prompt_chars_max
from tests.engines.front import MODEL, front, model_with_marks

pytestmark = pytest.mark.vllm

MIB = 1024 * 1024
TEMPLATE = "{% for message in messages %}{{ motto }}{{ message.content }}{% endfor %}"


@pytest.fixture
def jinja_as_before():
    yield
    if "concat" in vars(ImmutableSandboxedEnvironment):
        del ImmutableSandboxedEnvironment.concat


async def test_a_variable_that_the_template_repeats_does_not_become_gigabytes(tmp_path, jinja_as_before):
    model = model_with_marks(tmp_path)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    turns = [{"role": "user", "content": "x"}] * 1000

    async with front(model, "", []) as served:
        statuses, answers, peaks = [], [], []
        for motto in ("m" * 64 * 1024, "m"):
            body = {"model": MODEL, "messages": turns, "chat_template_kwargs": {"motto": motto}}
            tracemalloc.start()
            status, answer = await ask_app(served.app, "/tokenize", json.dumps(body).encode())
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            statuses.append(status)
            answers.append(answer.decode())

    assert statuses == [400, 200]
    assert f"more than {prompt_chars_max(4096)} characters" in answers[0]
    assert peaks[0] < 20 * MIB
