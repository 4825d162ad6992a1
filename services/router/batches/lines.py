"""The lines of a batch: what clients send as input, and what they get as output and errors, in OpenAI's format."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from shared.contracts.batches import BatchUsage, LineFault
from shared.contracts.engine_paths import CHAT, COMPLETIONS, RESPONSES
from shared.contracts.request_body import BYTE_ORDER_MARK

ENDPOINTS = (CHAT, COMPLETIONS, "/v1/embeddings", RESPONSES)
LINES_MAX = 50_000
BLANK_LINES_MAX = 10_000
LINE_BYTES_MAX = 4 * 1024 * 1024
CUSTOM_ID_CHARS_MAX = 512
FAULTS_MAX = 30
"""Faults that a refused batch lists; the client corrects these first."""
OK = 200
DIGEST_BYTES = 16
SEVERAL = 2
COUNT_MAX = 1 << 40
"""Tokens of one line; fifty thousand times as many still fit."""
METHOD = "POST"


class Line(NamedTuple):
    """A line as it lies in the file, without its end."""

    number: int
    """Number of the line, from 0."""
    end: int
    """Where the next line begins."""
    text: bytes

    @property
    def is_blank(self) -> bool:
        return not self.text.strip()


class Request(msgspec.Struct, frozen=True, kw_only=True):
    custom_id: str
    model: str
    body: msgspec.Raw


class _Written(msgspec.Struct, kw_only=True):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Body(msgspec.Struct, kw_only=True):
    model: Any = None
    stream: Any = None
    background: Any = None


_written = msgspec.json.Decoder(_Written)
_body = msgspec.json.Decoder(_Body)


class BadLine(Exception):
    """The line is no request of the batch."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param

    def fault(self, number: int) -> LineFault:
        """The error as the batch lists it; ``number`` from 0."""
        return LineFault(code=self.code, message=str(self), line=number + 1, param=self.param)


class LineReader:
    """Cuts a file that comes in pieces into lines."""

    def __init__(self, number: int = 0, offset: int = 0) -> None:
        """``number`` and ``offset`` of the first line."""
        self._number = number
        self._offset = offset
        self._begun: list[bytes] = []
        self._begun_bytes = 0

    def feed(self, piece: bytes) -> Iterator[Line]:
        """The lines that are complete now. Raises BadLine when one is too long."""
        *whole, rest = piece.split(b"\n")
        for text in whole:
            self._begin(text)
            yield self._end(1)
        self._begin(rest)

    def close(self) -> Iterator[Line]:
        """The last line, if nothing ends it."""
        if self._begun_bytes:
            yield self._end(0)

    def _begin(self, text: bytes) -> None:
        self._begun.append(text)
        self._begun_bytes += len(text)
        if self._begun_bytes > LINE_BYTES_MAX:
            raise BadLine("line_too_long", f"A line may have at most {LINE_BYTES_MAX} bytes.")

    def _end(self, end_bytes: int) -> Line:
        text = b"".join(self._begun)
        self._offset += len(text) + end_bytes
        line = Line(self._number, self._offset, text)
        self._number += 1
        self._begun, self._begun_bytes = [], 0
        return line


class Validation:
    """Looks at all lines of a batch, once."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._seen: set[bytes] = set()
        self._models: set[str] = set()
        self._is_too_long = False
        self.total = 0
        self.faults: list[LineFault] = []

    @property
    def is_over(self) -> bool:
        """Further lines change nothing."""
        return len(self.faults) >= FAULTS_MAX or self._is_too_long

    @property
    def model(self) -> str:
        """The model of all lines; empty if they name several."""
        return next(iter(self._models)) if len(self._models) == 1 else ""

    def add(self, line: Line) -> None:
        """Look at one line."""
        self._is_too_long = self.total >= LINES_MAX or line.number >= BLANK_LINES_MAX + LINES_MAX
        if self._is_too_long:
            self.faults = [LineFault(code="too_many_tasks", message=f"A batch may have at most {LINES_MAX} lines.")]
            return
        if line.is_blank:
            return
        self.total += 1
        try:
            request = read_request(line.text, self._endpoint)
            self._add_id(request.custom_id)
            if len(self._models) < SEVERAL:
                self._models.add(request.model)
        except BadLine as bad:
            self.faults.append(bad.fault(line.number))

    def close(self) -> None:
        """There are no more lines."""
        if not self.total and not self.faults:
            self.faults = [LineFault(code="empty_file", message="The file has no lines.")]

    def _add_id(self, custom_id: str) -> None:
        digest = hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).digest()
        if digest in self._seen:
            raise BadLine("duplicate_custom_id", "An earlier line of the batch has the same custom_id.", "custom_id")
        self._seen.add(digest)


def read_request(text: bytes, endpoint: str) -> Request:
    """Raises BadLine. Messages do not repeat what the line contains: operators read them."""
    try:
        written = _written.decode(text.removeprefix(BYTE_ORDER_MARK))  # Before a file's first line.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadLine("invalid_json_line", "This line is not a JSON object.") from None
    custom_id = written.custom_id
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= CUSTOM_ID_CHARS_MAX:
        message = f"custom_id must be a string of 1 to {CUSTOM_ID_CHARS_MAX} characters."
        raise BadLine("missing_required_parameter" if custom_id is None else "invalid_custom_id", message, "custom_id")
    if written.method != METHOD:
        raise BadLine("invalid_method", f"method must be {METHOD}.", "method")
    if written.url != endpoint:
        raise BadLine("invalid_url", f"url must be the endpoint of the batch, {endpoint}.", "url")
    return Request(custom_id=custom_id, model=_model_of(written.body), body=written.body)


def _model_of(raw: msgspec.Raw) -> str:
    try:
        body = _body.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadLine("missing_required_parameter", "body must be a JSON object.", "body") from None
    if not isinstance(body.model, str) or not body.model:
        raise BadLine("missing_required_parameter", "body.model must be the name of a model.", "body.model")
    for name in ("stream", "background"):
        if getattr(body, name) not in (None, False):
            raise BadLine("unsupported_parameter", f"A line of a batch cannot use {name}.", f"body.{name}")
    return body.model


class Result(NamedTuple):
    """A line of output or of errors."""

    number: int
    is_output: bool
    text: bytes
    usage: BatchUsage = BatchUsage()


def answered(number: int, batch_id: str, custom_id: str, request_id: str, status: int, body: bytes) -> Result:
    """What an engine, or the router, has answered to a line."""
    response = {"status_code": status, "request_id": request_id, "body": _json_or_text(body)}
    result = _result(number, batch_id, custom_id, response, None, is_output=status == OK)
    return result._replace(usage=usage_in(body)) if result.is_output else result


def unanswered(number: int, batch_id: str, custom_id: str, code: str, message: str) -> Result:
    """A line that was not served."""
    return _result(number, batch_id, custom_id, None, {"code": code, "message": message}, is_output=False)


def _result(number: int, batch_id: str, custom_id: str, response: Any, error: Any, *, is_output: bool) -> Result:
    made = {
        "id": f"batch_req_{batch_id.removeprefix('batch_')}_{number + 1}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return Result(number, is_output, msgspec.json.encode(made) + b"\n")


class _Details(msgspec.Struct):
    cached_tokens: Any = None
    reasoning_tokens: Any = None


class _Usage(msgspec.Struct):
    """Chat completions, completions and embeddings count the prompt and the completion, responses input and output."""

    prompt_tokens: Any = None
    completion_tokens: Any = None
    input_tokens: Any = None
    output_tokens: Any = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_answer = msgspec.json.Decoder(_Answer)


def usage_in(body: bytes) -> BatchUsage:
    """What an answer counts; nothing where it counts nothing that can be read."""
    try:
        usage = _answer.decode(body).usage or _Usage()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return BatchUsage()
    of_input = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    of_output = usage.completion_tokens_details or usage.output_tokens_details or _Details()
    return BatchUsage(
        input_tokens=_count(usage.prompt_tokens) or _count(usage.input_tokens),
        cached_tokens=_count(of_input.cached_tokens),
        output_tokens=_count(usage.completion_tokens) or _count(usage.output_tokens),
        reasoning_tokens=_count(of_output.reasoning_tokens),
    )


def _count(value: Any) -> int:
    """A count that a server reports; 0 where it is no plausible number."""
    return value if type(value) is int and 0 < value <= COUNT_MAX else 0


def _json_or_text(body: bytes) -> Any:
    """The body as part of a line: JSON without line ends."""
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
        return msgspec.Raw(msgspec.json.format(body, indent=-1) if b"\n" in body or b"\r" in body else body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body.decode(errors="replace")
