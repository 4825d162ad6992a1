"""Bodies that cost more than their size: refused before they are read, read without making objects, counted as held."""

from __future__ import annotations

import asyncio
import json
import tracemalloc

import pytest

from services.router.request.fields import read_request
from services.router.request.http_request import OBJECT_BYTES
from services.router.tokenize.prompts import READ_ON_LOOP_BYTES
from shared.contracts.engine_paths import CHAT, COMPLETIONS
from shared.contracts.request_body import FIELDS_MAX, STEP_BYTES
from tests.unit.router.world import World, in_world

MIB = 1024 * 1024
DEEP = FIELDS_MAX - 100
BRACKETS = b"[" + b"[]," * (8 * MIB // 3) + b"[]]"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/tokenize", "/pooling"])
@pytest.mark.parametrize(
    "name", ["eos_token", "bos_token", "image_token", "range", "tokenize", "max_length", "messages"]
)
@in_world()
async def test_a_client_that_sets_a_special_token_is_told_so_and_no_engine_is_asked(world: World, name, path):
    worker = await world.worker("w1")

    answer = await world.ask({"model": "m", "messages": [], "chat_template_kwargs": {name: "x" * 9000}}, path=path)

    assert (answer.status, answer.error["param"]) == (400, "chat_template_kwargs")
    assert name in answer.error["message"]
    assert worker.started == []


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"model":"m","prompt":"x","echo":' + BRACKETS + b"}", f"more than {FIELDS_MAX}"),
        ('{"model":"m","prompt":"x"}'.encode("utf-16"), "UTF-8"),
    ],
)
def test_a_body_with_too_much_structure_is_refused(body, why):
    fault = read_request(COMPLETIONS, body).fault

    assert fault is not None
    assert why in fault.message


@pytest.mark.parametrize("field", ["echo", "chat_template_kwargs", "messages", "tools", "baton", "unknown"])
def test_nesting_beyond_what_parsers_read_is_left_to_the_engine(field):
    body = b'{"model":"m","prompt":"x","%b":%b}' % (field.encode(), b"[" * DEEP + b"]" * DEEP)

    facts = read_request(COMPLETIONS, body)

    assert (facts.unsplittable, facts.fault) == ("the body cannot be read", None)


@pytest.mark.parametrize(
    "field", ["echo", "n", "chat_template_kwargs", "model", "messages", "tools", "baton", "unknown"]
)
def test_reading_a_body_makes_no_objects_of_what_placement_does_not_read(field):
    """As much structure as is allowed: as objects it would be ten times as large."""
    inside = b"[" + b"[]," * (FIELDS_MAX - 100) + b"[]]"
    body = b'{"model":"m","prompt":"x","%b":%b}' % (field.encode(), inside)
    read_request(CHAT, b"{}")
    tracemalloc.start()
    try:
        facts = read_request(COMPLETIONS, body)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert facts.body is not None or facts.fault is not None
    assert kept < 50_000
    assert peak < 8 * STEP_BYTES


@pytest.mark.parametrize("value", [json.dumps(["x" * 5000]), '"' + 5000 * " " + '5"', "5." + 5000 * "0"])
def test_a_value_that_is_too_long_is_refused_where_its_meaning_counts(value):
    for name in ("n", "best_of", "max_tokens", "reasoning_effort", "stream", "cache_hit_threshold"):
        fault = read_request(CHAT, f'{{"messages":[{{}}],"{name}":{value}}}'.encode()).fault
        assert fault is not None
        assert fault.param == name


def test_a_long_name_is_cut():
    long = json.dumps(["x" * 5000])

    assert read_request(CHAT, f'{{"model":{long},"cache_salt":{long}}}'.encode()).model == ""
    assert read_request(CHAT, b'{"model":"%b"}' % (b"y" * 9000)).model == "y" * 512


@in_world()
async def test_a_large_body_is_read_off_the_loop_and_served(world: World):
    worker = await world.worker("w1")

    answer = await world.ask({"model": "m", "prompt": "y" * (READ_ON_LOOP_BYTES + 1)})

    assert answer.status == 200
    assert len(worker.started) == 1


@in_world()
async def test_a_client_that_leaves_while_its_body_is_read_is_served_no_more(world: World):
    worker = await world.worker("w1")
    connection, answering = world.begin(b'{"model":"m","prompt":"' + b"y" * READ_ON_LOOP_BYTES + b'"}')
    await asyncio.sleep(0)

    connection.leave()
    await answering

    assert (worker.started, connection.written) == ([], b"")
    assert world.router.relay.in_flight == set()


@in_world()
async def test_a_body_in_tiny_pieces_counts_as_the_memory_that_it_takes(world: World):
    connection, answering = world.begin(b'{"model":"m","prompt":"')
    totals, upload = world.router.edge.upload_totals, connection.http_request.upload
    for _ in range(1000):
        upload.add(b"yy")
    assert totals.bytes_held > 1000 * OBJECT_BYTES

    upload.add(b'"}')
    assert len(upload.body()) == upload.size
    assert totals.bytes_held < upload.size + 2 * OBJECT_BYTES
    await answering

    assert totals.bytes_held == 0
