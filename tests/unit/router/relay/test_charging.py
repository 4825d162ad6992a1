"""A key pays for what its requests may cost: each sequence, inputs that generate nothing, and responses left unread."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from services.router.request.fields import read_request
from services.router.request.sequences import batch_size
from shared.bus.frame_sender import LegFrames
from shared.contracts.engine_paths import CHAT_BATCH
from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import WorkerId
from shared.contracts.inference import LegReport, StartLeg
from tests.unit.router.fake_worker import JSON, FakeWorker, serve_leg
from tests.unit.router.world import CHAT, COMPLETIONS, World, in_world, keys, prompt, settle


def pooled(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
    """An engine that reports no tokens, as vLLM does for what generates none."""
    frames.head(200, JSON)
    frames.data(b'{"data":[]}')
    frames.end(LegReport())


def held(_worker: FakeWorker, _start: StartLeg, _frames: LegFrames) -> None:
    """Generates, and answers with everything at the end."""


@pytest.mark.parametrize(
    "path",
    ["/v1/embeddings", "/v1/score", "/v1/rerank", "/pooling", "/classify", "/tokenize", "/v1/messages/count_tokens"],
)
@in_world(**keys(tokens_per_minute=1000))
async def test_inputs_count_although_the_engine_reports_no_tokens(world: World, path):
    await world.worker("w1", script=pooled)
    body = {"model": "m", "input": ["word " * 4000], "documents": ["word " * 4000]}

    statuses = [(await world.ask(body, path=path, x_api_key="k")).status for _ in range(3)]

    assert statuses == [200, 429, 429]


@in_world(**keys(tokens_per_minute=1000))
async def test_an_engines_own_count_replaces_the_estimate(world: World):
    def counted(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.head(200, JSON)
        frames.data(b"{}")
        frames.end(LegReport(prompt_tokens=3))

    await world.worker("w1", script=counted)

    for left in (997, 994):
        body = {"model": "m", "input": "word " * 300}
        assert (await world.ask(body, path="/v1/embeddings", x_api_key="k")).status == 200
        (client,) = world.router.authenticator._clients.values()
        assert client.rate_limit.left(world.router.clock.now())[0][2] == pytest.approx(left, abs=1)


@pytest.mark.parametrize("fields", [{"max_tokens": 5000}, {}, {"n": 4, "max_tokens": 2000}])
@in_world(**keys(tokens_per_minute=1000))
async def test_leaving_just_before_a_whole_response_is_not_cheaper_than_reading_it(world: World, fields):
    await world.worker("w1", script=held)
    connection, answering = world.begin(msgspec.json.encode(prompt(**fields)), path=COMPLETIONS, x_api_key="k")
    await asyncio.sleep(240)

    connection.leave()
    await answering

    assert (await world.ask(prompt(), x_api_key="k")).status == 429


@in_world(**keys(tokens_per_minute=1000))
async def test_a_client_that_leaves_at_once_pays_its_prompt_only(world: World):
    await world.worker("w1", script=held)
    connection, answering = world.begin(msgspec.json.encode(prompt(max_tokens=5000)), x_api_key="k")
    await settle()

    connection.leave()
    await answering

    (client,) = world.router.authenticator._clients.values()
    assert client.rate_limit.left(world.router.clock.now())[0][2] > 990


@in_world(**keys(tokens_per_minute=1000, sequences_max=9))
async def test_a_request_that_reached_no_worker_costs_nothing(world: World):
    assert (await world.ask(prompt(n=9), x_api_key="k")).status in (404, 503)

    (client,) = world.router.authenticator._clients.values()
    assert client.rate_limit.left(world.router.clock.now())[0][2] == 1000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "p", "n": 8}),
        (COMPLETIONS, {"prompt": "p", "n": "8"}),
        (COMPLETIONS, {"prompt": "p", "best_of": 8.0}),
        (COMPLETIONS, {"prompt": ["p"] * 4, "n": 2}),
        (COMPLETIONS, {"prompt": [[1, 2], [3]] * 4}),
        (CHAT, {"messages": [{"role": "user", "content": "p"}], "n": 8}),
        (CHAT_BATCH, {"messages": [[{"role": "user", "content": "p"}]] * 4, "n": 2}),
        ("/generative_scoring", {"query": "q", "items": ["d"] * 8}),
        ("/v1/embeddings", {"input": ["p"] * 8}),
        ("/v1/score", {"text_1": "q", "text_2": ["d"] * 8}),
        ("/v1/rerank", {"query": "q", "documents": ["d"] * 8}),
        ("/score", {"queries": ["q"] * 8, "items": "d"}),
        ("/pooling", {"data": ["p"] * 8}),
        ("/classify", {"input": ["p"] * 8}),
    ],
)
@in_world(**keys(requests_per_minute=8))
async def test_each_sequence_counts(world: World, path, body):
    """As a request of its key, as a leg of its worker, and against the operator's bound."""

    w1 = await world.worker("w1", script=held)
    view = world.router.fleet.cluster.workers[WorkerId("w1")]
    _connection, answering = world.begin(msgspec.json.encode({"model": "m", **body}), path=path, x_api_key="k")
    await settle()

    assert (w1.started[0].sequences, view.legs) == (8, 8)
    assert (await world.ask(prompt(), x_api_key="k")).status == 429
    w1.frames[w1.started[0].leg_id].fail(Failure(reason=Reason.INTERNAL, message="over"))
    await answering
    await world.workers["w1"].report()
    await settle()
    assert view.own.legs == 0


@pytest.mark.parametrize(
    "body",
    [{"prompt": "p", "n": 2049}, {"prompt": ["p"] * 5000}, {"prompt": ["p", "q"], "n": 10**30}],
    ids=["n", "prompts", "both"],
)
@in_world()
async def test_a_request_with_more_sequences_than_the_operator_allows_is_refused(world: World, body):
    w1 = await world.worker("w1")

    response = await world.ask({"model": "m", **body})

    assert response.status == 400
    assert "at most 2048" in response.error["message"]
    assert w1.started == []


@pytest.mark.parametrize("field", ["prompt", "input"])
def test_spaces_hide_no_sequences(field):
    body = ('{"' + field + '":  [' + " " * 100 + '"a", "b", "c"]}').encode()

    counted = batch_size(body) if field == "input" else read_request(COMPLETIONS, body).sequences

    assert counted == 3


@in_world(**keys(sequences_max=4))
async def test_a_key_has_no_more_sequences_at_once_than_it_may(world: World):
    w1 = await world.worker("w1", script=held)
    _connection, answering = world.begin(msgspec.json.encode(prompt(n=3)), x_api_key="k")
    await settle()

    over = await world.ask(prompt(n=2), x_api_key="k")
    never = await world.ask(prompt(n=5), x_api_key="k")
    w1.script = serve_leg
    last = await world.ask(prompt(), x_api_key="k")
    w1.frames[w1.started[0].leg_id].fail(Failure(reason=Reason.INTERNAL, message="over"))
    await answering
    after = await world.ask(prompt(n=4), x_api_key="k")

    assert (over.status, over.error["code"], over.error["type"]) == (429, "rate_limit_exceeded", "sequences")
    assert (over.headers["retry-after"], never.status) == ("1", 400)
    assert (last.status, after.status) == (200, 200)
