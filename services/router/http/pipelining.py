"""The order of requests on one connection, and what is said there without a request: bytes for clients of any kind."""

from __future__ import annotations

from httptools import HttpRequestParser

from services.router.http.errors import HttpError, error_body
from services.router.http.request import Header, HttpRequest

HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
HEAD_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
NOT_HTTP = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
NO_SENSE = HttpError(400, error_body(400, "The body is not what its headers say."), reason="bad_request", closes=True)

OF_UPGRADES = frozenset({b"upgrade", b"http2-settings"})


class _NoTrailers(list[Header]):
    def append(self, _header: Header) -> None:
        """Nothing: what comes behind a body is no header, and as long as a client wants."""


NO_TRAILERS = _NoTrailers()
"""Where headers go that come after the head."""


class TooManyHeaders(Exception):
    """More than anybody needs; the parser wraps it."""


def head_without_upgrade(parser: HttpRequestParser, url: bytes, headers: list[Header]) -> bytes:
    """The head of a request without its offer to speak another protocol."""
    lines = [b"%b %b HTTP/%b" % (parser.get_method(), url, parser.get_http_version().encode())]
    for name, value in headers:
        if name == b"connection":
            lines += [b"connection: close"] if b"close" in value.lower() else []
        elif name not in OF_UPGRADES:
            lines.append(b"%b: %b" % (name, value))
    return b"\r\n".join([*lines, b"", b""])


class PipelinedRequest:
    """An http_request's place among the requests of its connection, in the shape that uvicorn's protocol looks at."""

    __slots__ = ("disconnected", "http_request", "message_event")

    def __init__(self, http_request: HttpRequest) -> None:
        self.http_request = http_request
        self.disconnected = False
        self.message_event = NOBODY_WAITS

    @property
    def response_complete(self) -> bool:
        """Whether the next request may be served."""
        return self.http_request.ended


class _NobodyWaits:
    def set(self) -> None:
        """Nothing: an http_request is told directly."""


NOBODY_WAITS = _NobodyWaits()
