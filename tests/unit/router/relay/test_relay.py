"""Requests through a whole router: legs, retries, cancellations and deadlines, with scripted workers."""

from __future__ import annotations

import asyncio

import pytest

from services.router.relay.failure_policy import FailurePolicy
from shared.bus.frame_sender import LegFrames
from shared.contracts.channels import WORKER_LOST
from shared.contracts.failures import Failure, Reason
from shared.contracts.inference import LegKind, LegReport, StartLeg
from shared.contracts.workers import Role, WorkerLost
from tests.unit.router.fake_worker import DONE, EVENTS, JSON, SSE, WHOLE_RESPONSE, FakeWorker, serve_leg
from tests.unit.router.world import CHAT, World, give_legs, in_world, long_prompt, parse, prompt, settle


def failing(reason: Reason):
    def script(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.fail(Failure(reason=reason, message="as the test wants"))

    return script


def silent(_worker: FakeWorker, _start: StartLeg, _frames: LegFrames) -> None:
    """Accept the leg and send nothing."""


@in_world()
async def test_a_request_is_prefilled_on_one_worker_and_decoded_on_another(world: World):
    p1, d1 = await world.pair()

    response = await world.ask(prompt())

    assert (response.status, response.body) == (200, WHOLE_RESPONSE)
    assert response.headers["x-baton-mode"] == "disaggregated"
    assert response.headers["x-baton-prefill-worker"] == "p1"
    assert response.headers["x-baton-decode-worker"] == "d1"
    assert [leg.kind for leg in p1.started] == [LegKind.PREFILL]
    assert [(leg.kind, leg.kv_transfer, leg.prefill_cached_tokens) for leg in d1.started] == [
        (LegKind.DECODE, b'{"from":"p1"}', 4)
    ]


@in_world()
async def test_both_legs_receive_the_clients_bytes_unchanged(world: World):
    p1, d1 = await world.pair()
    body = b'{ "model":"m",\t"prompt":"h\\u00e9llo" , "max_tokens":1.0e1}'

    await world.ask(body)

    assert p1.started[0].body == body
    assert d1.started[0].body == body


@in_world()
async def test_streams_are_relayed_event_by_event_to_the_last(world: World):
    await world.pair()

    response = await world.ask(prompt(stream=True))

    assert response.headers["content-type"] == SSE
    assert response.body == b"".join(EVENTS) + DONE


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"echo": True},
        {"prompt_logprobs": 1},
        {"best_of": 2},
        {"use_beam_search": True},
        {"prompt": ["a", "b"]},
    ],
    ids=lambda fields: next(iter(fields)),
)
@in_world()
async def test_unsplittable_requests_are_served_by_one_worker(world: World, fields):
    p1, d1 = await world.pair()

    response = await world.ask(prompt(**fields))

    assert response.headers["x-baton-mode"] == "aggregated"
    assert (p1.started, [leg.kind for leg in d1.started]) == ([], [LegKind.AGGREGATED])


@in_world()
async def test_a_client_can_request_aggregated_mode(world: World):
    await world.pair()

    response = await world.ask(prompt(), x_baton_mode="aggregated")

    assert response.headers["x-baton-mode"] == "aggregated"


@in_world()
async def test_with_one_role_missing_the_other_role_serves_alone(world: World):
    await world.worker("p1", Role.PREFILL)

    response = await world.ask(prompt())

    assert (response.status, response.headers["x-baton-mode"]) == (200, "aggregated")


@in_world()
async def test_an_unknown_model_gets_404_and_starts_no_leg(world: World):
    p1, d1 = await world.pair()

    response = await world.ask(prompt(model="nope"))

    assert (response.status, response.error["code"]) == (404, "model_not_found")
    assert p1.started == d1.started == []


@in_world()
async def test_before_the_registry_is_read_no_model_gets_404(world: World):
    await world.worker("w1")
    world.router.fleet.cluster.is_whole = False

    response = await world.ask(prompt(model="nope"))

    assert (response.status, response.error["code"]) == (503, "bus_down")


@in_world()
async def test_without_workers_clients_get_retry_after(world: World):
    worker = await world.worker("w1")
    await worker.vanish()
    await asyncio.sleep(5)

    response = await world.ask(prompt())

    assert response.status == 503
    assert int(response.headers["retry-after"]) >= 1


@in_world()
async def test_an_unreadable_body_gets_the_engines_own_error(world: World):
    def refuse(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.head(400, JSON)
        frames.data(b'{"error":{"message":"from the engine"}}')
        frames.end(LegReport())

    await world.pair(refuse, refuse)

    response = await world.ask(b"{not json")

    assert (response.status, response.error["message"]) == (400, "from the engine")


@in_world()
async def test_an_unreadable_body_without_engines_gets_400(world: World):
    assert (await world.ask(b"\x00\xff")).status == 400


@in_world()
async def test_the_client_gets_the_engines_error_for_the_prefill_leg(world: World):
    def refuse(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.head(400, JSON)
        frames.data(b'{"error":{"message":"prompt too long"}}')
        frames.end(LegReport())

    _p1, d1 = await world.pair(prefill=refuse)

    response = await world.ask(prompt())

    assert (response.status, response.error["message"]) == (400, "prompt too long")
    assert d1.started == []


@pytest.mark.parametrize("reason", [Reason.WORKER_DRAINING, Reason.WORKER_BUSY, Reason.WORKER_LOST, Reason.ENGINE_DEAD])
@in_world()
async def test_a_leg_failing_before_the_first_byte_moves_to_another_worker(world: World, reason):
    await world.pair(decode=failing(reason))
    d2 = await world.worker("d2", Role.DECODE)
    give_legs(world, "d2", 5)  # The router tries d1 first.

    response = await world.ask(prompt(stream=True))

    assert (response.status, response.headers["x-baton-decode-worker"]) == (200, "d2")
    assert len(d2.started) == 1


@in_world()
async def test_a_worker_without_a_subscription_fails_at_once(world: World):
    p1, _d1 = await world.pair()
    await world.worker("p2", Role.PREFILL)
    await p1.vanish()
    give_legs(world, "p2", 5)
    begun = asyncio.get_running_loop().time()

    response = await world.ask(prompt())

    assert response.headers["x-baton-prefill-worker"] == "p2"
    assert asyncio.get_running_loop().time() - begun < 0.1


@in_world(failures=FailurePolicy(attempts_max=3))
async def test_attempts_are_bounded_and_the_client_gets_the_reason(world: World):
    for number in range(5):
        await world.worker(f"w{number}", script=failing(Reason.WORKER_LOST))

    response = await world.ask(prompt(), x_baton_mode="aggregated")

    assert (response.status, response.error["code"]) == (502, "worker_lost")
    assert sum(len(worker.started) for worker in world.workers.values()) == 3


@in_world()
async def test_declaring_a_worker_lost_frees_its_requests(world: World):
    _p1, d1 = await world.pair(decode=silent)
    connection, answering = world.begin(b'{"model":"m","prompt":"x"}')
    await settle()
    await world.worker("d2", Role.DECODE)

    await world.bus.publish(WORKER_LOST, WorkerLost(worker_id=d1.worker_id, epoch=d1.epoch, silent_s=3.0))
    await answering

    assert parse(connection.written).headers["x-baton-decode-worker"] == "d2"


@in_world(failures=FailurePolicy(resumes_max=0))
async def test_a_broken_stream_without_migration_ends_with_an_error_event(world: World):
    async def break_off(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
        if start.kind is LegKind.PREFILL:
            serve_leg(worker, start, frames)
            return
        frames.head(200, SSE)
        frames.data(EVENTS[0])
        await asyncio.sleep(0.01)
        frames.fail(Failure(reason=Reason.ENGINE_DEAD, message="the engine died"))

    await world.pair(decode=break_off)
    await world.worker("d2", Role.DECODE)
    give_legs(world, "d2", 5)

    response = await world.ask(prompt(stream=True))

    assert response.status == 200
    assert response.body.startswith(EVENTS[0] + b'data: {"error":')
    assert b"engine_dead" in response.body
    assert DONE not in response.body


@in_world()
async def test_a_failure_between_head_and_data_is_retried(world: World):
    def head_only(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.head(200, SSE)
        frames.fail(Failure(reason=Reason.ENGINE_DEAD, message="died"))

    await world.pair(decode=head_only)
    await world.worker("d2", Role.DECODE)
    give_legs(world, "d2", 5)

    response = await world.ask(prompt(stream=True))

    assert response.headers["x-baton-decode-worker"] == "d2"
    assert response.body == b"".join(EVENTS) + DONE


@pytest.mark.parametrize("stuck", ["p1", "d1"])
@in_world()
async def test_a_client_disconnect_cancels_its_running_leg(world: World, stuck):
    scripts = {"prefill" if stuck == "p1" else "decode": silent}
    await world.pair(**scripts)
    connection, answering = world.begin(b'{"model":"m","prompt":"x","stream":true}')
    await settle()

    connection.leave()
    await answering
    await settle()

    worker = world.workers[stuck]
    assert worker.cancelled == [worker.started[0].leg_id]
    assert connection.written == b""
    assert not world.router.relay.in_flight


@in_world(first_frame_s_max=2.0)
async def test_another_worker_takes_over_from_a_silent_prefill_worker(world: World):
    p1, _d1 = await world.pair(prefill=silent)
    await world.worker("p2", Role.PREFILL)
    give_legs(world, "p2", 5)

    response = await world.ask(prompt())

    assert response.headers["x-baton-prefill-worker"] == "p2"
    assert p1.cancelled == [p1.started[0].leg_id]


@in_world(frame_gap_s_max=3.0)
async def test_a_stalled_stream_ends_with_an_error_event(world: World):
    def stall(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.head(200, SSE)
        frames.data(EVENTS[0])

    worker = await world.worker("w1", script=stall)

    response = await world.ask(prompt(stream=True))

    assert b'"code":"deadline"' in response.body
    await settle()
    assert worker.cancelled


EMPTY = b""


def telling(pieces: list[bytes], step_s: float):
    """Sends a piece of a stream, and waits; then the next. An empty one tells of tokens that show nothing."""

    async def script(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.head(200, SSE)
        for piece in pieces:
            frames.data(piece)
            await asyncio.sleep(step_s)
        frames.data(DONE)
        frames.end(LegReport())

    return script


@pytest.mark.parametrize("pieces", [[EVENTS[0], EMPTY, EMPTY, EMPTY, EVENTS[1]], [EMPTY, EMPTY, EMPTY, *EVENTS]])
@in_world(frame_gap_s_max=3.0, first_frame_s_max=3.0)
async def test_tokens_that_show_nothing_keep_a_stream_alive(world: World, pieces: list[bytes]):
    worker = await world.worker("w1", script=telling(pieces, 2.0))

    response = await world.ask(prompt(stream=True))

    assert response.body == b"".join(pieces) + DONE
    assert len(worker.started) == 1


@pytest.mark.parametrize("pieces", [list(EVENTS) * 10, [EMPTY] * 30, [EVENTS[0], *[EMPTY] * 30, EVENTS[1]]])
@in_world(request_s_max=6.0, frame_gap_s_max=2.0)
async def test_a_stream_that_makes_progress_has_no_total_limit(world: World, pieces: list[bytes]):
    worker = await world.worker("w1", script=telling(pieces, 1.0))

    response = await world.ask(prompt(stream=True))

    assert response.body == b"".join(pieces) + DONE
    assert [leg.deadline_s for leg in worker.started] == [6.0]


@in_world(request_s_max=6.0, frame_gap_s_max=2.0, first_frame_s_max=1000.0)
async def test_a_stream_that_breaks_off_late_has_the_limit_again_for_its_next_token(world: World):
    async def break_off(_worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
        frames.head(200, SSE)
        for _ in range(9):
            frames.data(EVENTS[0], [1])
            await asyncio.sleep(1.0)
        frames.fail(Failure(reason=Reason.WORKER_DRAINING, message="as the test wants"))

    w1 = await world.worker("w1", script=break_off)
    w2 = await world.worker("w2", script=silent)
    give_legs(world, "w2", 5)
    begun = asyncio.get_running_loop().time()

    response = await world.ask(prompt(stream=True))

    assert response.body.count(EVENTS[0]) == 9
    assert b'"code":"deadline"' in response.body
    assert [leg.deadline_s for leg in w1.started + w2.started] == [6.0, 6.0]
    assert asyncio.get_running_loop().time() - begun < 9.0 + 6.0 + 0.5


@in_world(request_s_max=6.0, frame_gap_s_max=2.0)
async def test_a_router_that_stops_ends_a_stream_that_makes_progress(world: World):
    worker = await world.worker("w1", script=telling(list(EVENTS) * 10, 1.0))
    connection, answering = world.begin(b'{"model":"m","prompt":"x","stream":true}')
    await asyncio.sleep(8.0)

    context = next(iter(world.router.relay.in_flight))
    world.router.deadline_monitor.end_all()
    context.progressed(1e9)  # An event that was on its way.
    assert context.ends_at <= asyncio.get_running_loop().time()
    await answering

    assert b"router_stopping" in connection.written
    await settle()
    assert worker.cancelled


@in_world(frame_gap_s_max=3.0)
async def test_the_error_of_a_stream_that_cannot_be_resumed_is_one_sentence(world: World):
    await world.worker("w1", script=telling([EVENTS[0]], 100.0))

    response = await world.ask(prompt(stream=True, n=2))

    assert b"too long; and the stream could not be resumed" in response.body


@in_world(request_s_max=10.0, first_frame_s_max=1000.0)
async def test_no_request_outlives_its_deadline_whatever_its_other_timeouts(world: World):
    await world.worker("w1", script=silent)
    begun = asyncio.get_running_loop().time()

    response = await world.ask(prompt())

    assert (response.status, response.error["code"]) == (504, "deadline")
    assert asyncio.get_running_loop().time() - begun < 10.5


@in_world(frame_gap_s_max=2.0, leg_buffer_bytes_max=100_000)
async def test_a_client_that_does_not_read_is_disconnected(world: World):
    async def flood(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.head(200, SSE)
        while not frames.ended:
            frames.data(b"x" * 1000)
            await asyncio.sleep(0.001)

    worker = await world.worker("w1", script=flood)
    connection, answering = world.begin(b'{"model":"m","prompt":"x","stream":true}')
    await settle()
    connection.reads.clear()

    await answering

    assert connection.aborted
    await settle()
    assert worker.cancelled


@in_world()
async def test_a_nats_outage_ends_running_requests_at_once(world: World):
    await world.worker("w1", script=silent)
    connection, answering = world.begin(b'{"model":"m","prompt":"x"}')
    await settle()

    world.bus.lose()
    await answering

    assert parse(connection.written).error["code"] == "bus_down"


@in_world()
async def test_lost_frames_fail_the_leg_but_exclude_no_worker(world: World):
    attempts = []

    def lose_one(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
        attempts.append(start)
        if len(attempts) == 1:
            frames._seq = 1
        serve_leg(worker, start, frames)

    await world.worker("w1", script=lose_one)

    response = await world.ask(prompt())

    assert (response.status, len(attempts)) == (200, 2)


@in_world()
async def test_a_workers_load_returns_to_zero_after_its_legs(world: World):
    await world.pair()
    for stream in (True, False):
        await world.ask(prompt(stream=stream))

    views = world.router.fleet.cluster.workers.values()
    assert [(view.own.legs, view.own.tokens) for view in views] == [(0, 0), (0, 0)]


@in_world()
async def test_equal_workers_alternate(world: World):
    for number in range(3):
        await world.worker(f"w{number}")

    for _ in range(6):
        await world.ask(prompt(), x_baton_mode="aggregated")

    assert [len(worker.started) for worker in world.workers.values()] == [2, 2, 2]


@in_world()
async def test_other_endpoints_are_forwarded_to_one_worker(world: World):
    p1, d1 = await world.pair()

    await world.ask({"model": "m", "input": "x"}, path="/v1/embeddings")

    assert p1.started == []
    assert [(leg.kind, leg.path) for leg in d1.started] == [(LegKind.AGGREGATED, "/v1/embeddings")]


@in_world()
async def test_the_request_id_and_trace_context_are_forwarded(world: World):
    p1, d1 = await world.pair()
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    response = await world.ask(
        {"model": "m", "messages": [{"role": "user", "content": "x"}]},
        path=CHAT,
        x_request_id="mine-1",
        traceparent=trace,
    )

    assert response.headers["x-request-id"] == p1.started[0].request_id == d1.started[0].request_id == "mine-1"
    assert p1.headers[0]["traceparent"] == d1.headers[0]["traceparent"] == trace


@pytest.mark.parametrize("bad", [{"tokens": [5, -1]}, {"tokens": [1 << 32]}, {"tokens": [5], "joined": [-7]}], ids=str)
@in_world()
async def test_token_ids_that_are_none_fail_the_leg(world: World, bad, caplog):
    def lie(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.head(200, SSE)
        frames.data(EVENTS[0], bad["tokens"], joined=bad.get("joined"))

    worker = await world.worker("w1", script=lie)

    broken = await world.ask(prompt(stream=True))
    worker.script = serve_leg

    assert (broken.status, broken.error["code"]) == (500, "bad_message")
    assert "token ids" in broken.error["message"]
    assert not [one for one in caplog.records if one.exc_info]
    assert worker.cancelled
    assert (await world.ask(prompt(stream=True))).body == b"".join(EVENTS) + DONE


@pytest.mark.parametrize("status", [204, 304])
@in_world()
async def test_a_response_without_content_passes_without_a_body(world: World, status: int):
    def smuggle(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.head(status, JSON)
        frames.data(b"HTTP/1.1 200 OK\r\n\r\n")
        frames.end(LegReport())

    await world.worker("w1", script=smuggle)

    response = await world.ask(prompt())

    assert (response.status, response.body) == (status, b"")
    assert "content-length" not in response.headers


@in_world()
async def test_a_protocol_violation_fails_the_request_not_the_router(world: World):
    def no_head(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.data(b"surprise")
        frames.end(LegReport())

    worker = await world.worker("w1", script=no_head)

    broken = await world.ask(prompt())
    worker.script = serve_leg

    assert (broken.status, broken.error["code"]) == (500, "bad_message")
    assert (await world.ask(prompt())).status == 200


@in_world()
async def test_a_client_that_disconnects_before_placement_starts_no_leg(world: World):
    p1, d1 = await world.pair()
    connection, answering = world.begin(b'{"model":"m","prompt":"x"}')
    connection.leave()

    await answering

    assert (p1.started, d1.started, connection.written) == ([], [], b"")


@pytest.mark.parametrize("field", ["cache_hit_threshold", "kv_fetch_min_tokens"])
@in_world()
async def test_an_invalid_baton_field_gets_400_and_starts_no_leg(world: World, field):
    p1, d1 = await world.pair()

    response = await world.ask(prompt(**{field: True}))

    assert (response.status, response.error["param"]) == (400, field)
    assert response.error["type"] == "invalid_request_error"
    assert "must be" in response.error["message"]
    assert p1.started == d1.started == []


@in_world()
async def test_a_requests_cache_options_reach_its_workers(world: World):
    p1, d1 = await world.pair(connector="baton-1")

    await world.ask(long_prompt(cache_hit_threshold=0.5, kv_fetch_min_tokens=100), x_baton_mode="disaggregated")
    await world.ask(long_prompt())

    limits = [(leg.cache_hit_threshold, leg.kv_fetch_min_tokens) for leg in (*p1.started, *d1.started)]
    assert limits == [(0.0, 100), (0.0, None), (0.5, 100), (0.0, None)]


@in_world()
async def test_a_requests_target_for_the_time_between_tokens_reaches_its_workers(world: World):
    p1, d1 = await world.pair()

    await world.ask(prompt(baton={"itl_s": 0.05}), x_baton_mode="disaggregated")
    await world.ask(prompt(), x_baton_mode="disaggregated")

    assert [leg.itl_target_s for leg in p1.started] == [leg.itl_target_s for leg in d1.started] == [0.05, 0.0]


@pytest.mark.parametrize(("threshold", "mode"), [(0.5, "aggregated"), (0, "disaggregated"), (None, "disaggregated")])
@in_world()
async def test_a_cache_threshold_prevents_prefill_legs(world: World, threshold, mode):
    await world.pair(connector="baton-1")

    response = await world.ask(long_prompt(cache_hit_threshold=threshold))

    assert response.headers["x-baton-mode"] == mode
