"""Files and batches, as the official SDK and `baton batch` use them, on a whole system."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from tests.support.system import System, baton, until

pytestmark = pytest.mark.nats

MODEL = "baton-tiny"
CHAT = "/v1/chat/completions"
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
    "/v1/responses": {"input": "hello", "max_output_tokens": 4},
}


def lines(endpoint: str, count: int, **fields) -> bytes:
    body = {"model": MODEL, **BODIES[endpoint], **fields}
    made = ({"custom_id": f"c{n}", "method": "POST", "url": endpoint, "body": body} for n in range(count))
    return "\n".join(map(json.dumps, made)).encode()


def ended(client: OpenAI, batch_id: str):
    def look():
        batch = client.batches.retrieve(batch_id)
        return batch if batch.status in ("completed", "failed", "expired", "cancelled") else None

    return until(look, "the batch has ended")


@pytest.mark.parametrize("endpoint", BODIES)
def test_the_sdk_gets_an_answer_for_each_line(client: OpenAI, endpoint: str):
    file = client.files.create(file=("in.jsonl", lines(endpoint, 12)), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"})
    batch = ended(client, made.id)

    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (12, 12, 0)
    output = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert {one["custom_id"] for one in output} == {f"c{n}" for n in range(12)}
    assert all(one["response"]["body"]["usage"] for one in output)
    assert made.id in [one.id for one in client.batches.list(limit=1)]
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    client.files.delete(file.id)
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)


def test_the_sdk_is_told_what_is_wrong(client: OpenAI):
    file = client.files.create(file=("in.jsonl", b"{}\nnonsense"), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    batch = ended(client, made.id)

    assert batch.status == "failed"
    assert [(one.code, one.line) for one in batch.errors.data] == [
        ("missing_required_parameter", 1), ("invalid_json_line", 2)
    ]  # fmt: skip
    for call in (client.batches.retrieve, client.batches.cancel, client.files.retrieve, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call("batch_0")
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(made.id)


def test_the_command_submits_follows_and_fetches(simulated: System, tmp_path: Path):
    state = ("--state-dir", str(simulated.folder))
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(lines(CHAT, 8))
    code, out, err = baton("batch", "submit", str(source), "--wait", *state)
    assert code == 0, err
    assert "8 of 8 (100%) done, 0 failed" in out

    code, out, err = baton("batch", "list", "--json", "--count", "1", *state)
    (newest,) = json.loads(out)
    code, out, err = baton("batch", "results", newest["id"], "--to", str(target), *state)
    assert (code, err) == (0, "")
    assert len(target.read_text().splitlines()) == 8
    source.write_bytes(lines(CHAT, 2, model="nobodys"))
    code, out, err = baton("batch", "submit", str(source), "--wait", "--json", *state)
    failed = json.loads(out)["id"]
    code, out, err = baton("batch", "results", failed, *state)
    assert (code, f"`baton batch results {failed} --errors`" in err) == (1, True)
    assert len(baton("batch", "results", failed, "--errors", *state)[1].splitlines()) == 2
    source.write_text("nonsense")
    code, out, err = baton("batch", "submit", str(source), "--wait", *state)
    assert (code, "line 1" in out) == (1, True)
