"""Workers attached to servers outside of Baton: placed by load, never one of a pair, and never asked for tokens."""

from __future__ import annotations

import asyncio

import msgspec

from services.router.placement.assembly import BY_LOAD
from services.router.tokenize.prompts import ATTACHED
from shared.contracts.engine_paths import MESSAGES
from shared.contracts.failures import Failure, Reason
from shared.contracts.inference import LegKind, LegReport
from shared.contracts.workers import Role
from tests.unit.router.fake_worker import EVENTS, JSON, SSE, FakeWorker
from tests.unit.router.streams import ANSWER, fails, streams
from tests.unit.router.world import World, give_legs, in_world, keys, prompt

LOST = Failure(reason=Reason.SERVER_LOST, message="its server is gone")


def breaks_off(events: int):
    """A stream of so many events without token ids, as only a server outside of Baton sends them."""

    def script(_worker: FakeWorker, _start, frames) -> None:
        frames.head(200, SSE)
        for event in EVENTS[:events]:
            frames.data(event)
        frames.fail(LOST)

    return script


async def attached_and_other(world: World, script) -> tuple[FakeWorker, FakeWorker]:
    """The router tries the attached one first."""
    one = await world.worker("a1", script=script, attached=True)
    other = await world.worker("w2", script=streams())
    give_legs(world, "w2", 5)
    return one, other


@in_world()
async def test_a_stream_that_a_lost_server_had_begun_ends_with_an_error_and_is_not_repeated(world: World):
    _one, other = await attached_and_other(world, breaks_off(2))

    response = await world.ask(prompt(stream=True))

    assert response.body.startswith(b"".join(EVENTS[:2]))
    assert b"its server is gone; and the stream could not be resumed: a server outside of Baton" in response.body
    assert other.started == []


@in_world()
async def test_a_request_whose_server_is_lost_before_the_answer_is_served_by_another_worker(world: World):
    await attached_and_other(world, breaks_off(0))

    assert (await world.ask(prompt(stream=True))).body == ANSWER


@in_world()
async def test_a_stream_of_an_engine_is_never_continued_by_an_attached_server(world: World):
    one = await world.worker("w1", script=streams(2, fails(Reason.ENGINE_DEAD)))
    other = await world.worker("a2", script=streams(), attached=True)
    give_legs(world, "a2", 5)

    response = await world.ask(prompt(stream=True))

    assert len(one.started) == 1
    assert other.started == []
    assert b"could not be resumed" in response.body


@in_world()
async def test_two_attached_workers_are_no_pair_and_the_decision_says_why_one_was_chosen(world: World):
    await world.worker("a1", attached=True)
    await world.worker("a2", attached=True)

    await world.ask(prompt(baton={"ttft_s": 0.001}))
    decision = world.router.decisions.log.newest_first()[0]
    refused = await world.ask(prompt(baton={"mode": "disaggregated"}))

    assert decision.result.prefill is None
    assert decision.result.why == BY_LOAD
    assert (decision.exact, decision.why_inexact) == (False, ATTACHED)
    assert refused.status == 503


@in_world()
async def test_a_client_that_asks_for_decode_first_is_served_whole_and_unguarded(world: World):
    worker = await world.worker("a1", attached=True)

    response = await world.ask(prompt(baton={"mode": "decode_first"}))

    assert response.status == 200
    assert worker.started[0].kind is LegKind.AGGREGATED
    assert not worker.started[0].cache_hit_threshold


@in_world()
async def test_requests_go_to_the_workers_whose_servers_have_the_endpoint(world: World):
    def whole(_worker: FakeWorker, _start, frames) -> None:
        frames.head(200, JSON)
        frames.data(b"{}")
        frames.end(LegReport())

    lacking = await world.worker("a1", attached=True, paths=("/v1/completions",))
    having = await world.worker("w2", script=whole)
    give_legs(world, "w2", 5)

    body = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
    response = await world.ask(body, path=MESSAGES)

    assert response.status == 200
    assert (len(lacking.started), len(having.started)) == (0, 1)


@in_world()
async def test_the_only_attached_worker_of_a_prefill_and_decode_pair_stays_out_of_it(world: World):
    attached = await world.worker("a1", attached=True)
    give_legs(world, "a1", 9)
    prefill, decode = await world.worker("p1", Role.PREFILL), await world.worker("d1", Role.DECODE)

    await world.ask(prompt(baton={"mode": "disaggregated"}))

    assert (len(attached.started), len(prefill.started), len(decode.started)) == (0, 1, 1)


@in_world(**keys(tokens_per_minute=1000), frame_gap_s_max=100.0)
async def test_leaving_a_stream_of_unknown_tokens_is_not_cheaper_than_reading_it(world: World):
    def endless(_worker: FakeWorker, _start, frames) -> None:
        frames.head(200, SSE)
        frames.data(EVENTS[0])

    await world.worker("a1", script=endless, attached=True)
    body = msgspec.json.encode(prompt(stream=True, max_tokens=5000))
    connection, answering = world.begin(body, x_api_key="k")
    await asyncio.sleep(50)

    connection.leave()
    await answering

    assert (await world.ask(prompt(), x_api_key="k")).status == 429
