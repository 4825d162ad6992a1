"""Handoffs through a whole router: an offer after the prefill, or KV streamed during it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from services.router.relay.attempt import REPORT_S_MAX
from services.router.relay.start_leg import LegLoad, LegLoads
from shared.bus.frame_sender import LegFrames
from shared.contracts.channels import FRAMES
from shared.contracts.failures import Failure, Reason
from shared.contracts.ids import LegId, RequestId, RouterId
from shared.contracts.inference import Frame, FrameBatch, FrameKind, LegKind, LegReport, StartLeg
from shared.contracts.kv_exchange import GroupBlocks, KvOffer, KvRead, KvSource, KvTransferReport
from shared.contracts.workers import Role
from tests.support.pulled_legs import PulledLeg
from tests.unit.router.fake_worker import DONE, EVENTS, JSON, SSE, WHOLE_RESPONSE, FakeWorker, serve_leg, wants_stream
from tests.unit.router.world import World, give_legs, in_world, long_prompt, parse, prompt, settle

OURS = {"connector": "baton-1"}
BLOCKS = [GroupBlocks(first=0, block_ids=b"\x01\0\0\0")]
OFFER = KvOffer(worker_id="p1", epoch=1, lease_id="lease-1", groups=BLOCKS, last_hash=b"h" * 32, until_s=9.0)
PREFILL_TRANSFER = KvTransferReport(prompt_tokens=9, local_tokens=4, fetched_tokens=3, recomputed_tokens=2)
PREFILLED = LegReport(prompt_tokens=9, cached_tokens=4, kv=PREFILL_TRANSFER)


def silent(_worker: FakeWorker, _start: StartLeg, _frames: LegFrames) -> None:
    """Accept the leg and send nothing."""


def silent_once(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
    """Respond to the second leg."""
    if len(worker.started) > 1:
        serve_leg(worker, start, frames)


def prefilled(frames: LegFrames) -> None:
    frames.head(200, JSON)
    frames.end(PREFILLED)


def lost(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
    frames.fail(Failure(reason=Reason.WORKER_LOST, message="as the test wants"))


def refusing(status: int):
    def script(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.head(status, JSON)
        frames.data(b'{"error":{"message":"from the engine"}}')
        frames.end(LegReport())

    return script


def ask(world: World, *, stream: bool = True):
    return world.begin(msgspec.json.encode(long_prompt(stream=stream)))


def frames_of(worker: FakeWorker) -> LegFrames:
    (frames,) = worker.frames.values()
    return frames


def is_quiet(world: World) -> bool:
    """Whether no leg runs and no load is counted."""
    views = world.router.fleet.cluster.workers.values()
    even = all((view.own.legs, view.own.tokens) == (0, 0) for view in views)
    tasks = [task for task in asyncio.all_tasks() if task.get_name() == "prefill-leg"]
    return even and not tasks and not world.router.relay.in_flight and not world.router.inbox._legs


@in_world(stream_tokens_min=-1)
async def test_the_decode_leg_receives_the_prefill_legs_offer(world: World):
    def offering(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
        frames.head(200, JSON)
        frames.end(LegReport(cached_tokens=4, kv_transfer=b"{}", kv=KvTransferReport(offer=OFFER)))

    p1, d1 = await world.pair(offering, **OURS)

    response = await world.ask(long_prompt())

    (prefill,), (decode,) = p1.started, d1.started
    assert response.headers["x-baton-handoff"] == "offered"
    assert (prefill.kv_offer, prefill.kv_sources) == (True, [])
    assert msgspec.msgpack.decode(decode.kv_transfer, type=KvOffer) == OFFER
    assert decode.kv_sources == [KvSource(worker_id="p1", epoch=1)]
    assert decode.prefill_cached_tokens == 4


@in_world()
async def test_an_aggregated_response_reports_no_handoff(world: World):
    await world.pair(**OURS)

    response = await world.ask(long_prompt(), x_baton_mode="aggregated")

    assert "x-baton-handoff" not in response.headers


@pytest.mark.parametrize("mode", ["auto", "disaggregated"])
@in_world()
async def test_a_prompt_without_a_block_to_hand_over_goes_to_one_worker(world: World, mode):
    p1, d1 = await world.pair(**OURS)

    response = await world.ask(prompt(), x_baton_mode=mode)

    assert (response.status, response.headers["x-baton-mode"]) == (200, "aggregated")
    assert not {"x-baton-handoff", "x-baton-prefill-worker"} & set(response.headers)
    assert p1.started == []
    assert [(leg.kind, leg.cache_hit_threshold) for leg in d1.started] == [(LegKind.AGGREGATED, 0.0)]
    (decision,) = world.router.decisions.log.newest_first()
    assert decision.record(RouterId("r")).reason == "there is less than one block of KV to hand over"


@in_world()
async def test_legs_reserve_what_running_legs_do_not_share(world: World):
    """Two legs of one prompt hold its blocks once; each has its own answer."""
    _p1, d1 = await world.pair(silent, silent, **OURS)
    hashes = (1, 2)
    cluster = world.router.fleet.cluster
    cluster.workers[d1.worker_id].kv_used = 0.6
    loads = LegLoads(cluster, world.router.reservations, lambda: None, lambda: 0.0)
    start = StartLeg(
        worker_id=d1.worker_id, router_id=RouterId("r"), request_id=RequestId("q"), leg_id=LegId("l"),
        kind=LegKind.DECODE, path="/v1/completions", body=b"", deadline_s=1.0,
    )  # fmt: skip

    first, second = (LegLoad(loads, start, 100, hashes) for _ in range(2))

    own = cluster.workers[d1.worker_id].own
    assert own.context_tokens == own.sent_context_tokens == 100 + (100 - 64)
    second.ended()
    first.ended()
    assert (own.context_tokens, own.sent_context_tokens, own.prompts.shared(hashes)) == (0, 0, 0)


@pytest.mark.parametrize(("word_count", "handoff"), [(100, "offered"), (4000, "streamed")])
@in_world(stream_tokens_min=1024)
async def test_decode_is_dispatched_with_prefill_when_the_prompt_is_long(world: World, word_count, handoff):
    await world.pair(**OURS)

    response = await world.ask(prompt(prompt="word " * word_count))

    assert response.headers["x-baton-handoff"] == handoff


@pytest.mark.parametrize("stream", [True, False])
@in_world()
async def test_a_streamed_decode_leg_needs_no_prefill_report(world: World, stream):
    p1, d1 = await world.pair(prefill=silent, **OURS)
    connection, answering = ask(world, stream=stream)
    await settle()
    (prefill,), (decode,) = p1.started, d1.started
    prefilled(frames_of(p1))
    await answering

    response = parse(connection.written)
    assert (prefill.kind, prefill.kv_offer) == (LegKind.PREFILL, False)
    assert (decode.kind, decode.kv_transfer) == (LegKind.DECODE, b"")
    assert decode.kv_sources == [KvSource(worker_id="p1", epoch=1, follow=True, leg_id=prefill.leg_id)]
    assert response.body == (b"".join(EVENTS) + DONE if stream else WHOLE_RESPONSE)
    assert response.headers["x-baton-handoff"] == "streamed"
    assert p1.cancelled == d1.cancelled == []
    assert is_quiet(world)


@in_world()
async def test_with_both_legs_running_the_prompt_counts_for_prefill_only(world: World):
    await world.pair(silent, silent, **OURS)
    connection, answering = ask(world)
    await settle()

    views = world.router.fleet.cluster.workers
    assert [(views[name].own.legs, views[name].own.tokens) for name in ("p1", "d1")] == [(1, 97), (1, 0)]

    connection.leave()
    await answering


@pytest.mark.parametrize("stream", [True, False])
@in_world()
async def test_a_prompt_rejected_by_the_engine_ends_the_decode_leg(world: World, stream):
    _p1, d1 = await world.pair(refusing(400), silent, **OURS)

    response = await world.ask(long_prompt(stream=stream))
    await settle()

    assert (response.status, response.error["message"]) == (400, "from the engine")
    assert asyncio.get_running_loop().time() < 1
    assert d1.cancelled == [leg.leg_id for leg in d1.started]
    assert is_quiet(world)


@pytest.mark.parametrize("failing", [lost, refusing(503)], ids=["lost", "full"])
@in_world()
async def test_a_lost_prefill_worker_has_both_legs_placed_again(world: World, failing):
    reports = await world.reports()
    p1, d1 = await world.pair(failing, silent_once, **OURS)
    await world.worker("p2", Role.PREFILL, **OURS)
    give_legs(world, "p2", 5)  # The router tries p1 first.

    response = await world.ask(long_prompt(stream=True))
    give_legs(world, "p2", 0)
    await asyncio.sleep(2)

    assert (response.status, response.headers["x-baton-prefill-worker"]) == (200, "p2")
    assert (len(p1.started), len(d1.started)) == (1, 2)
    assert d1.cancelled == [d1.started[0].leg_id]
    assert (reports[0].attempts, reports[0].status) == (2, 200)
    assert is_quiet(world)


@in_world()
async def test_a_lost_decode_worker_ends_prefill_and_is_alone_excluded(world: World):
    p1, _d1 = await world.pair(silent, lost, **OURS)
    await world.worker("d2", Role.DECODE, **OURS)
    give_legs(world, "d2", 5)
    began_at = asyncio.get_running_loop().time()

    response = await world.ask(long_prompt(stream=True))
    took_s = asyncio.get_running_loop().time() - began_at
    give_legs(world, "d2", 0)
    await asyncio.sleep(2)

    assert (response.status, response.headers["x-baton-decode-worker"]) == (200, "d2")
    assert took_s < 1.5 * REPORT_S_MAX, "the retry waited for the prefill leg, as the complete response does"
    assert len(p1.started) == 2
    assert p1.started[0].leg_id in p1.cancelled
    assert is_quiet(world)


@pytest.mark.parametrize("phase", ["before anything", "prompt computed", "answer begun", "both"])
@in_world()
async def test_a_client_disconnect_cancels_all_running_legs(world: World, phase):
    p1, d1 = await world.pair(silent, silent, **OURS)
    connection, answering = ask(world)
    await settle()
    if phase in ("prompt computed", "both"):
        prefilled(frames_of(p1))
    if phase in ("answer begun", "both"):
        frames_of(d1).head(200, SSE)
        frames_of(d1).data(EVENTS[0])
    await settle()

    connection.leave()
    await answering
    await settle()

    computed = phase in ("prompt computed", "both")
    assert p1.cancelled == ([] if computed else [p1.started[0].leg_id])
    assert d1.cancelled == [d1.started[0].leg_id]
    assert is_quiet(world)


@in_world()
async def test_losing_the_prefill_worker_after_the_first_token_is_harmless(world: World):
    p1, d1 = await world.pair(silent, silent, **OURS)
    connection, answering = ask(world)
    await settle()
    frames_of(d1).head(200, SSE)
    frames_of(d1).data(EVENTS[0])
    await settle()

    frames_of(p1).fail(Failure(reason=Reason.WORKER_LOST, message="gone"))
    await settle()
    frames_of(d1).data(DONE)
    frames_of(d1).end(LegReport())
    await answering

    assert parse(connection.written).body == EVENTS[0] + DONE
    assert is_quiet(world)


@in_world()
async def test_a_prefill_failure_together_with_the_first_token_is_harmless(world: World):
    p1, d1 = await world.pair(silent, silent, **OURS)
    connection, answering = ask(world)
    await settle()
    (first,), (second,) = p1.started, d1.started
    gone = Failure(reason=Reason.WORKER_LOST, message="gone")

    async def send(worker: FakeWorker, *frames: Frame) -> None:
        batch = FrameBatch(
            router_id=first.router_id, worker_id=worker.worker_id, epoch=worker.epoch, frames=list(frames)
        )
        await world.bus.publish(FRAMES, batch)

    await send(p1, Frame(leg_id=first.leg_id, seq=0, kind=FrameKind.FAILURE, failure=gone))
    await send(
        d1,
        Frame(leg_id=second.leg_id, seq=0, kind=FrameKind.HEAD, status=200, content_type=SSE),
        Frame(leg_id=second.leg_id, seq=1, kind=FrameKind.DATA, data=DONE),
    )
    await settle()
    await send(d1, Frame(leg_id=second.leg_id, seq=2, kind=FrameKind.END, report=LegReport()))
    await answering

    response = parse(connection.written)
    assert (response.status, response.body) == (200, DONE)
    assert len(d1.started) == 1
    assert is_quiet(world)


@in_world()
async def test_accounting_waits_for_a_late_prefill_leg_but_clients_do_not(world: World):
    reports = await world.reports()
    p1, _d1 = await world.pair(prefill=silent, **OURS)
    await asyncio.sleep(1)
    connection, answering = ask(world)
    await settle()
    assert parse(connection.written).body.endswith(DONE)

    await asyncio.sleep(0.5)
    prefilled(frames_of(p1))
    await answering
    await asyncio.sleep(1)

    assert (reports[0].cached_tokens, reports[0].readback_tokens, reports[0].streamed_handoff) == (4, 3, True)
    assert reports[0].e2e_s < 0.1
    assert is_quiet(world)


@in_world()
async def test_an_endless_prefill_leg_is_cancelled_after_the_response(world: World):
    p1, _d1 = await world.pair(prefill=silent, **OURS)

    response = await world.ask(long_prompt(stream=True))
    await settle()

    assert response.body.endswith(DONE)
    assert p1.cancelled == [p1.started[0].leg_id]
    assert asyncio.get_running_loop().time() < 5
    assert is_quiet(world)


@in_world(first_frame_s_max=2.0)
async def test_if_both_legs_are_silent_the_prefill_worker_is_late(world: World):
    p1, d1 = await world.pair(silent, silent_once, **OURS)
    await world.worker("p2", Role.PREFILL, **OURS)
    give_legs(world, "p2", 5)

    response = await world.ask(long_prompt(stream=True))
    await settle()

    assert response.headers["x-baton-prefill-worker"] == "p2"
    assert len(p1.cancelled) == len(d1.cancelled) == 1


@in_world(first_frame_s_max=2.0)
async def test_after_the_prefill_a_silent_decode_worker_is_late(world: World):
    _p1, d1 = await world.pair(decode=silent, **OURS)
    await world.worker("d2", Role.DECODE, **OURS)
    give_legs(world, "d2", 5)

    response = await world.ask(long_prompt(stream=True))
    await settle()

    assert response.headers["x-baton-decode-worker"] == "d2"
    assert d1.cancelled == [d1.started[0].leg_id]


@in_world(first_frame_s_max=2.0)
async def test_the_first_frame_timeout_starts_when_the_prefill_ends(world: World):
    p1, d1 = await world.pair(silent, silent, **OURS)
    connection, answering = ask(world)
    await asyncio.sleep(1.5)
    prefilled(frames_of(p1))

    await asyncio.sleep(1.5)
    frames_of(d1).head(200, SSE)
    frames_of(d1).data(DONE)
    frames_of(d1).end(LegReport())
    await answering

    assert parse(connection.written).body == DONE
    assert len(d1.started) == 1


@in_world(first_frame_s_max=20.0, frame_gap_s_max=2.0)
async def test_the_end_of_prefill_gives_a_stream_that_has_begun_no_more_time(world: World):
    p1, d1 = await world.pair(silent, silent, **OURS)
    _connection, answering = ask(world)
    await settle()
    frames_of(d1).head(200, SSE)
    frames_of(d1).data(EVENTS[0])
    await asyncio.sleep(1.0)
    prefilled(frames_of(p1))
    await settle()

    (context,) = world.router.relay.in_flight
    assert context.deadline_at == pytest.approx(context.timings.last_at + 2.0)
    frames_of(d1).data(DONE)
    frames_of(d1).end(LegReport())
    await answering


@in_world()
async def test_a_leg_starting_during_cancellation_is_cancelled(world: World):
    _p1, d1 = await world.pair(silent, silent, **OURS)
    connection, answering = ask(world)
    await settle()
    (context,) = world.router.relay.in_flight
    connection.leave()
    await answering

    late = await PulledLeg.start(context.inbox, msgspec.structs.replace(d1.started[0], leg_id="late"))
    context.started(late.leg)
    await settle()

    assert late.ended
    assert d1.cancelled == [leg.leg_id for leg in d1.started]


@in_world()
async def test_a_nats_outage_ends_both_legs_at_once(world: World):
    await world.pair(silent, silent, **OURS)
    connection, answering = ask(world)
    await settle()

    world.bus.lose()
    await answering

    assert parse(connection.written).error["code"] == "bus_down"
    assert is_quiet(world)


@in_world()
async def test_a_cache_threshold_refusal_reaches_the_client_unchanged(world: World):
    refusal = b'{"choices":[{"text":"","finish_reason":"cache_threshold"}]}'

    def refuse(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
        assert not wants_stream(start)
        frames.head(200, JSON)
        frames.data(refusal)
        frames.end(LegReport(finish_reason="cache_threshold", kv=KvTransferReport(refused=True)))

    _p1, d1 = await world.pair(decode=refuse, **OURS)

    response = await world.ask(long_prompt(cache_hit_threshold=1))

    assert (response.status, response.body) == (200, refusal)
    assert d1.started[0].cache_hit_threshold == 1.0


@in_world()
async def test_the_request_report_names_its_kv_sources(world: World):
    reads = [
        KvRead(worker_id="p1", epoch=1, requested_at=5.0, granted_at=5.5, read_at=6.0, read_s=0.25, followed=True),
        KvRead(worker_id="p2", epoch=1, requested_at=5.2, failure="nobody answered"),
    ]
    transfer_report = KvTransferReport(
        prompt_tokens=9,
        fetched_tokens=6,
        recomputed_tokens=3,
        reprefilled_tokens=2,
        prefill_cached_tokens=4,
        reads=reads,
    )

    def decode(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
        frames.head(200, JSON)
        frames.data(WHOLE_RESPONSE)
        frames.end(LegReport(prompt_tokens=9, received_tokens=6, kv=transfer_report))

    reports = await world.reports()
    p1, _d1 = await world.pair(silent, decode, **OURS)
    _connection, answering = ask(world, stream=False)
    await settle()
    prefilled(frames_of(p1))
    await answering
    await world.ask(long_prompt(stream=False))  # Its prefill leg sends no report.
    await asyncio.sleep(1)

    both, alone = reports
    assert (both.recomputed_tokens, both.reprefilled_tokens, both.readback_tokens) == (3, 2, 3)
    assert (both.kv_wait_s, both.kv_read_s, both.streamed_handoff) == (0.5, 0.25, True)
    assert (both.cached_tokens, alone.cached_tokens, alone.readback_tokens) == (4, 4, -1)
