"""Parsers of an untrusted server's data: events, token counts, metrics, addresses, keys, pauses."""

from __future__ import annotations

import contextlib
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engines.attached.app import RETRY_AFTER_S_MAX, retry_after_s
from services.worker.engines.attached.bodies import AnswerReader, BadAnswer, EventCutter, server_body
from services.worker.engines.attached.health import Gauges, Meter, read_gauges
from services.worker.engines.attached.server import read_key
from services.worker.settings import Settings, root_of
from shared.engine_speed.learner import SpeedLearner
from shared.runtime.settings import SettingsError
from tests.support.examples import examples

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
STREAM = b'data: {"a":1}\r\n\r\n: ping\n\nevent: x\ndata: {\ndata: }\r\r\n\ndata: [DONE]\n\n'


@settings(max_examples=examples(50))
@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_are_the_same_however_the_stream_is_cut(cuts):
    at = [0, *sorted(cuts), len(STREAM)]
    cutter = EventCutter()

    found = [event for begin, end in itertools.pairwise(at) for event in cutter.add(STREAM[begin:end])]

    assert found == [b'data: {"a":1}\n\n', b": ping\n\n", b"event: x\ndata: {\ndata: }\n\n", b"data: [DONE]\n\n"]


@settings(max_examples=examples(200))
@given(st.binary(max_size=200), st.sampled_from((CHAT, MESSAGES, RESPONSES)))
def test_any_bytes_are_an_event_or_no_answer(data, path):
    reader = AnswerReader(path, "m")
    for event in EventCutter().add(b"data: " + data + b"\n\n"):
        with contextlib.suppress(BadAnswer):
            assert isinstance(reader.event(event), bytes)


@pytest.mark.parametrize(
    ("path", "events", "usage", "reason"),
    [
        (
            MESSAGES,
            [
                {
                    "type": "message_start",
                    "message": {"model": "theirs", "usage": {"input_tokens": 5, "cache_read_input_tokens": 2}},
                },
                {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}},
                {"type": "message_stop"},
            ],
            (5, 2, 3),
            "end_turn",
        ),
        (
            RESPONSES,
            [
                {"type": "response.created", "response": {"model": "theirs", "status": "in_progress", "output": []}},
                {
                    "type": "response.completed",
                    "response": {
                        "model": "theirs",
                        "status": "completed",
                        "output": [],
                        "usage": {"input_tokens": 5, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 2}},
                    },
                },
            ],
            (5, 2, 3),
            "completed",
        ),
    ],
    ids=["messages", "responses"],
)
def test_usage_and_names_are_read_in_every_api(path, events, usage, reason):
    reader = AnswerReader(path, "m")

    shown = b"".join(reader.event(b"data: " + json.dumps(event).encode() + b"\n\n") for event in events)

    assert (reader.usage.prompt, reader.usage.cached, reader.usage.completion) == usage
    assert (reader.finish_reason, reader.is_complete) == (reason, True)
    assert b"theirs" not in shown


@pytest.mark.parametrize(
    ("usage", "found"),
    [
        ({"prompt_tokens": -3}, -1),
        ({"prompt_tokens": True}, -1),
        ({"prompt_tokens": 1e9}, -1),
        ([1], -1),
        ({"prompt_tokens": 7}, 7),
    ],
)
def test_impossible_counts_are_ignored(usage, found):
    reader = AnswerReader(CHAT, "m")
    reader.whole(json.dumps({"usage": usage}).encode())

    assert reader.usage.prompt == found


@pytest.mark.parametrize(
    ("text", "gauges"),
    [
        (
            (
                'vllm:num_requests_running{model_name="a",engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 1\n'
                "vllm:num_requests_waiting{} 4\nvllm:kv_cache_usage_perc{} 0.5\n"
            ),
            Gauges(3, 4, 0.5),
        ),
        (
            "sglang:num_running_reqs 3 1700000000000\nsglang:num_queue_reqs 2\nsglang:token_usage 0.25",
            Gauges(3, 2, 0.25),
        ),
        ("llamacpp:requests_processing 1\nllamacpp:requests_deferred 0\n", Gauges(1, 0, 0.0)),
        (
            (
                'trtllm_num_requests_running{model_name="m",engine_type="trtllm"} 5.0\n'
                'trtllm_num_requests_waiting{model_name="m"} 1.0\ntrtllm_kv_cache_utilization{model_name="m"} 0.6\n'
            ),
            Gauges(5, 1, 0.6),
        ),
        ("llamacpp:requests_processing NaN\nllamacpp:requests_deferred -5\n", None),
        ("vllm:num_requests_running 1e300\n", Gauges(1_000_000, 0, 0.0)),
        ("process_cpu_seconds_total 3\n", None),
        ("", None),
    ],
)
def test_load_is_read_from_the_metrics_of_known_servers(text, gauges):
    assert read_gauges(text) == gauges


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        ("7.5", 7.5),
        ("99999", RETRY_AFTER_S_MAX),
        ("Thu, 01 Jan 1970 00:00:10 GMT", 10.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("", None),
        ("soon", None),
        ("-1", None),
        ("9" * 400, None),
    ],
)
def test_a_pause_is_read_in_seconds_or_as_a_date_and_bounded(value, seconds):
    assert retry_after_s(value, unix_s=0.0) == seconds


@pytest.mark.parametrize(
    ("url", "root"),
    [("http://h:1", "http://h:1"), ("http://h:1/v1/", "http://h:1"), ("https://h/openai/v1", "https://h/openai")],
)
def test_an_address_may_end_with_the_api_version(url, root):
    assert root_of(url) == root


@pytest.mark.parametrize("url", ["h:1", "ftp://h", "http://u:p@h", "http://h?key=1", "http://", "http://h:99999"])
def test_an_address_without_a_host_or_with_a_secret_is_refused(url):
    with pytest.raises(ValueError, match=r"."):
        Settings(engine="attached", attach_url=url)


def test_an_attached_worker_has_no_other_role_than_both():
    with pytest.raises(ValueError, match="WORKER_ROLE"):
        Settings(engine="attached", role="prefill")


@pytest.mark.parametrize(
    "content", [b"", b"short", b"two words here", b"\xff" * 20, b"line one\nline two", b"x" * 9000]
)
def test_a_file_without_one_key_is_refused_without_its_content(tmp_path, content):
    file = tmp_path / "key"
    file.write_bytes(content)

    with pytest.raises(SettingsError, match="must contain one API key") as refused:
        read_key(str(file))

    assert not content or content[:5].decode("latin-1") not in str(refused.value).replace(str(file), "")


def test_only_vllm_gets_a_cache_salt():
    body = b'{"model":"m","cache_salt":"s"}'

    assert b"cache_salt" in server_body(CHAT, body, "t", salts=True).body
    assert b"cache_salt" not in server_body(CHAT, body, "t", salts=False).body
    assert server_body(CHAT, b"[1]", "t", salts=False) is None


def test_the_servers_speed_is_learned_from_the_answers():
    now = [0.0]
    meter, learner = Meter(lambda: now[0]), SpeedLearner()
    meter.on_changed(lambda: learner.observe(meter.load().steps))
    for _ in range(200):
        with meter.request(1000, 0) as request:
            now[0] += 0.5
            request.progress()
            for _ in range(20):
                now[0] += 0.01
                request.progress()
            request.is_done = True
        learner.observe(meter.load().steps)
        now[0] += 5.0  # Idle.

    speed = learner.speed
    prefill_s = speed.prefill_step_s + 1000 * speed.prefill_token_s + 500_000 * speed.prefill_pair_s
    step_s = speed.decode_step_s + speed.decode_request_s + 1010 * speed.decode_context_token_s
    assert prefill_s == pytest.approx(0.5, rel=0.2)
    assert step_s == pytest.approx(0.01, rel=0.2)


def test_load_returns_to_zero_after_requests_that_end_or_fail():
    meter = Meter(lambda: 0.0)
    with meter.request(10, 0) as ended, meter.request(-1, 400):
        assert (meter.load().running, meter.load().waiting_tokens) == (2, 110)
        ended.progress(3)
        ended.is_done = True
        assert meter.load().waiting_tokens == 100

    assert (meter.load().running, meter.load().waiting_tokens) == (0, 0)
