"""Resumed legs: which requests can resume, and what the worker relays."""

from __future__ import annotations

import json

import pytest

from services.worker.engines.port import LegResult
from services.worker.legs.resume import CannotResume, dated, joined_tokens, resumed_tokens
from shared.contracts.failures import Reason
from shared.contracts.inference import FrameKind, LegKind, StartLeg, pack_tokens
from tests.support.builders import start_leg
from tests.unit.worker.fakes import running_worker


def start(body: dict, kind: LegKind = LegKind.AGGREGATED, **fields) -> StartLeg:
    raw = json.dumps({"stream": True, **body}).encode()
    return start_leg(
        **{"kind": kind, "path": "/v1/chat/completions", "body": raw, "resume": pack_tokens([5, 6]), **fields}
    )


def refusal(leg: StartLeg, *, is_plain: bool = True):
    with pytest.raises(CannotResume) as refused:
        resumed_tokens(leg, is_plain=is_plain)
    return refused.value.failure


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"tools": [{"type": "function"}], "tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tool_choice": {"type": "auto"}},
        {"response_format": {"type": "text"}},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.2},
        {"seed": 7, "stop": ["x"], "logit_bias": {"5": -100}, "logprobs": True},
    ],
)
def test_requests_that_depend_on_tokens_alone_resume(body):
    assert resumed_tokens(start(body), is_plain=True) == [5, 6]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"structured_outputs": {"regex": "a*"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"bad_words": ["no"]}, "bad_words"),
        ({"stream": False}, "stream"),
    ],
)
def test_state_of_the_lost_engine_prevents_a_resume_and_is_named(body, word):
    failure = refusal(start(body))

    assert failure.reason is Reason.CANNOT_RESUME
    assert word in failure.message


def test_several_completions_and_other_paths_are_refused():
    assert refusal(start({}), is_plain=False).reason is Reason.CANNOT_RESUME
    assert refusal(start({}, path="/v1/embeddings")).reason is Reason.CANNOT_RESUME


@pytest.mark.parametrize("include", [None, [], ["reasoning.encrypted_content"], "x", 7])
def test_a_response_that_repeats_log_probabilities_is_not_resumed(include):
    logprobs = start({"include": ["message.output_text.logprobs"]}, path="/v1/responses")

    assert "log probabilities" in refusal(logprobs).message
    assert resumed_tokens(start({"include": include}, path="/v1/responses"), is_plain=True) == [5, 6]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses"])
def test_every_api_that_streams_tokens_resumes(path):
    assert resumed_tokens(start({}, path=path), is_plain=True) == [5, 6]


def test_unreadable_tokens_are_a_bad_message():
    assert refusal(start({}, resume=b"abc")).reason is Reason.BAD_MESSAGE


def test_joined_tokens_are_unpacked_the_same_way():
    assert joined_tokens(start({}, resume_joined=pack_tokens([1, 4]))) == {1, 4}
    assert joined_tokens(start({})) == set()
    with pytest.raises(CannotResume) as refused:
        joined_tokens(start({}, resume_joined=b"abc"))
    assert refused.value.failure.reason is Reason.BAD_MESSAGE


def test_tokens_given_to_the_server_together_are_marked_joined():
    result = LegResult()
    result.add_tokens([1], last=False)
    result.add_tokens([2, 3, 4], last=False)
    result.add_tokens([5, 6], last=False)
    first = result.take_tokens()
    result.add_tokens([7, 8], last=True)

    assert first == ([1, 2, 3, 4, 5, 6], [2, 3, 5])
    assert result.take_tokens() == ([7, 8], None)
    assert result.completion_tokens == 8


def test_every_event_has_the_original_created_time_and_text_stays():
    text = json.dumps({"created": 5, "text": '"created":6 and {"created":7}'}, separators=(",", ":")).encode()

    assert dated(b"data: %b\n\ndata: %b\n\n" % (text, text), 12) == (
        b"data: %b\n\ndata: %b\n\n" % ((text.replace(b":5,", b":12,"),) * 2)
    )


def test_a_response_has_its_original_time_and_its_tools_stay():
    tools = {"default": {"created": "5", "created_at": 6}}
    event = {"response": {"id": "resp_1", "created_at": 5, "tools": [tools]}}
    data = json.dumps(event, separators=(",", ":")).encode()

    assert dated(data, 12) == data.replace(b'"created_at":5', b'"created_at":12')


def test_a_prefill_leg_need_not_be_a_stream():
    leg = start({"stream": False}, LegKind.PREFILL)

    assert resumed_tokens(leg, is_plain=True) == [5, 6]


def test_an_empty_list_of_tokens_resumes_too():
    assert resumed_tokens(start({}, resume=b""), is_plain=True) == []
    assert resumed_tokens(start({"n": 2}, resume=None), is_plain=False) is None


async def test_resumed_tokens_are_not_sent_again():
    async with running_worker() as worker:
        leg = await worker.leg(body={"stream": True, "tokens": 4}, resume=pack_tokens([0, 1]))

        frames, failure = await worker.read(leg)

        assert failure is None
        assert [(frame.data, frame.token_ids) for frame in frames[1:-1]] == [
            (b"data: 2\n\n", [2]),
            (b"data: 3\n\n", [3]),
        ]


async def test_the_report_counts_prompt_and_completion_as_the_client_does():
    async with running_worker() as worker:
        leg = await worker.leg(body={"stream": True, "tokens": 8}, resume=pack_tokens(range(6)))

        frames, _failure = await worker.read(leg)

        report = frames[-1].report
        assert (report.prompt_tokens, report.cached_tokens, report.completion_tokens) == (7, 7, 8)


async def test_an_engine_that_cannot_resume_fails_that_leg_only():
    async with running_worker() as worker:
        leg = await worker.leg(body={"stream": True, "cannot_resume": "it forgot"}, resume=pack_tokens([0]))

        frames, failure = await worker.read(leg)

        assert failure.reason is Reason.CANNOT_RESUME
        assert "it forgot" in failure.message
        assert all(frame.kind is not FrameKind.DATA for frame in frames)


async def test_a_server_that_fails_for_lack_of_outputs_fails_with_the_reason():
    """As vLLM's does for responses."""
    async with running_worker() as worker:
        body = {"stream": True, "crash": True, "cannot_resume": "it forgot"}
        leg = await worker.leg(body=body, path="/v1/responses", resume=pack_tokens([0]))

        _frames, failure = await worker.read(leg)

        assert failure.reason is Reason.CANNOT_RESUME
        assert "it forgot" in failure.message


async def test_a_server_that_never_catches_up_fails_the_leg():
    async with running_worker() as worker:
        leg = await worker.leg(body={"stream": True, "tokens": 2}, resume=pack_tokens([0, 1, 2]))

        frames, failure = await worker.read(leg)

        assert failure.reason is Reason.CANNOT_RESUME
        assert all(frame.kind is not FrameKind.DATA for frame in frames)


async def test_a_request_with_lost_engine_state_never_reaches_the_engine():
    async with running_worker() as worker:
        leg = await worker.leg(body={"stream": True, "presence_penalty": 1}, resume=pack_tokens([0]))

        _frames, failure = await worker.read(leg)

        assert failure.reason is Reason.CANNOT_RESUME
        assert worker.engine.bodies == []
