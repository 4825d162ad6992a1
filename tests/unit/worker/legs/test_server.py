"""Legs on a worker around a fake engine: frames, refusals, ends."""

from __future__ import annotations

import asyncio
import json
import math

import pytest

from services.worker.engines.port import CURRENT_LEG
from services.worker.service import IN_FLIGHT_LISTS_S
from shared.contracts.channels import WORKER_RECORDS
from shared.contracts.failures import Reason
from shared.contracts.ids import Epoch, RouterId
from shared.contracts.inference import FrameKind, LegKind
from shared.contracts.kv_exchange import KvTransferReport
from shared.runtime.service import live
from tests.support.memory_bus import MemoryHub
from tests.support.virtual_time import run_in_virtual_time
from tests.unit.worker.fakes import KV_TRANSFER, WAIT_S_MAX, FakeEngine, RunningWorker, running_worker
from tests.unit.worker.kv_exchange.fakes import FakeExchange


def kinds(frames) -> list[FrameKind]:
    return [frame.kind for frame in frames]


async def test_a_leg_is_answered_with_head_data_and_end():
    async with running_worker() as worker:
        frames, failure = await worker.read(await worker.leg(body={"tokens": 2}))

        assert failure is None
        assert kinds(frames) == [FrameKind.HEAD, FrameKind.DATA, FrameKind.DATA, FrameKind.END]
        assert frames[0].status == 200
        assert frames[0].content_type == "text/event-stream"
        assert [(frame.data, frame.token_ids) for frame in frames[1:3]] == [
            (b"data: 0\n\n", [0]),
            (b"data: 1\n\n", [1]),
        ]
        assert [frame.cached_tokens for frame in frames] == [None, 3, None, None]
        report = frames[-1].report
        assert (report.prompt_tokens, report.cached_tokens, report.completion_tokens) == (7, 3, 2)
        assert report.finish_reason == "length"


async def test_data_after_the_last_token_is_sent_in_one_frame():
    async with running_worker() as worker:
        frames, _failure = await worker.read(await worker.leg(body={"tokens": 1, "more": ["usage ", "done"]}))

        assert [(frame.data, frame.token_ids) for frame in frames[1:]] == [(b"data: 0\n\n", [0]), (b"usage done", [])]
        assert frames[-1].kind is FrameKind.END


@pytest.mark.parametrize("untold", [[], [5]], ids=["", "within a character"])
async def test_the_servers_error_about_a_dead_engine_is_not_relayed(untold):
    """The router answers for that, or has the answer taken up elsewhere."""
    async with running_worker() as worker:
        leg = await worker.leg(body={"tokens": 1, "untold": untold, "more": ["error"], "dies_at_the_end": True})

        frames, failure = await worker.read(leg)

        assert failure.reason is Reason.ENGINE_DEAD
        assert [frame.data for frame in frames if frame.kind is FrameKind.DATA] == [b"data: 0\n\n"]


async def test_a_prefill_leg_returns_its_kv_and_no_data():
    async with running_worker() as worker:
        frames, _failure = await worker.read(await worker.leg(LegKind.PREFILL))

        assert [(frame.kind, frame.status, frame.data) for frame in frames] == [(FrameKind.END, 200, b"")]
        assert frames[-1].report.kv_transfer == KV_TRANSFER
        assert json.loads(worker.engine.bodies[0])["kv_transfer_params"] == {"do_remote_decode": True}


async def test_a_refused_prefill_relays_the_engines_error():
    async with running_worker() as worker:
        frames, _failure = await worker.read(await worker.leg(LegKind.PREFILL, body={"status": 400}))

        assert frames[0].status == 400
        assert frames[0].data == b'{"error":{}}'


async def test_a_prefill_without_a_possible_handoff_never_reaches_the_engine():
    async with running_worker() as worker:
        frames, _failure = await worker.read(await worker.leg(LegKind.PREFILL, body={"n": 2}))

        assert frames[0].status == 200
        assert frames[-1].report.kv_transfer == b""
        assert worker.engine.bodies == []


async def test_a_decode_leg_carries_the_prefills_kv_to_the_engine():
    async with running_worker() as worker:
        await worker.read(await worker.leg(LegKind.DECODE, kv_transfer=KV_TRANSFER))

        assert json.loads(worker.engine.bodies[0])["kv_transfer_params"] == json.loads(KV_TRANSFER)


async def test_the_engine_gets_the_tenants_salts_for_media():
    async with running_worker() as worker:
        await worker.read(await worker.leg(cache_salt="tenants"))
        await worker.read(await worker.leg(media_salt="tenants"))
        await worker.read(await worker.leg())

        assert worker.engine.salts == [("tenants", "tenants"), ("", "tenants"), ("", "")]


SPACES = 11_000_000


async def test_a_panic_of_a_library_fails_its_leg_alone():
    """11 MB of spaces make the tokenizers library panic where text is split as for Llama 3; pyo3's exception for that
    is a BaseException.
    """
    async with running_worker() as worker:
        _frames, panicked = await worker.read(await worker.leg(body={"spaces": SPACES}, deadline_s=WAIT_S_MAX))
        frames, failure = await worker.read(await worker.leg(body={"tokens": 1}))

        assert panicked.reason is Reason.INTERNAL
        assert "PanicException" in panicked.message
        assert (failure, frames[-1].kind) == (None, FrameKind.END)


@pytest.mark.parametrize(("begun", "suspect"), [(0, True), (1, False)])
async def test_a_worker_that_fails_names_the_legs_that_it_may_have_failed_at(begun, suspect):
    async with running_worker() as worker:
        worker.engine.may_run.clear()
        leg = await worker.leg(body={"begun": begun})
        await worker.engine.started.wait()
        worker.service.tasks.create_task(fails())

        _frames, failure = await worker.read(leg)

        assert (failure.reason, failure.suspect) == (Reason.ENGINE_DEAD, suspect)


async def fails() -> None:
    raise ZeroDivisionError("a bug in the worker")


async def test_a_leg_with_an_unusable_router_id_is_not_served():
    async with running_worker() as worker:
        for name in ("", "r1.>", "*", "r 1"):
            await worker.leg(router_id=RouterId(name), body={"tokens": 1})

        _frames, failure = await worker.read(await worker.leg(body={"tokens": 2}))

        assert failure is None
        assert [json.loads(body)["tokens"] for body in worker.engine.bodies] == [2]


async def test_legs_beyond_the_maximum_are_refused_as_busy():
    async with running_worker() as worker:
        worker.engine.may_run.clear()
        for _ in range(worker.engine.facts.legs_max):
            await worker.leg()

        _frames, failure = await worker.read(await worker.leg())

        assert failure.reason is Reason.WORKER_BUSY
        assert failure.retry_after_s


async def test_each_sequence_of_a_leg_counts_as_one_leg():
    async with running_worker() as worker:
        legs_max = worker.engine.facts.legs_max
        worker.engine.may_run.clear()
        many = await worker.leg(sequences=legs_max)

        _frames, failure = await worker.read(await worker.leg())
        worker.engine.may_run.set()
        _frames, served = await worker.read(many)
        _frames, after = await worker.read(await worker.leg())

        assert (failure.reason, served, after) == (Reason.WORKER_BUSY, None, None)


async def test_a_leg_for_an_earlier_epoch_is_refused_as_lost():
    async with running_worker() as worker:
        _frames, failure = await worker.read(await worker.leg(epoch=Epoch(1)))

        assert failure.reason is Reason.WORKER_LOST


async def test_a_cancelled_leg_is_aborted_in_the_engine():
    async with running_worker() as worker:
        worker.engine.may_run.clear()
        leg = await worker.leg()
        await worker.engine.started.wait()

        leg.cancel()

        async with asyncio.timeout(5):
            await worker.engine.aborted.wait()


async def test_a_leg_whose_router_is_gone_is_aborted():
    async with running_worker() as worker:
        worker.engine.may_run.clear()

        await worker.leg(router_id=RouterId("gone"))

        async with asyncio.timeout(5):
            await worker.engine.aborted.wait()


async def test_a_leg_past_its_deadline_fails_and_is_aborted():
    async with running_worker() as worker:
        worker.engine.may_run.clear()

        _frames, failure = await worker.read(await worker.leg(deadline_s=0.05))

        assert failure.reason is Reason.DEADLINE
        assert worker.engine.aborted.is_set()


async def test_a_stream_that_has_begun_outlives_the_deadline_of_its_leg():
    async with running_worker() as worker:
        worker.engine.step_s = 0.1

        frames, failure = await worker.read(await worker.leg(body={"tokens": 8}, deadline_s=0.3))

        assert failure is None
        assert [token for frame in frames for token in frame.token_ids] == list(range(8))


async def test_a_stream_past_its_deadline_ends_when_its_router_is_gone():
    async with running_worker() as worker:
        worker.engine.step_s = 0.05
        leg = await worker.leg(body={"tokens": 10_000}, deadline_s=0.1)
        seen = 0
        while seen < 6:
            seen += len(await leg.frames())

        await worker.bus.close()

        async with asyncio.timeout(WAIT_S_MAX):
            await worker.engine.aborted.wait()


async def test_tokens_that_show_nothing_reach_the_router_as_empty_frames():
    async with running_worker() as worker:
        worker.engine.step_s = 0.1

        frames, failure = await worker.read(await worker.leg(body={"hidden": 30, "tokens": 1}, deadline_s=2.0))

        assert failure is None
        data = [frame.data for frame in frames if frame.kind is FrameKind.DATA]
        assert data[:1] == [b""]
        assert 1 <= data.count(b"") <= 3


@pytest.mark.slow
async def test_a_crash_of_the_engines_server_fails_one_leg_only():
    async with running_worker() as worker:
        _frames, failure = await worker.read(await worker.leg(body={"crash": True}))
        frames, _none = await worker.read(await worker.leg())

        assert failure.reason is Reason.INTERNAL
        assert "ZeroDivisionError" in failure.message
        assert frames[-1].kind is FrameKind.END


async def test_draining_lets_running_legs_finish_and_takes_no_new_ones():
    async with running_worker() as worker:
        worker.engine.may_run.clear()
        running = await worker.leg()
        await worker.engine.started.wait()
        worker.service.stopping.set()
        while worker.service.phase != "draining":
            await asyncio.sleep(0)

        _frames, refused = await worker.read(await worker.leg())
        worker.engine.may_run.set()
        frames, failure = await worker.read(running)

        assert refused.reason is Reason.WORKER_DRAINING
        assert failure is None
        assert frames[-1].kind is FrameKind.END
        assert await worker.exit == 0
        assert worker.engine.closed


async def test_a_worker_whose_engine_takes_long_to_end_is_gone_before():
    async with running_worker() as worker:
        worker.engine.may_close.clear()
        records = await worker.bus.key_value_store(WORKER_RECORDS)
        worker.service.stopping.set()
        async with asyncio.timeout(WAIT_S_MAX):
            while await records.get(worker.settings.worker_id) is not None:
                await asyncio.sleep(0)

        assert not worker.engine.closed
        worker.engine.may_close.set()
        assert await worker.exit == 0


async def test_legs_that_outlast_the_drain_are_failed():
    async with running_worker(drain_s_max=0.05) as worker:
        worker.engine.may_run.clear()
        running = await worker.leg()
        await worker.engine.started.wait()

        worker.service.stopping.set()

        _frames, failure = await worker.read(running)
        assert failure.reason is Reason.WORKER_DRAINING
        assert await worker.exit == 0


async def test_a_dead_engine_fails_every_leg_and_ends_the_process():
    async with running_worker() as worker:
        worker.engine.may_run.clear()
        legs = [await worker.leg(), await worker.leg()]
        await worker.engine.started.wait()

        worker.engine.reason.set_result("out of memory")

        failures = [(await worker.read(leg))[1] for leg in legs]
        assert [failure.reason for failure in failures] == [Reason.ENGINE_DEAD] * 2
        assert "out of memory" in failures[0].message
        assert await worker.exit == 1


async def test_legs_without_a_token_are_suspected_of_their_engines_death():
    async with running_worker() as worker:
        worker.engine.may_run.clear()
        legs = [await worker.leg(), await worker.leg(body={"early": True})]
        while len(worker.engine.bodies) < 2:
            await asyncio.sleep(0)

        worker.engine.reason.set_result("out of memory")

        assert [(await worker.read(leg))[1].suspect for leg in legs] == [True, False]


async def test_a_server_error_of_a_dying_engine_fails_as_engine_dead():
    async with running_worker() as worker:
        _frames, failure = await worker.read(await worker.leg(body={"status": 500, "dies": True}))

        assert failure.reason is Reason.ENGINE_DEAD


async def test_a_worker_stopped_during_engine_start_exits_at_once():
    worker = RunningWorker(MemoryHub(), FakeEngine())
    never = asyncio.Event()
    cancelled = asyncio.Event()

    async def start_engine(_settings, _common, _say, *, identity) -> FakeEngine:
        try:
            await never.wait()
        finally:
            cancelled.set()
        return worker.engine

    worker.start_engine = start_engine
    exit_code = asyncio.create_task(live(worker.service, worker.main, drain_s_max=WAIT_S_MAX))
    worker.service.stopping.set()

    assert await exit_code == 0
    assert cancelled.is_set()


def test_a_silent_leg_that_its_router_has_forgotten_is_aborted():
    async def scenario() -> int:
        async with running_worker() as worker:
            worker.engine.may_run.clear()
            leg = await worker.leg()
            await leg.frames()
            worker.inbox.forget(leg.leg)
            async with asyncio.timeout(2 * IN_FLIGHT_LISTS_S):
                await worker.engine.aborted.wait()
            return worker.inbox.orphans.served

    assert run_in_virtual_time(scenario()) == 1


@pytest.mark.parametrize("deadline_s", [math.nan, math.inf, -1.0, 1e300])
async def test_a_leg_with_an_invalid_deadline_is_refused(deadline_s: float):
    async with running_worker() as worker:
        _, failure = await worker.read(await worker.leg(deadline_s=deadline_s))
        _, after = await worker.read(await worker.leg())

        assert failure.reason is Reason.BAD_MESSAGE
        assert after is None


async def test_an_unencodable_content_type_fails_no_leg():
    async with running_worker() as worker:
        frames, failure = await worker.read(await worker.leg(content_type="a\u2028b"))

        assert failure is None
        assert frames[0].status == 200


async def test_a_path_that_the_engine_does_not_serve_is_refused_with_what_it_serves():
    async with running_worker(paths=frozenset({"/v1/completions", "/tokenize"})) as worker:
        frames, failure = await worker.read(await worker.leg(path="/v1/embeddings"))

        assert failure is None
        assert frames[0].status == 404
        message = json.loads(frames[0].data)["error"]["message"]
        assert message == "The engine of m does not serve /v1/embeddings; it serves /tokenize, /v1/completions."
        assert worker.engine.bodies == []


FORM = b"--x\r\nContent-Disposition: form-data; name=file; filename=a\r\n\r\n" + b"\x00\\u[{" * 50_000 + b"\r\n--x--"


@pytest.mark.parametrize("exchange", [False, True], ids=["upstream", "exchange"])
async def test_a_form_reaches_the_engines_server_byte_for_byte_with_its_type(exchange):
    async with running_worker(FakeExchange("w1") if exchange else None) as worker:
        worker.engine.app = reads_form = FormApp()
        leg = await worker.leg(
            body=FORM, path="/v1/audio/transcriptions", content_type='multipart/form-data; boundary="x"', cache_salt="s"
        )
        frames, failure = await worker.read(leg)

        assert failure is None
        assert (frames[0].status, frames[0].data) == (200, b'{"text":""}')
        assert reads_form.asked == ("POST", 'multipart/form-data; boundary="x"', FORM, "s")


class FormApp:
    async def __call__(self, scope, receive, send) -> None:
        headers = dict(scope["headers"])
        given = CURRENT_LEG.get().input
        body = (await receive())["body"]
        self.asked = (scope["method"], headers[b"content-type"].decode(), body, given.cache_salt)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"text":""}', "more_body": False})


async def test_the_tokenizers_description_is_asked_with_get():
    async with running_worker() as worker:
        worker.engine.app = reads = FormApp()
        await worker.read(await worker.leg(body=b"", path="/tokenizer_info"))

        assert reads.asked[0] == "GET"


@pytest.mark.parametrize(
    ("asked", "origin"), [(None, "of this worker's default, WORKER_CACHE_HIT_THRESHOLD"), (0.9, "of the request")]
)
async def test_a_refusal_is_one_log_line_with_its_rate_its_threshold_and_who_set_that(caplog, asked, origin):
    async with running_worker(FakeExchange("w1"), cache_hit_threshold=0.8) as worker:
        worker.engine.transfer_report = KvTransferReport(refused=True, hit_share=0.41)
        with caplog.at_level("INFO", logger="baton.worker"):
            await worker.read(await worker.leg(cache_hit_threshold=asked))
        worker.engine.transfer_report = KvTransferReport()
        await worker.read(await worker.leg(cache_hit_threshold=asked))

    lines = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    threshold = "0.8" if asked is None else "0.9"
    assert lines == [
        f"leg l1 of request q1 is refused: 0.41 of its prompt is cached or can be fetched, below {threshold} {origin}"
    ]
    assert worker.engine.orders[0].cache_hit_threshold == float(threshold)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_a_workers_default_counts_on_every_path_that_routers_place(path):
    async with running_worker(FakeExchange("w1"), cache_hit_threshold=0.8) as worker:
        await worker.read(await worker.leg(path=path))
        await worker.read(await worker.leg(path=path, cache_hit_threshold=0.0))

        assert [order.cache_hit_threshold for order in worker.engine.orders] == [0.8, 0.0]


async def test_an_engine_that_cannot_refuse_refuses_a_threshold_by_name():
    async with running_worker() as worker:
        frames, _failure = await worker.read(await worker.leg(cache_hit_threshold=0.5))
        error = json.loads(b"".join(frame.data for frame in frames))["error"]

        assert (frames[0].status, error["param"]) == (400, "cache_hit_threshold")
        assert "WORKER_CONNECTOR=baton" in error["message"]
        assert worker.engine.bodies == []
        frames, _failure = await worker.read(await worker.leg(cache_hit_threshold=0.0))
        assert frames[0].status == 200
