"""The order of requests on one connection, and the fixed responses to input that is no valid request."""

from __future__ import annotations

from httptools import HttpRequestParser

from shared.http.edge import DirectRequest
from shared.http.errors import Header, HttpError, error_body

HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
HEAD_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
NOT_HTTP = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
BAD_BODY = HttpError(400, error_body(400, "The body does not match its headers."), reason="bad_request", closes=True)

UPGRADE_HEADERS = frozenset({b"upgrade", b"http2-settings"})


class _NoTrailers(list[Header]):
    def append(self, _header: Header) -> None:
        """Drop it. A trailer such as Content-Length or Authorization must not count as a header, and a client may send
        any number of them.
        """


NO_TRAILERS = _NoTrailers()
"""Takes the place of the header list after the head."""


class TooManyHeaders(Exception):
    """Raised in a parser callback: httptools wraps it in an HttpParserError."""


def head_without_upgrade(parser: HttpRequestParser, url: bytes, headers: list[Header]) -> bytes:
    """The head of a request without its offer to upgrade. ``Connection: close`` is kept."""
    lines = [b"%b %b HTTP/%b" % (parser.get_method(), url, parser.get_http_version().encode())]
    for name, value in headers:
        if name == b"connection":
            lines += [b"connection: close"] if b"close" in value.lower() else []
        elif name not in UPGRADE_HEADERS:
            lines.append(b"%b: %b" % (name, value))
    return b"\r\n".join([*lines, b"", b""])


class PipelinedRequest:
    """A direct request among the requests of its connection, with the attributes that uvicorn uses of a cycle."""

    __slots__ = ("disconnected", "http_request", "message_event")

    def __init__(self, http_request: DirectRequest) -> None:
        self.http_request = http_request
        self.disconnected = False
        self.message_event = NO_EVENT

    @property
    def response_complete(self) -> bool:
        """Whether the next request may be served."""
        return self.http_request.ended


class _NoEvent:
    def set(self) -> None:
        """Do nothing. uvicorn wakes its ASGI task by this event; such a request has ``client_left`` instead."""


NO_EVENT = _NoEvent()
