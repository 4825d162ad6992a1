"""What clients upload as batches: any bytes, in any pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.batches.batches import read_wanted
from services.router.batches.files import FileRefused
from services.router.batches.lines import BadLine, Line, LineReader, Validation, answered, read_request
from services.router.batches.store import SegmentWriter, read
from services.router.http.upload_form import BadForm, UploadForm
from shared.contracts.batches import PART_BYTES
from tests.support.examples import examples
from tests.support.memory_bus import MemoryBus, MemoryHub

T = TypeVar("T")

ENDPOINT = "/v1/completions"
CONTENT = st.lists(st.sampled_from([b"\n", b"", b"a", b"{}", b" ", b"\r\n", b"xyz" * 20])).map(b"".join)
CUTS = st.lists(st.integers(1, 40), max_size=30)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
LINE = st.fixed_dictionaries(
    {},
    optional={
        "custom_id": st.text(max_size=4) | JSON,
        "method": st.just("POST") | JSON,
        "url": st.just(ENDPOINT) | JSON,
        "body": st.fixed_dictionaries({"model": st.just("m") | JSON}, optional={"stream": JSON}) | JSON,
    },
)
TEXT = LINE.map(msgspec.json.encode) | JSON.map(msgspec.json.encode) | st.binary(max_size=60)


def outcome(work: Callable[[], T]) -> T | BadLine | FileRefused:
    """What it returns, or the refusal that it raises."""
    try:
        return work()
    except (BadLine, FileRefused) as refusal:
        return refusal


def pieces_of(content: bytes, cuts: list[int]) -> list[bytes]:
    pieces, at = [], 0
    for cut in cuts:
        pieces.append(content[at : at + cut])
        at += cut
    return [*pieces, content[at:]]


def lines_of(content: bytes, cuts: list[int], number: int = 0, offset: int = 0) -> list[Line]:
    reader = LineReader(number, offset)
    found = [line for piece in pieces_of(content, cuts) for line in reader.feed(piece)]
    return [*found, *reader.close()]


@settings(max_examples=examples(100))
@given(CONTENT, CUTS, st.integers(0, 20))
def test_lines_are_the_same_in_all_pieces_and_from_each_of_them_on(content: bytes, cuts: list[int], at: int):
    lines = lines_of(content, cuts)
    texts = content.split(b"\n")
    assert [line.text for line in lines] == (texts if texts[-1] else texts[:-1])
    assert [line.number for line in lines] == list(range(len(lines)))
    if lines:
        before = lines[at % len(lines)]
        assert lines_of(content[before.end :], cuts, before.number + 1, before.end) == lines[before.number + 1 :]


@settings(max_examples=examples(200))
@given(st.lists(TEXT, max_size=5))
def test_each_line_is_a_request_or_a_fault_that_repeats_nothing(texts: list[bytes]):
    validation = Validation(ENDPOINT)
    for number, text in enumerate(texts):
        validation.add(Line(number, 0, text))
    validation.close()
    for text in texts:
        result = outcome(lambda: read_request(text, ENDPOINT))  # noqa: B023  # called at once
        if isinstance(result, BadLine):
            assert validation.faults
            assert str(result).isascii()
        else:
            assert msgspec.json.decode(result.body)["model"]
    assert bool(validation.faults) or validation.total > 0


@settings(max_examples=examples(100))
@given(
    st.binary(max_size=60)
    | JSON.map(msgspec.json.encode)
    | JSON.map(lambda one: msgspec.json.format(msgspec.json.encode(one)))
)
def test_whatever_an_engine_answers_is_one_line_of_json(body: bytes):
    result = answered(0, "batch_1", "c\n1", "r", 200, body)
    assert result.text.endswith(b"\n")
    assert result.text.count(b"\n") == 1
    told = msgspec.json.decode(result.text)
    assert told["custom_id"] == "c\n1"
    try:
        assert told["response"]["body"] == msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        assert told["response"]["body"] == body.decode(errors="replace")


@settings(max_examples=examples(100))
@given(st.binary(max_size=60) | JSON.map(msgspec.json.encode) | st.dictionaries(st.sampled_from(["input_file_id", "endpoint", "completion_window", "metadata"]), JSON | st.sampled_from([ENDPOINT, "24h"])).map(msgspec.json.encode))  # fmt: skip
def test_a_batch_is_made_as_wanted_or_refused(body: bytes):
    result = outcome(lambda: read_wanted(body))
    assert result.status == 400 if isinstance(result, FileRefused) else result.input_file_id


PART = b'--B\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'


@settings(max_examples=examples(100))
@given(st.binary(max_size=200), CUTS, st.booleans(), st.integers(0, 400), st.binary(max_size=3))
def test_a_form_is_read_in_all_pieces_and_a_broken_one_is_refused(
    content: bytes, cuts: list[int], is_broken: bool, at: int, noise: bytes
):
    content = content.replace(b"--B", b"")
    body = PART % (b"purpose", b"", b"batch") + PART % (b"file", b'; filename="f"', content) + b"--B--\r\n"
    if is_broken:
        body = body[:at] + noise + body[at + 1 :]
    taken: list[bytes] = []

    async def take(piece: bytes) -> None:
        taken.append(piece)

    async def receive() -> UploadForm:
        form = UploadForm("multipart/form-data; boundary=B", take)
        for piece in pieces_of(body, cuts):
            await form.feed(piece)
        form.close()
        return form

    try:
        form = asyncio.run(receive())
    except BadForm:
        assert is_broken
    else:
        assert is_broken or (b"".join(taken), form.fields, form.filename) == (content, {"purpose": "batch"}, "f")


@settings(max_examples=examples(30))
@given(st.lists(st.integers(0, 2 * PART_BYTES), min_size=1, max_size=6), st.integers(0, 4 * PART_BYTES))
def test_what_is_stored_in_pieces_is_read_from_any_offset(sizes: list[int], offset: int):
    async def scenario() -> None:
        bus = MemoryBus(MemoryHub())
        content, segments, writer = b"", [], SegmentWriter(bus)
        for number, size in enumerate(sizes):
            piece = bytes([number]) * size
            content += piece
            writer.add(piece)
            await writer.store(whole=number % 2 == 0)
            if number == 2:
                await writer.store()
                segments.append(writer.segment)
                writer.add(b"not counted")
                await writer.store()
                writer = SegmentWriter(bus)
        await writer.store()
        segments.append(writer.segment)
        assert b"".join([piece async for piece in read(bus, segments, offset)]) == content[offset:]

    asyncio.run(scenario())
