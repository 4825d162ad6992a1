"""Whatever a client sends as a form: the engine's parser finds the model that the router allowed, or the router refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from services.router.request.form import BadForm, form_type, read_form
from tests.support.examples import examples

pytest.importorskip("python_multipart", reason="vLLM's server brings the parser")

TYPE = form_type("multipart/form-data; boundary=xyz")
PIECES = (
    b'Content-Disposition: form-data; name="model"', b"content-disposition:form-data;name=model", b'; filename="a"',
    b'; filename="a; name=\\"model\\"', b"; filename*=utf-8''x", b'; name="model"', b"; name*=utf-8''model",
    b"\r\nContent-Type: text/plain; charset=utf-16", b'\r\nContent-Disposition: form-data; name="model"',
    b'\r\n name="model"', b"\r\n\r\n", b"\r\n", b"\n", b"\r", b"--xyz", b"--xyz--", b"\r\n--xyz\r\n", b"\r\n--xyz--",
    b"\r\n--xyz--\r\n", b"\r\n--xy", b"one", b"two", b'"', b"\\", b"\0", b"\xff", b" ", b"\t", b"_charset_",
)  # fmt: skip


def part(name: bytes, value: bytes, more: bytes) -> bytes:
    return b'--xyz\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (name, more, value)


names = st.sampled_from([b"model", b"prompt", b"file", b"MODEL", b"model[]", b"a b"])
values = st.one_of(st.sampled_from([b"one", b"two", b"", b"\r\n", b"\xff"]), st.binary(max_size=8))
mores = st.sampled_from([b"", b'; filename="a"', b'; filename="a b.wav"\r\nContent-Type: audio/wav'])
forms = st.lists(st.builds(part, names, values, mores), max_size=4).map(lambda parts: b"".join(parts) + b"--xyz--\r\n")


@st.composite
def changed(draw: st.DrawFn) -> bytes:
    """A form with pieces put in and cut out."""
    body = draw(forms)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(body)))
        body = body[:at] + draw(st.sampled_from(PIECES)) + body[at + draw(st.integers(0, 2)) :]
    return body


async def engine_fields(body: bytes) -> dict[str, list[str | None]] | None:
    """The values of each field, as vLLM's server reads them; None for a file, None in all when it refuses the form."""

    async def stream() -> AsyncIterator[bytes]:
        yield body

    try:
        form = await MultiPartParser(Headers({"content-type": TYPE}), stream()).parse()
    except MultiPartException:
        return None
    found: dict[str, list[str | None]] = {}
    for name, value in form.multi_items():
        found.setdefault(name, []).append(None if isinstance(value, UploadFile) else value)
    await form.close()
    return found


@settings(max_examples=examples(400), deadline=None)
@given(changed())
def test_the_engine_reads_no_other_fields_than_the_router(body: bytes):
    theirs = asyncio.run(engine_fields(body))
    try:
        ours = read_form(body, TYPE)
    except BadForm:
        event("refused here")
        return
    if theirs is None:
        event("refused by the engine only")
        return
    event("read by both")
    for name, found in theirs.items():
        if name.endswith("[]"):
            assert name in ours.fields or name in ours.files
        else:
            assert found == ([None] if name in ours.files else [ours.fields[name]])
    assert ours.fields.keys() | ours.files.keys() == theirs.keys()


@given(st.dictionaries(names, st.tuples(values, mores), min_size=1))
@settings(max_examples=examples(100), deadline=None)
def test_forms_as_clients_write_them_are_read(parts: dict[bytes, tuple[bytes, bytes]]):
    body = b"".join(part(name, value, more) for name, (value, more) in parts.items()) + b"--xyz--\r\n"

    form = read_form(body, TYPE)

    assert form.fields.keys() | form.files.keys() == {name.decode() for name in parts}
