"""A whole router records each placement with its outcome and the parts of its TTFT."""

from __future__ import annotations

import asyncio
import itertools
import re
from typing import Any

import httpx
import msgspec
import pytest

from services.router.decisions.decision import LISTED_MAX
from services.router.decisions.decision_filter import DecisionFilter
from services.router.decisions.decision_service import SLICE, DecisionService
from services.router.decisions.odds import SAMPLES_MIN
from services.router.placement.placement import PlacementRequest, Rejection
from services.router.state.worker_speed import WorkerSpeed
from services.router.tokenize.prompts import NO_TOKENIZER, NOT_READ
from shared.bus.frame_sender import LegFrames
from shared.contracts.channels import DECISION
from shared.contracts.decisions import AskDecision, DecisionRecord
from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import DecisionId, RequestId, RouterId, WorkerId
from shared.contracts.inference import LegKind, LegReport, StartLeg
from shared.contracts.kv_exchange import KvRead, KvTransferReport
from tests.support.memory_bus import MemoryBus
from tests.support.virtual_time import LoopClock
from tests.unit.router.fake_worker import DONE, EVENTS, JSON, SSE, WHOLE_RESPONSE, FakeWorker, wants_stream
from tests.unit.router.world import World, in_world, long_prompt, parse, prompt, run_in_world, settle

OURS = {"connector": "baton-1"}
HEADER = "x-baton-decision"


def timed(
    *, queue_s: float = 0.0, prefill_s: float = 0.0, fetch_s: float = 0.0, step_s: float = 0.5, follows: bool = False
):
    """A worker that takes these times and reports them; three tokens, one per ``step_s``."""

    async def script(_worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
        await asyncio.sleep(queue_s + prefill_s)
        read = KvRead(
            worker_id=start.worker_id,
            epoch=start.epoch or 1,
            requested_at=10.0,
            granted_at=10.0,
            read_at=10.0,
            ended_at=10.0 + fetch_s,
            followed=follows,
        )
        report = {
            "prompt_tokens": 9,
            "cached_tokens": 4,
            "completion_tokens": 3,
            "queue_s": queue_s,
            "prefill_s": prefill_s,
            "first_token_s": queue_s + prefill_s,
            "kv": KvTransferReport(prompt_tokens=9, local_tokens=9, reads=[read] if fetch_s else []),
        }
        if start.kind is LegKind.PREFILL:
            frames.head(200, JSON)
            frames.end(LegReport(**report, total_s=queue_s + prefill_s))
            return
        stream = wants_stream(start)
        frames.head(200, SSE if stream else JSON)
        for event in EVENTS:
            if stream:
                frames.data(event, [1])
            await asyncio.sleep(step_s)
        frames.data(DONE if stream else WHOLE_RESPONSE)
        frames.end(LegReport(**report, total_s=queue_s + prefill_s + len(EVENTS) * step_s))

    return script


def slowly_failing(after_s: float):
    async def script(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        await asyncio.sleep(after_s)
        frames.fail(Failure(reason=Reason.WORKER_LOST, message="as the test wants"))

    return script


async def get(world: World, path: str, **params: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app=world.router.edge)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        return await client.get(path, params=params)


async def decision(world: World, decision_id: str) -> DecisionRecord:
    response = await get(world, f"/baton/decisions/{decision_id}")
    assert response.status_code == 200, response.text
    return msgspec.json.decode(response.content, type=DecisionRecord)


def parts_of(record: DecisionRecord) -> dict[str, float]:
    assert record.measured is not None
    assert record.measured.total_s() == pytest.approx(record.ttft_s, abs=1e-9)
    values = {name: round(getattr(record.measured, name), 6) for name in record.measured.__struct_fields__}
    return {name: value for name, value in values.items() if value}


@pytest.mark.parametrize("stream", [True, False])
@in_world()
async def test_an_aggregated_decision_has_the_measured_times(world: World, stream: bool):
    await world.worker("w1", script=timed(queue_s=0.3, prefill_s=0.2))

    response = await world.ask(long_prompt(stream=stream), x_request_id="mine")

    record = await decision(world, response.headers[HEADER])
    assert (record.request_id, record.mode, record.decode_worker, record.outcome) == ("mine", "aggregated", "w1", "ok")
    assert parts_of(record) == {"queue_s": 0.3, "prefill_s": 0.2}
    assert record.itl_s == pytest.approx(0.75 if stream else -1)
    assert (record.counted_prompt_tokens, record.cached_tokens) == (9, 4)


@in_world()
async def test_a_decision_names_the_gap_that_its_request_waited_for(world: World):
    await world.worker("w1", script=timed(prefill_s=0.2))
    speed = WorkerSpeed(prefill_token_s=0.001, decode_step_s=0.01, prompts_measured=1.0)
    world.router.fleet.cluster.set_speed(WorkerId("w1"), speed)
    asked = {"baton": {"itl_s": 0.05}, "max_tokens": 8}

    responses = await asyncio.gather(*(world.ask(long_prompt(stream=True) | asked) for _ in range(6)))

    records = [await decision(world, response.headers[HEADER]) for response in responses]
    assert (records[0].gap_worker, records[0].gap_step_s) == ("", 0.0)
    waited = records[-1]
    assert (waited.outcome, waited.gap_worker) == ("ok", "w1")
    assert waited.gap_step_s > 0.05


@in_world()
async def test_a_decision_says_how_probably_its_request_meets_each_target(world: World):
    """As far as can be said: requests without targets teach it, too."""
    await world.worker("w1", script=timed(prefill_s=0.2))
    asked = long_prompt(stream=True) | {"baton": {"ttft_s": 0.5, "itl_s": 0.5}}

    first = await decision(world, (await world.ask(asked)).headers[HEADER])
    for _ in range(SAMPLES_MIN):
        untargeted = await decision(world, (await world.ask(long_prompt(stream=True))).headers[HEADER])
    last = await decision(world, (await world.ask(asked)).headers[HEADER])

    assert (first.ttft_probability, first.itl_probability) == (-1.0, -1.0)
    assert (untargeted.ttft_probability, untargeted.itl_probability) == (-1.0, -1.0)
    assert last.ttft_probability > 0.9, "0.2 s each"
    assert 0.0 <= last.itl_probability < 0.1, "0.75 s each"


@in_world(stream_tokens_min=-1)
async def test_a_disaggregated_decision_has_the_measured_times(world: World):
    await world.pair(timed(queue_s=0.25, prefill_s=1.0), timed(queue_s=0.125, fetch_s=0.0625, prefill_s=0.03), **OURS)

    response = await world.ask(long_prompt(stream=True))

    record = await decision(world, response.headers[HEADER])
    assert (record.mode, record.prefill_worker, record.decode_worker) == ("disaggregated", "p1", "d1")
    assert parts_of(record) == {
        "queue_s": 0.25,
        "prefill_s": 1.0,
        "handoff_s": 0.0625,
        "decode_queue_s": 0.0625,
        "decode_prefill_s": 0.03,
    }


@in_world()
async def test_streamed_handoff_time_beside_the_prefill_is_counted_once(world: World):
    await world.pair(
        timed(queue_s=0.25, prefill_s=1.0), timed(queue_s=1.3, fetch_s=1.3, prefill_s=0.03, follows=True), **OURS
    )

    response = await world.ask(long_prompt(stream=True))

    assert parts_of(await decision(world, response.headers[HEADER])) == {
        "queue_s": 0.25,
        "prefill_s": 1.0,
        "handoff_s": 0.05,
        "decode_prefill_s": 0.03,
    }


@pytest.mark.parametrize("stream", [True, False])
@in_world()
async def test_a_decision_asked_for_before_its_last_report_is_complete(world: World, stream: bool):
    await world.pair(timed(prefill_s=2.4), timed(), **OURS)
    connection, answering = world.begin(msgspec.json.encode(long_prompt(stream=stream)))
    await asyncio.sleep(2)
    assert connection.http_request is not None
    assert (connection.http_request.ended, answering.done()) == (True, False)
    bus, named = MemoryBus(world.hub), DecisionId(parse(connection.written).headers[HEADER])
    ask = AskDecision(router_id=world.router.router_id, decision_id=named)

    record, told = await asyncio.gather(decision(world, named), bus.ask(DECISION, ask, timeout_s=2.0))

    assert record == told.decision
    assert (record.outcome, record.counted_prompt_tokens, record.cached_tokens) == ("ok", 9, 4)
    await answering


@in_world()
async def test_a_failed_attempt_is_a_decision_and_counts_in_the_next(world: World):
    await world.worker("w1", script=slowly_failing(2.0))
    connection, answering = world.begin(msgspec.json.encode(long_prompt(stream=True)))
    await settle()
    await world.worker("w2", script=timed(prefill_s=0.5))
    await answering
    last = await decision(world, "latest")

    first = await decision(world, last.earlier)
    assert connection.written.startswith(b"HTTP/1.1 200")
    assert (first.decode_worker, first.attempt, first.outcome) == ("w1", 1, "worker_lost")
    assert (first.measured, first.ttft_s, first.regret_s) == (None, -1, -1)
    assert (last.decode_worker, last.attempt, last.outcome) == ("w2", 2, "ok")
    assert parts_of(last) == {"failed_s": 2.0, "prefill_s": 0.5}


@in_world()
async def test_a_rejection_is_a_decision(world: World):
    await world.worker("w1", script=timed())
    world.workers["w1"].alive = False
    await asyncio.sleep(10)

    response = await world.ask(prompt())

    record = await decision(world, response.headers[HEADER])
    assert response.status == 503
    assert (record.mode, record.decode_worker, record.outcome) == ("", "", "no_worker")
    assert record.reason == response.error["message"]


@in_world()
async def test_a_request_that_was_never_placed_has_no_decision(world: World):
    response = await world.ask(prompt(cache_hit_threshold=7))

    assert response.status == 400
    assert HEADER not in response.headers
    assert (await get(world, "/baton/decisions/latest")).status_code == 404


@in_world()
async def test_a_running_decision_has_no_outcome(world: World):
    await world.worker("w1", script=timed(prefill_s=5.0))
    _connection, answering = world.begin(msgspec.json.encode(prompt(stream=True)))
    await asyncio.sleep(1)

    record = await decision(world, "latest")
    assert (record.decode_worker, record.outcome, record.measured, record.ttft_s) == ("w1", "", None, -1)

    await answering
    assert (await decision(world, record.decision_id)).outcome == "ok"


@in_world()
async def test_the_collectors_report_names_the_decision_and_sums_up(world: World):
    heard = await world.reports()
    await world.worker("w1", script=timed(queue_s=0.3, prefill_s=0.2))

    response = await world.ask(prompt())
    await asyncio.sleep(1)

    (record,) = heard
    assert record.decision_id == response.headers[HEADER]
    assert record.ttft_parts is not None
    assert record.ttft_s == pytest.approx(record.ttft_parts.total_s()) == pytest.approx(0.5)
    assert record.e2e_s == pytest.approx(2.0)


@in_world()
async def test_decisions_are_listed_newest_first_and_filtered(world: World):
    await world.worker("w1", script=timed(prefill_s=0.2))
    for name in ("a", "b", "c"):
        await world.ask(prompt(), x_request_id=name)

    async def names(**params: Any) -> list[str]:
        response = await get(world, "/baton/decisions", **params)
        return [one["request_id"] for one in response.json()["decisions"]]

    assert await names() == ["c", "b", "a"]
    assert await names(limit=1) == ["c"]
    assert await names(request_id="b", worker="w1", outcome="ok") == ["b"]
    assert await names(slow=0.3) == await names(worker="w2") == await names(missed=True) == []
    wrong = await get(world, "/baton/decisions", limit=10**9, slow="soon")
    assert wrong.status_code == 400
    assert wrong.json()["error"]["message"].startswith("slow: ")
    assert ".py" not in wrong.text


@in_world()
async def test_any_router_finds_decisions_of_any_other(world: World):
    other = DecisionService(
        RouterId("other-1"),
        MemoryBus(world.hub),
        LoopClock(),
        lambda: [world.router.router_id, RouterId("gone-1")],
        lambda: None,
        bytes_max=10**6,
    )
    await other.open()
    await world.worker("w1", script=timed(prefill_s=0.2))
    response = await world.ask(prompt(), x_request_id="mine")

    by_id = await other.find(response.headers[HEADER])

    assert by_id is not None
    assert by_id.request_id == "mine"
    assert by_id == await other.newest() == await other.of_request("mine")
    assert await other.of_request("unknown") is None
    assert await other.find(f"gone-1-d{7:032x}") is None
    assert await other.find("gone-1-d7") is None


@in_world(decisions_bytes_max=1)
async def test_forgotten_and_unknown_decisions_get_clear_messages(world: World):
    await world.worker("w1", script=timed())
    first = (await world.ask(prompt())).headers[HEADER]
    await world.ask(prompt())

    async def message(decision_id: str) -> str:
        response = await get(world, f"/baton/decisions/{decision_id}")
        assert response.status_code == 404
        return response.json()["error"]["message"]

    assert "does not store" in await message(first)
    assert "does not respond" in await message(f"gone-router-d{3:032x}")
    assert "x-baton-decision" in await message("what")
    assert "x-baton-decision" in await message(f"a.b*>-d{3:032x}")


@in_world()
async def test_a_router_returns_its_decisions_over_the_bus(world: World):
    await world.worker("w1", script=timed())
    response = await world.ask(prompt(), x_request_id="mine")
    bus, router_id = MemoryBus(world.hub), world.router.router_id

    async def ask(**fields: Any) -> DecisionRecord | None:
        return (await bus.ask(DECISION, AskDecision(router_id=router_id, **fields), timeout_s=1.0)).decision

    newest = await ask()
    assert newest is not None
    assert newest.decision_id == response.headers[HEADER]
    assert newest == await ask(decision_id=newest.decision_id) == await ask(request_id=RequestId("mine"))
    assert await ask(decision_id=DecisionId("x-d1")) is None
    assert await ask(request_id=RequestId("x")) is None


@in_world()
async def test_ids_of_decisions_cannot_be_guessed(world: World):
    await world.worker("w1", script=timed())

    ids = [(await world.ask(prompt())).headers[HEADER] for _ in range(4)]

    for one in ids:
        assert re.fullmatch(rf"{world.router.router_id}-d[0-9a-f]{{32}}", one)
    bits = [int(one.rpartition("-d")[2], 16) for one in ids]
    assert min(abs(a - b) for a, b in itertools.combinations(bits, 2)) > 1 << 64


def test_a_list_that_matches_nothing_lets_other_requests_run():
    async def scenario(world: World) -> None:
        service = world.router.decisions
        for number in range(3 * SLICE):
            service.log.add(
                RequestId(f"r{number}"),
                PlacementRequest(model="m"),
                Rejection(reason=Reason.WORKER_BUSY, message=""),
                at_unix_s=0.0,
            )
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        running = asyncio.create_task(others())
        assert await service.listed(DecisionFilter(worker_id="nobody")) == []
        assert turns >= 2
        assert len(await service.listed(DecisionFilter(limit=10**9))) == LISTED_MAX
        assert [one.request_id for one in await service.listed(DecisionFilter(request_id="r7"))] == ["r7"]
        running.cancel()

    run_in_world(scenario)


@in_world()
async def test_a_decision_contains_no_prompt_text(world: World):
    await world.pair(timed(), timed(), **OURS)
    response = await world.ask(prompt(prompt="the secret word", user="somebody"), x_request_id="r")

    text = (await get(world, f"/baton/decisions/{response.headers[HEADER]}")).text
    assert "secret" not in text
    assert "somebody" not in text


@in_world()
async def test_a_prompt_that_was_not_tokenized_says_why_and_its_token_ids_are_counted(world: World):
    await world.worker("w1")

    await world.ask({**prompt(), "prompt": [5, 6, 7]})
    alone = world.router.decisions.log.newest_first()[0]
    await world.worker("w2")
    await world.ask(prompt())
    two = world.router.decisions.log.newest_first()[0]

    assert (alone.exact, alone.why_inexact) == (False, NOT_READ)
    assert alone.request.prompt_tokens == 3
    assert (two.exact, two.why_inexact) == (False, NO_TOKENIZER)
