"""A worker attached to a server: what goes there, what comes back, and what happens when the server misbehaves."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import zlib

import pytest

from services.worker.engines.attached import app, bodies
from shared.contracts.channels import CHANGE_ROLE, LOAD
from shared.contracts.failures import Failure, Reason
from shared.contracts.fleet_orders import ChangeRole
from shared.contracts.inference import LegKind
from shared.contracts.workers import Role, WorkerPhase
from tests.unit.worker.attached.fake_server import KEY, chunk, head, says, server_and_worker, streams
from tests.unit.worker.fakes import WAIT_S_MAX, WORKER

CHAT = "/v1/chat/completions"
LEFT = Failure(reason=Reason.CANCELLED, message="the client left")
DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
WHOLE = {
    "model": "theirs",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"content": "hi"}}],
    "usage": USAGE,
}
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def answer(worker, body=None, path=CHAT, **options):
    """Status, body, report and failure of one leg."""
    frames, failure = await worker.read(await worker.leg(path=path, body=body or ASK, **options))
    status = frames[0].status if frames else 0
    data = b"".join(frame.data for frame in frames)
    return status, data, frames[-1].report if frames else None, failure


async def held_leg(server, worker):
    """A leg whose request the server has; it answers once the event is set."""
    held = asyncio.Event()

    async def slow(asked, writer) -> None:
        await held.wait()
        await says(WHOLE)(asked, writer)

    server.answers[CHAT] = slow
    leg = await worker.leg(path=CHAT, body=ASK)
    async with asyncio.timeout(WAIT_S_MAX):
        while not server.posted():
            server.arrived.clear()
            await server.arrived.wait()
    return leg, held


async def test_a_whole_answer_comes_back_under_the_served_name():
    async with server_and_worker() as (server, worker):
        server.answers[CHAT] = says(WHOLE)

        status, data, report, failure = await answer(worker)

        assert (status, failure) == (200, None)
        assert json.loads(data) == {**WHOLE, "model": "m"}
        assert (report.prompt_tokens, report.cached_tokens, report.completion_tokens) == (9, 4, 2)
        assert report.finish_reason == "stop"
        assert server.posted()[0].json == {**ASK, "model": "theirs"}


async def test_a_server_that_compresses_though_it_was_not_asked_is_read():
    async with server_and_worker() as (server, worker):
        for encoding, encode in (("gzip", gzip.compress), ("deflate", zlib.compress)):
            server.answers[CHAT] = says(encode(json.dumps(WHOLE).encode()), content_encoding=encoding)

            status, data, _report, failure = await answer(worker)

            assert (status, failure) == (200, None)
            assert json.loads(data)["choices"] == WHOLE["choices"]


async def test_a_stream_is_relayed_and_usage_asked_for_is_kept_from_a_client_that_did_not_ask():
    async with server_and_worker() as (server, worker):
        usage = {"id": "x", "choices": [], "model": "theirs", "usage": USAGE}
        server.answers[CHAT] = streams(chunk("a"), b": ping\n\n", chunk("b", "stop"), usage, DONE)

        status, data, report, _failure = await answer(worker, {**ASK, "stream": True})
        _status, with_usage, *_rest = await answer(
            worker, {**ASK, "stream": True, "stream_options": {"include_usage": True}}
        )

        events = data.decode().strip().split("\n\n")
        assert status == 200
        assert [json.loads(event[6:])["model"] for event in (events[0], events[2])] == ["m", "m"]
        assert (events[1], events[3], len(events)) == (": ping", "data: [DONE]", 4)
        assert (report.prompt_tokens, report.completion_tokens, report.finish_reason) == (9, 2, "stop")
        assert 0.0 < report.prefill_s <= report.first_token_s
        assert server.posted()[0].json["stream_options"] == {"include_usage": True}
        assert b'"usage":{"prompt_tokens": 9' in with_usage


async def test_orders_to_baton_and_salts_do_not_reach_the_server():
    async with server_and_worker() as (server, worker):
        server.answers[CHAT] = says(WHOLE)

        await answer(worker, {**ASK, "baton": {"mode": "auto"}, "kv_fetch_min_tokens": 3}, cache_salt="of a tenant")

        assert server.posted()[0].json.keys() == {"model", "messages"}


async def test_the_record_says_what_the_server_is_and_that_it_exchanges_no_kv():
    async with server_and_worker() as (server, worker):
        record = await worker.until(WorkerPhase.READY)

        assert record.attached
        assert not record.prefix_caching
        assert record.max_model_len == 512
        assert record.paths == ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages"]
        assert record.note == f"attached to {server.url}, model theirs"
        assert worker.settings.worker_id in record.fingerprint.key()


async def test_an_endpoint_that_the_server_lacks_is_refused_with_a_list():
    async with server_and_worker() as (_server, worker):
        status, data, _report, _failure = await answer(worker, path="/v1/responses")

        assert status == 404
        assert b"does not serve /v1/responses; it serves /v1/chat/completions" in data


@pytest.mark.parametrize(
    ("events", "shown"),
    [
        ([chunk("a")], "its stream ended before the answer did"),
        ([chunk("a"), b"data: {not json\n\n"], "it sent what is no JSON object"),
        ([chunk("a"), b"data: " + b"x" * (128 << 10)], "it sent an event of more than 65536 bytes"),
        ([chunk("a"), chunk(f"your key is {KEY}")], "it sent the API key of its worker, which is withheld"),
    ],
    ids=["ends early", "no JSON", "endless line", "the key"],
)
async def test_a_bad_stream_breaks_off_with_a_clear_failure(tmp_path, events, shown, monkeypatch):
    monkeypatch.setattr(bodies, "EVENT_BYTES_MAX", 64 << 10)  # 4 MiB pass too slowly for a busy machine.
    (tmp_path / "key").write_text(KEY)
    async with server_and_worker(attach_key_file=str(tmp_path / "key")) as (server, worker):
        server.answers[CHAT] = streams(*events)

        status, data, _report, failure = await answer(worker, {**ASK, "stream": True})

        assert (status, failure.reason) == (200, Reason.SERVER_LOST)
        assert shown in failure.message
        assert KEY.encode() not in data
        assert KEY not in failure.message


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (says(b"no JSON"), Reason.SERVER_LOST),
        (says(b"[1]"), Reason.SERVER_LOST),
        (says(b'{"a": "' + b"x" * (2 << 20) + b'"}'), Reason.SERVER_LOST),
        (says(WHOLE, content_encoding="gzip"), Reason.SERVER_LOST),
        (says(WHOLE, content_encoding="br"), Reason.SERVER_LOST),
        (says(b"", 302, location="http://elsewhere/"), Reason.SERVER_LOST),
        (says(b"", 204), Reason.SERVER_LOST),
        (says(b"bad gateway", 502), Reason.SERVER_LOST),
        (says({"error": {"message": "wrong key"}}, 401), Reason.SERVER_LOST),
        (says(b"loading", 503), Reason.WORKER_BUSY),
    ],
    ids=[
        "text",
        "a list",
        "too large",
        "not compressed",
        "compressed otherwise",
        "redirect",
        "no content",
        "gateway",
        "key",
        "busy",
    ],
)
async def test_what_is_no_answer_lets_the_router_try_elsewhere(answers, reason, monkeypatch):
    monkeypatch.setattr(app, "ANSWER_BYTES_MAX", 1 << 20)  # 64 MiB pass too slowly for a busy machine.
    async with server_and_worker() as (server, worker):
        server.answers[CHAT] = answers

        _status, data, _report, failure = await answer(worker)

        assert (failure.reason, data) == (reason, b"")


async def test_a_server_that_names_a_pause_is_not_asked_again_before_its_end():
    async with server_and_worker() as (server, worker):
        server.answers[CHAT] = says(b"{}", 429, retry_after="30")

        *_rest, first = await answer(worker)
        *_rest, second = await answer(worker)

        assert (first.reason, first.retry_after_s) == (Reason.WORKER_BUSY, 30.0)
        assert second.reason is Reason.WORKER_BUSY
        assert 0.0 < second.retry_after_s <= 30.0
        assert len(server.posted()) == 1


@pytest.mark.parametrize(
    ("status", "body", "shown"),
    [
        (400, b'{"error":{"message":"temperature is wrong"}}', b"temperature is wrong"),
        (500, b'{"error":{"message":"no embeddings here"}}', b"no embeddings here"),
        (422, b"<html>", b"withheld"),
        (400, json.dumps({"error": KEY}).encode(), b"withheld"),
    ],
    ids=["bad request", "server error", "no JSON", "the key"],
)
@pytest.mark.slow
async def test_the_servers_refusal_reaches_the_client_without_the_key(tmp_path, status, body, shown):
    (tmp_path / "key").write_text(KEY)
    async with server_and_worker(attach_key_file=str(tmp_path / "key")) as (server, worker):
        server.answers[CHAT] = says(body, status)

        found, data, _report, failure = await answer(worker)

        assert (found, failure) == (status, None)
        assert shown in data
        assert KEY.encode() not in data


async def test_the_key_goes_to_the_server_and_nowhere_else(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    (tmp_path / "key").write_text(f"{KEY}\n")
    async with server_and_worker(attach_key_file=str(tmp_path / "key")) as (server, worker):
        server.answers[CHAT] = says(WHOLE)
        await answer(worker)
        server.answers[CHAT] = says(b"", 401)
        await answer(worker)
        record = await worker.until(WorkerPhase.PROBING)

        assert {one.headers["authorization"] for one in server.asked} == {f"Bearer {KEY}"}
        assert record.note.endswith("it refuses the API key of this worker")
        assert KEY not in str(record)
        assert KEY not in caplog.text


async def test_a_client_that_leaves_closes_the_request_at_the_server():
    async with server_and_worker() as (server, worker):
        begun = asyncio.Event()

        async def endless(_asked, writer) -> None:
            writer.write(head(content_type="text/event-stream") + b"data: " + json.dumps(chunk("a")).encode() + b"\n\n")
            begun.set()
            await asyncio.Event().wait()

        server.answers[CHAT] = endless
        leg = await worker.leg(path=CHAT, body={**ASK, "stream": True})
        async with asyncio.timeout(WAIT_S_MAX):
            await begun.wait()
            worker.inbox.cancel(leg.leg, LEFT)
            await server.left.wait()


async def test_a_silent_server_is_given_up():
    async with server_and_worker(attach_silent_s_max=0.1) as (server, worker):

        async def silent(_asked, _writer) -> None:
            await asyncio.Event().wait()

        server.answers[CHAT] = silent

        *_rest, failure = await answer(worker)

        assert failure.reason is Reason.SERVER_LOST
        assert "it was silent for 0.1 s" in failure.message


@pytest.mark.slow
async def test_a_server_that_is_away_takes_its_worker_out_of_traffic_until_it_is_back():
    async with server_and_worker() as (server, worker):
        await server.close()
        *_rest, failure = await answer(worker)
        away = await worker.until(WorkerPhase.PROBING)
        await server.open()
        back = await worker.until(WorkerPhase.READY)

        assert failure.reason is Reason.SERVER_LOST
        assert away.note.endswith("model theirs: it accepts no connection")
        assert back.note == f"attached to {server.url}, model theirs"
        assert back.epoch == away.epoch


@pytest.mark.slow
async def test_a_server_that_is_back_without_the_model_gets_no_requests():
    async with server_and_worker() as (server, worker):
        server.answers["/health"] = says(b"", 500)
        await worker.until(WorkerPhase.PROBING)
        server.answers["/v1/models"] = says({"data": [{"id": "another"}]})
        server.answers["/health"] = says(b"")

        record = await worker.until(WorkerPhase.PROBING, note="it has no model theirs any more")

        assert record.phase is WorkerPhase.PROBING


async def test_a_leg_that_continues_another_workers_stream_is_refused():
    async with server_and_worker() as (_server, worker):
        *_rest, failure = await answer(worker, {**ASK, "stream": True}, resume=b"\x01\0\0\0")
        *_rest, second = await answer(worker, kind=LegKind.DECODE, body={"prompt": "a"}, path="/v1/completions")

        assert failure.reason is Reason.CANNOT_RESUME
        assert second.reason is Reason.CANNOT_RESUME


@pytest.mark.parametrize(
    ("metrics", "load"),
    [(b"sglang:num_running_reqs 3\nsglang:num_queue_reqs 2\n", (3, 2)), (b"\xff\x00{{{ 1 NaN", (0, 0))],
    ids=["SGLang", "garbage"],
)
@pytest.mark.slow
async def test_the_servers_metrics_count_as_load_where_they_can_be_read(metrics, load):
    async with server_and_worker(metrics=metrics) as (server, worker):
        reports: asyncio.Queue = asyncio.Queue()
        await worker.bus.subscribe(LOAD, lambda report, _envelope: reports.put_nowait(report))
        async with asyncio.timeout(WAIT_S_MAX):
            while not any(one.path == "/metrics" for one in server.asked):
                await reports.get()
            found = await reports.get()
            while (found.running, found.waiting) != load:
                found = await reports.get()


@pytest.mark.slow
async def test_metrics_are_found_where_tensorrt_llm_has_them():
    metrics = b'trtllm_num_requests_running{model_name="m"} 3\ntrtllm_num_requests_waiting{model_name="m"} 2\n'
    more = {"/metrics": says([{"iter": 1}]), "/prometheus/metrics": says(metrics, content_type="text/plain")}
    async with server_and_worker(answers=more) as (server, worker):
        reports: asyncio.Queue = asyncio.Queue()
        await worker.bus.subscribe(LOAD, lambda report, _envelope: reports.put_nowait(report))
        async with asyncio.timeout(WAIT_S_MAX):
            while [one.path for one in server.asked].count("/prometheus/metrics") < 2:
                found = await reports.get()
            while (found.running, found.waiting) != (3, 2):
                found = await reports.get()

    assert [one.path for one in server.asked].count("/metrics") == 1


async def test_legs_beyond_the_limit_are_refused_before_the_server_hears_of_them():
    async with server_and_worker(legs_max=1) as (server, worker):
        first, held = await held_leg(server, worker)
        *_rest, refused = await answer(worker)
        held.set()
        frames, failure = await worker.read(first)

        assert refused.reason is Reason.WORKER_BUSY
        assert (failure, frames[0].status, len(server.posted())) == (None, 200, 1)


async def test_its_role_cannot_be_changed():
    async with server_and_worker() as (_server, worker):
        order = ChangeRole(worker_id=WORKER, role=Role.PREFILL)

        changed = await worker.bus.ask(CHANGE_ROLE, order, timeout_s=WAIT_S_MAX)

        assert changed.role is Role.BOTH
        assert "serves whole requests only" in changed.failure


async def test_a_drain_ends_its_legs_well_and_the_record_stays_out_of_traffic():
    async with server_and_worker() as (server, worker):
        leg, held = await held_leg(server, worker)
        worker.service.stopping.set()
        await worker.until(WorkerPhase.DRAINING)
        held.set()
        frames, failure = await worker.read(leg)

        assert (failure, frames[0].status) == (None, 200)
