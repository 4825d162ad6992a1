"""The head of a client's request: the headers that the router reads, and whose key came with them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from services.router.request.client import ANYONE
from services.router.request.facts import Mode
from shared.contracts.ids import RequestId, is_subject_token
from shared.http.errors import Header

AUTO: Final = Mode.AUTO

TRACE_CONTEXT: Final = {
    b"traceparent": re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"),
    b"tracestate": re.compile(rb"[ -~]{1,512}"),
}
"""Headers that are passed on to the workers, in the form that W3C Trace Context prescribes."""

READ = frozenset({b"content-length", b"content-type", b"x-request-id", b"x-baton-mode", b"x-baton-class"})
READ |= {b"x-baton-tenant", b"origin", b"content-encoding", b"host", *TRACE_CONTEXT}
"""The headers that the router reads; clients send many others."""
JSON_TYPE: Final = "application/json"
MODES: Final = {mode.value.encode(): mode for mode in Mode}


class Head:
    """The parts of a request's head that the router uses. Header names are lower case."""

    __slots__ = (
        "class_name",
        "client",
        "content_type",
        "encoding",
        "host",
        "http11",
        "is_batch",
        "length",
        "mode",
        "origin",
        "path",
        "query",
        "request_id",
        "tenant",
        "trace",
    )

    def __init__(self, path: str, headers: list[Header], new_id: Callable[[], str]) -> None:
        self.path = path
        self.query = b""
        """What follows the question mark of the URL."""
        self.http11 = True
        """Whether the response may be chunked."""
        self.client = ANYONE
        """The owner of the API key."""
        self.is_batch = False
        """Whether the request is a line of a batch: without targets, and less urgent than any request can ask to be."""
        self.mode: Mode | None = AUTO
        """None when the header names no mode."""
        self.class_name = ""
        self.tenant = ""
        """The header's tenant, which counts when no API key says otherwise."""
        self.content_type = JSON_TYPE
        self.origin = b""
        """The site of the page that sent the request; empty: no page did."""
        self.host = b""
        """The Host header."""
        self.encoding = ""
        """The Content-Encoding of the body; empty: none."""
        self.length = -1
        """The Content-Length; -1 without one."""
        self.trace: dict[str, str] | None = None
        """The client's W3C trace context."""
        request_id = self._read(headers)
        self.request_id = RequestId(request_id if request_id and is_subject_token(request_id) else new_id())

    def _read(self, headers: list[Header]) -> str:
        """Take what the headers say. Returns the request's name, which may be any text; empty without one."""
        request_id = ""
        for name, value in headers:
            if name not in READ:
                continue
            if name == b"content-length":
                self.length = int(value)
            elif name == b"host":
                self.host = value
            elif name == b"content-type":
                self.content_type = value.decode("latin-1")
            elif name == b"x-request-id":
                request_id = value.decode("latin-1")
            elif name == b"content-encoding":
                self.encoding = value.decode("latin-1")
            elif name == b"origin":
                self.origin = value
            elif name not in TRACE_CONTEXT:
                self._read_own(name, value)
            elif TRACE_CONTEXT[name].fullmatch(value):
                self.trace = {**(self.trace or {}), name.decode(): value.decode()}
        return request_id

    def _read_own(self, name: bytes, value: bytes) -> None:
        """Take a header of Baton's own."""
        if name == b"x-baton-mode":
            self.mode = MODES.get(value.strip().lower())
        elif name == b"x-baton-class":
            self.class_name = value.decode("latin-1").strip()
        elif name == b"x-baton-tenant":
            self.tenant = value.decode("latin-1").strip()

    def tenant_of_key(self) -> str:
        """The tenant of the API key, or else of the header; empty: none."""
        return self.client.key.tenant or self.tenant
