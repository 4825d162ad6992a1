"""Responses with state, as the official SDK uses them, on a whole system whose engines keep nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response

from tests.support.nats_server import free_port
from tests.support.processes import service_process
from tests.support.system import System, until

pytestmark = pytest.mark.nats

MODEL = "baton-tiny"
LONG = "The relay race was over when the last runner had the baton. " * 60
CACHED_SHARE_MIN = 0.9


def respond(client: OpenAI, text: str, **fields) -> Response:
    body = {"model": MODEL, "input": text, "max_output_tokens": 24, **fields}
    return client.responses.create(**body, extra_body={"ignore_eos": True})


def cached_share(response: Response) -> float:
    assert response.usage is not None
    return response.usage.input_tokens_details.cached_tokens / response.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_the_next_turn_goes_on_where_its_kv_is(client: OpenAI, stream: bool):
    text = f"{'streamed' if stream else 'whole'} {LONG}"
    if stream:
        events = list(respond(client, text, stream=True))
        assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        first = events[-1].response
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == (
            first.output_text
        )
    else:
        first = respond(client, text)

    second = next_turn(client, first)
    third = next_turn(client, second)

    assert (second.previous_response_id, third.previous_response_id) == (first.id, second.id)
    for one, then in ((first, second), (second, third)):
        assert then.usage.input_tokens > one.usage.input_tokens + one.usage.output_tokens


def next_turn(client: OpenAI, before: Response) -> Response:
    """Of which nearly all is cached, as soon as workers have reported the KV of the turn before."""

    def cached() -> Response | None:
        turn = respond(client, "And then?", previous_response_id=before.id)
        return turn if cached_share(turn) >= CACHED_SHARE_MIN else None

    return until(cached, "the next turn is placed where its KV is")


def test_a_response_can_be_retrieved_listed_and_deleted(client: OpenAI):
    made = respond(client, "Who runs?", instructions="You run.", metadata={"team": "one"})

    assert client.responses.retrieve(made.id) == made
    items = list(client.responses.input_items.list(made.id))
    assert [(item.type, item.role, item.content[0].text) for item in items] == [("message", "user", "Who runs?")]
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    with pytest.raises(openai.NotFoundError) as unknown:
        respond(client, "x", previous_response_id=made.id)
    assert unknown.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(respond(client, "x", store=False).id)


def test_a_response_in_the_background_ends_by_itself_or_is_cancelled(client: OpenAI):
    quick = respond(client, "quick", background=True)
    assert (quick.status, quick.background) == ("queued", True)
    ended = until(lambda: in_state(client, quick.id, "incomplete"), "it has ended")
    assert ended.incomplete_details.reason == "max_output_tokens"
    assert ended.output_text
    assert respond(client, "next", previous_response_id=quick.id).previous_response_id == quick.id

    slow = respond(client, "slow", background=True, max_output_tokens=7_000)
    assert client.responses.retrieve(slow.id).status == "queued"
    assert client.responses.cancel(slow.id).status == "cancelled"
    assert client.responses.retrieve(slow.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        client.responses.cancel(respond(client, "x").id)


def in_state(client: OpenAI, response_id: str, status: str) -> Response | None:
    found = client.responses.retrieve(response_id)
    return found if found.status == status else None


@contextmanager
def router(system: System, folder: Path) -> Iterator[OpenAI]:
    """One more router of the system; it is killed at the end."""
    port = free_port()
    settings = {"BATON_NATS_URL": system.nats_url, "ROUTER_HOST": "127.0.0.1", "ROUTER_RESPONSE_BYTES_MAX": "1000000"}
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        try:
            return httpx.get(f"{url}/ready", trust_env=False).is_success
        except httpx.TransportError:
            return False

    with (
        service_process("router", folder, **settings, ROUTER_PORT=str(port)) as process,
        OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60) as client,
    ):
        until(is_ready, "the router is ready")
        yield client
        process.kill()


def test_what_a_lost_router_kept_is_there_at_another(simulated: System, client: OpenAI, tmp_path: Path):
    with router(simulated, tmp_path) as other:
        first = respond(other, LONG)
        running = respond(other, "slow", background=True, max_output_tokens=7_000)
        assert client.responses.retrieve(running.id).status == "queued"

    assert client.responses.retrieve(first.id) == first
    second = respond(client, "And then?", previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens
    lost = until(lambda: in_state(client, running.id, "failed"), "the router is known to be lost")
    assert "lost" in lost.error.message


def test_a_response_cancelled_at_another_router_is_cancelled(simulated: System, client: OpenAI, tmp_path: Path):
    with router(simulated, tmp_path) as other:
        running = respond(other, "slow", background=True, max_output_tokens=7_000)
        assert client.responses.cancel(running.id).status == "cancelled"
        assert other.responses.retrieve(running.id).status == "cancelled"
