"""A batch over real vLLM engines: each line is answered as the same request of a client, and its tokens are counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI

from tests.engines.system.fleet import ANSWER_S_MAX, Fleet
from tests.support.system import until

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

ENDPOINT = "/v1/chat/completions"
LINES = 8
BAD = 5


def chat(number: int) -> dict[str, Any]:
    """The same beginning for all; one that vLLM refuses."""
    content = f"{'Which of the four runners has the baton now? ' * 8}{number}"
    body = {"model": "baton-tiny", "messages": [{"role": "user", "content": content}], "temperature": 0}
    return {**body, "max_tokens": -4 if number == BAD else 12, "ignore_eos": True}


def test_lines_are_answered_as_requests_of_clients_and_their_tokens_counted(fleet: Fleet):
    lines = [
        {"custom_id": f"c{number}", "method": "POST", "url": ENDPOINT, "body": chat(number)} for number in range(LINES)
    ]
    url = f"{fleet.system.endpoint}/v1"
    with OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=ANSWER_S_MAX) as client:
        content = "\n".join(json.dumps(line) for line in lines).encode()
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")

        def ended() -> Any:
            batch = client.batches.retrieve(made.id)
            return batch if batch.status == "completed" else None

        batch = until(ended, "the batch is completed", ANSWER_S_MAX)
        output = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        errors = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
        alone = {
            f"c{number}": client.chat.completions.create(
                **{name: value for name, value in chat(number).items() if name != "ignore_eos"},
                extra_body={"ignore_eos": True},
            )
            for number in range(LINES)
            if number != BAD
        }

    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (LINES, LINES - 1, 1)
    answers = {line["custom_id"]: line["response"]["body"] for line in output}
    assert {name: body["choices"][0]["message"]["content"] for name, body in answers.items()} == {
        name: answer.choices[0].message.content for name, answer in alone.items()
    }
    [refused] = errors
    assert (refused["custom_id"], refused["response"]["status_code"]) == (f"c{BAD}", 400)
    assert batch.model == "baton-tiny"
    assert batch.usage.input_tokens == sum(answer.usage.prompt_tokens for answer in alone.values())
    assert batch.usage.output_tokens == 12 * (LINES - 1)
    assert 0 < batch.usage.input_tokens_details.cached_tokens < batch.usage.input_tokens
