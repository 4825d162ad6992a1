"""Reads the fields of a form (``multipart/form-data``, RFC 7578) that placement needs.

The engine's server reads the same bytes with another parser. It must not find another model in them than the router
allowed, so this parser refuses whatever the two could read in different ways: it takes what HTTP clients send, and
nothing else.
"""

from __future__ import annotations

import re

import msgspec

from services.router.request.facts import Body, Fault, RequestFacts
from services.router.request.fields import MODEL_CHARS_MAX, UNSPLITTABLE_PATH
from services.router.request.sequences import lax_count

MEDIA_TYPE = "multipart/form-data"
BOUNDARY = re.compile(r"[A-Za-z0-9'()+_,./:=? -]{0,69}[A-Za-z0-9'()+_,./:=?-]", re.ASCII)
"""RFC 2046."""
TYPE = re.compile(r'multipart/form-data\s*;\s*boundary=(?:"([^"\\]+)"|([^\s";,]+))\s*', re.IGNORECASE | re.ASCII)
LINE_END = b"\r\n"
PARTS_MAX = 64
HEAD_BYTES_MAX = 4096
"""Size of the lines before a part's value."""
VALUE_BYTES_MAX = 64 * 1024
"""Size of a field that is no file."""
HEADER = re.compile(rb"(content-(?:disposition|type|transfer-encoding|length)): *([^\r\n]*)", re.IGNORECASE)
DISPOSITION = re.compile(rb'form-data; *name="([^"\\\r\n]{1,128})"(; *filename=[^\r\n]+)?', re.IGNORECASE)
ANOTHER_NAME = re.compile(rb";[\s\"']*name\*?\s*=", re.IGNORECASE)
"""Text after a file's name that another parser could take for the field's name."""
REPEATED_END = "[]"
"""Ending of a name that a form may have several times."""
TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
"""Texts that pydantic reads as a true flag."""
DIGITS = re.compile(r"[0-9]{1,9}", re.ASCII)


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """A form without the contents of its files."""

    fields: dict[str, str]
    files: dict[str, int]
    """Sizes of the files in bytes, by field."""


class BadForm(ValueError):
    """A form that the router does not read; the message is for the client."""


def form_type(content_type: str) -> str:
    """The type of a form as workers get it, with its boundary and no other parameter; empty when it is none."""
    match = TYPE.fullmatch(content_type.strip())
    boundary = (match[1] or match[2]) if match is not None else ""
    return f'{MEDIA_TYPE}; boundary="{boundary}"' if BOUNDARY.fullmatch(boundary) else ""


def read_form(body: bytes, content_type: str) -> Form:
    """``content_type``: from ``form_type``. Raises BadForm."""
    delimiter = b"\r\n--" + content_type.partition('"')[2][:-1].encode()
    if not body.startswith(delimiter[2:] + LINE_END):
        raise BadForm("The form must begin with the boundary that its Content-Type names.")
    fields: dict[str, str] = {}
    files: dict[str, int] = {}
    begin = len(delimiter)
    for _ in range(PARTS_MAX):
        end = body.find(delimiter, begin)
        if end < 0:
            raise BadForm("The form must end with the boundary that its Content-Type names.")
        name, value_at, is_file = _head(body, begin, end)
        if (name in fields or name in files) and not name.endswith(REPEATED_END):
            raise BadForm(f"The form has `{name}` twice.")
        if is_file:
            files[name] = end - value_at
        else:
            fields[name] = _value(body, name, value_at, end)
        begin = end + len(delimiter) + len(LINE_END)
        follows = body[begin - len(LINE_END) : begin]
        if follows == b"--" and body[begin : begin + 3] in (b"", LINE_END):
            return Form(fields=fields, files=files)
        if follows != LINE_END:
            raise BadForm("A boundary in the form must be followed by a line end, and the last one by two hyphens.")
    raise BadForm(f"The form has more than {PARTS_MAX} parts.")


def _head(body: bytes, begin: int, end: int) -> tuple[str, int, bool]:
    """A part's name, where its value begins, and whether that is a file. Raises BadForm."""
    at = body.find(LINE_END * 2, begin, min(end, begin + HEAD_BYTES_MAX))
    if at < 0:
        raise BadForm(f"A part of the form has no head, or one of more than {HEAD_BYTES_MAX} bytes.")
    headers = [HEADER.fullmatch(line) for line in body[begin:at].split(LINE_END)]
    found = [match[2] for match in headers if match is not None and match[1].lower() == b"content-disposition"]
    if None in headers or len(found) != 1:
        raise BadForm("Each part of the form needs one Content-Disposition, and may have a Content-Type.")
    named = DISPOSITION.fullmatch(found[0])
    if named is None or (named[2] and ANOTHER_NAME.search(named[2])):
        raise BadForm('Each part of the form needs `Content-Disposition: form-data; name="..."`, then `filename`.')
    return _text(named[1]), at + len(LINE_END * 2), named[2] is not None


def _value(body: bytes, name: str, begin: int, end: int) -> str:
    if end - begin > VALUE_BYTES_MAX:
        raise BadForm(f"`{name}` must have at most {VALUE_BYTES_MAX} bytes.")
    return _text(body[begin:end])


def _text(raw: bytes) -> str:
    """As Starlette, which reads the form for the engine's server."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def read_form_request(path: str, body: bytes, content_type: str) -> RequestFacts:
    """The request as placement sees it. Never raises."""
    try:
        fields = read_form(body, content_type).fields
    except BadForm as bad:
        return RequestFacts(path=path, model="", fault=Fault(param="", message=str(bad)))
    tokens_out = fields.get("max_completion_tokens", "")
    return RequestFacts(
        path=path,
        model=fields.get("model", "")[:MODEL_CHARS_MAX],
        stream=fields.get("stream", "").strip().lower() in TRUE,
        unsplittable=UNSPLITTABLE_PATH,
        tokens_out=int(tokens_out) if DIGITS.fullmatch(tokens_out) else 0,
        sequences=lax_count(fields.get("n")),
        body=Body(model=fields.get("model")),
    )
