"""Bodies that would cost the engine's server too much never reach it, however they are written."""

from __future__ import annotations

import json

import pytest

from services.worker.legs.guard import refusal, refusal_of
from shared.contracts.engine_paths import COMPLETIONS, GENERATE
from shared.contracts.inference import LegKind
from shared.contracts.request_body import FIELD_BYTES_MIN, FIELDS_MAX, VALUES_MAX
from tests.unit.worker.fakes import running_worker

LARGE = FIELDS_MAX * FIELD_BYTES_MIN
"""Bytes of a body that need not be examined."""
HOSTILE = [
    b'{"chat_template_kwargs":{"eos_token":"x"}}',
    b'{"chat_template_kwargs":{"eos\\u005ftoken":"x"}}',
    b'{"chat\\u005ftemplate_kwargs":{"bos_token":null}}',
    b'{"chat_template_kwargs":{},"chat_template_kwargs":{"image_token":"x"}}',
    b'{"chat_template_kwargs":{"padding":"max_length","max_length":1000000000,"tokenize":true}}',
    b'{"chat_template_kwargs":[],"chat_template_kwargs":{"eos_token":"x"}}',
    b'{"temperature":NaN,"chat_template_kwargs":{"namespace":1}}',
    b'{"chat_template_kwargs":{"a":Infinity,"range":1}}',
    b'\xef\xbb\xbf{"chat_template_kwargs":{"messages":[]}}',
    '{"chat_template_kwargs":{"eos_token":"∀"}}'.encode("utf-16"),
    '{"x":1}'.encode("utf-16-be"),
    '{"x":1}'.encode("utf-32-le"),
    b'{"x":[' + b"[]," * FIELDS_MAX + b"1]}",
    b'{"x":{' + b'"a":1,' * FIELDS_MAX + b'"b":1}}',
    b'{"x":[' + b"1," * (VALUES_MAX + 1) + b"1]}",
    b'{"structured_outputs":{"choice":[' + b'"x",' * 20_000 + b'"x"]}}',
]


@pytest.mark.parametrize("body", HOSTILE, ids=lambda body: str(body[:40]))
async def test_a_hostile_body_is_refused_with_a_reason(body):
    error = json.loads(await refusal(body, COMPLETIONS))["error"]

    assert error["code"] == 400
    assert error["message"].startswith(("The body ", "`chat_template_kwargs` must not set ", "There are 20001 choices"))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[",
        b'{"chat_template_kwargs":7}',
        b'{"chat_template_kwargs":["eos_token"]}',
        b'{"chat_template_kwargs":{"enable_thinking":false,"add_bos_token":true,"documents":[{"eos_token":1}]}}',
        b'{"prompt":"chat_template_kwargs eos_token \\u005f"}',
        b'{"x":' + b"[" * (LARGE // 2) + b"]" * (LARGE // 2 - 7) + b"}",
        b'{"x":' + b"[" * 900 + b" " * LARGE + b"]" * 900 + b"}",
        b'{"prompt":"' + b"[{" * LARGE + b'"}',
        b'{"prompt":"' + b'\\"[' * LARGE + b'\\\\"}',
        b'{"prompt":[' + b"1," * (VALUES_MAX - 1) + b"1]}",
    ],
    ids=lambda body: str(body[:40]),
)
def test_any_other_body_is_the_engines_business(body):
    assert refusal_of(body, COMPLETIONS) == b""


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"token_ids":[1],"kv_transfer_params":{"remote_host":"x"}}', "kv_transfer_params"),
        (b'{"token_ids":[1],"kv_transfer\\u005fparams":{"remote_host":"x"}}', "kv_transfer_params"),
        (b'{"token_ids":[1],"x":NaN,"features":{"mm_hashes":{}}}', "features"),
        (b'{"sampling_params":{"extra_args":{"ec_transfer_params":{}}}}', "ec_transfer_params"),
        (b'{"content_parts":[{"type":"image_url"}]}', "content_parts"),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_orders_to_an_engine_are_refused_by_name_beside_token_ids(body, name):
    error = json.loads(await refusal(body, GENERATE))["error"]

    assert (error["code"], error["param"]) == (400, name)
    assert error["message"].startswith(f"`{name}` is not taken: ")
    assert await refusal(body, COMPLETIONS) == b""


def test_demands_beside_token_ids_are_bounded():
    choices = b'{"sampling_params":{"structured_outputs":{"choice":[' + b'"x",' * 20_000 + b'"x"]}}}'

    assert b"20001 choices" in refusal_of(choices, GENERATE)


@pytest.mark.parametrize("kind", list(LegKind))
async def test_a_refused_leg_never_reaches_the_engine(kind):
    async with running_worker() as worker:
        body = {"tokens": 1, "chat_template_kwargs": {"eos_token": "x"}}
        frames, failure = await worker.read(await worker.leg(kind, body=body))

        assert failure is None
        assert frames[0].status == 400
        assert json.loads(frames[0].data)["error"]["param"] == "chat_template_kwargs"
        assert worker.engine.bodies == []
