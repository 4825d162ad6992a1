"""What all connections of one HTTP server share: its limits, the ASGI app, and the paths served without ASGI."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from shared.contracts.control import ServiceStatus
from shared.http.edge_limits import EdgeLimits
from shared.http.errors import JSON, NO_SNIFFING, Header, HttpError
from shared.http.limits import Connections, Descriptors, IdleClients
from shared.http.origin import AllowedPages, OriginPolicy
from shared.http.plain_requests import PlainRequests

AsgiMessage = MutableMapping[str, Any]
AsgiSend = Callable[[AsgiMessage], Awaitable[None]]
AsgiApp = Callable[[MutableMapping[str, Any], Callable[[], Awaitable[AsgiMessage]], AsgiSend], Awaitable[None]]
NO_CONTENT = 204

HEALTH_PATHS = frozenset({"/", "/health", "/ready", "/healthcheck", "/ping"})
"""Load balancers ask them under any name."""
READINESS_PATHS = frozenset({"/ready", "/healthcheck"})
"""Load balancers send no new requests to a server that answers these with 503."""
LEAVING = b'{"status":"not ready","reason":"the process stops"}'
WALK_S = 0.1
"""Interval at which late clients are looked for."""


class Body(Protocol):
    complete: bool
    size: int

    def add(self, data: bytes) -> None:
        """Append a piece."""


class DirectRequest(Protocol):
    """A request that is served without ASGI, as its connection sees it."""

    is_current: bool
    """Earlier requests of the same connection have their responses: this one may be served."""
    refusal: HttpError | None
    """An error that was decided before the body was complete."""
    slow: bool
    """The client is disconnected because it did not read in time."""

    @property
    def upload(self) -> Body:
        """The body so far."""

    @property
    def ended(self) -> bool:
        """The response is complete."""

    def refuse(self, error: HttpError) -> None:
        """Send an error as the response."""

    def close_after(self) -> None:
        """Close the connection after this response."""

    def client_left(self) -> None:
        """The connection has closed."""


Request = TypeVar("Request", bound=DirectRequest)


class HttpEdge(Generic[Request]):
    """Serves requests through an ASGI app; a subclass names the ``paths`` that it serves itself, without ASGI."""

    paths: Mapping[bytes, str] = {}
    """Paths of POST requests that are served without ASGI."""
    gets: Mapping[bytes, str] = {}
    """Paths of GET requests that are served without ASGI."""
    headers: Sequence[tuple[str, str]] = (("x-content-type-options", "nosniff"),)
    """Headers of every response of the app."""

    def __init__(
        self,
        app: AsgiApp,
        now: Callable[[], float],
        limits: EdgeLimits,
        pages: AllowedPages,
        origins: OriginPolicy | None,
    ) -> None:
        """``pages``: those that get headers with which they may read responses. ``origins`` None: no request is refused
        for the page that makes it, because each needs a key.
        """
        self.app = app
        self.pages = pages
        self.origins = origins
        self.date_line = b""
        """The Date header of all responses, which the server renews each second."""
        self.leaving = False
        """Each response closes its connection, because the server stops soon."""
        self.limits = limits
        self.uploads: set[Request] = set()
        """Requests whose body has not arrived completely."""
        self.connections = Connections(limits.connections_max, limits.connections_per_address_max)
        self.descriptors = Descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[0], now)
        self.idle = IdleClients(
            now, head_s_max=limits.head_s_max, read_s_max=limits.read_s_max, keep_alive_s=limits.keep_alive_s
        )
        self.plain_requests = PlainRequests(self.paths)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope["path"] = plain_path(scope["path"])
        if scope["method"] == "OPTIONS" and (allowed := self.pages.preflight(scope["headers"])):
            await _respond(send, 204, allowed, b"")
            return
        more = [header for name, value in scope["headers"] if name == b"origin" for header in self.pages.headers(value)]
        if self.leaving:
            more.append((b"connection", b"close"))
        send = _adding(more, send) if more else send
        if self.leaving and scope["path"] in READINESS_PATHS:
            await _respond(send, 503, [(b"content-type", JSON)], LEAVING)
            return
        refusal = self.refusal(scope)
        if refusal is not None:
            headers = [header for header in refusal.headers() if header != NO_SNIFFING]  # It is one of ``headers``.
            await _respond(send, refusal.status, headers, refusal.body)
            return
        if scope["method"] == "HEAD":  # uvicorn, which has the scope itself, sends the head alone.
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send)

    def refusal(self, scope: Any) -> HttpError | None:
        """Why the app does not get this request; None when it does."""
        if self.origins is None or scope["path"] in HEALTH_PATHS:
            return None
        return self.origins.refusal(scope["headers"], navigates=scope["method"] == "GET")

    async def end_late(self) -> None:
        """Drop clients that send or read too slowly, until cancelled."""
        while True:
            await asyncio.sleep(WALK_S)
            self.idle.end_late()

    def admit(
        self, connection: Any, path: str, headers: list[Header], *, http11: bool, keep: bool, query: bytes = b""
    ) -> Request:
        """The head of a request to one of ``paths`` or ``gets`` is complete."""
        raise NotImplementedError

    def limit_body(self, http_request: Request, body_bytes: int) -> bool:
        """Whether the body, of so many bytes announced or received, was refused: ``refusal`` is set then."""
        raise NotImplementedError

    def begin(self, http_request: Request) -> None:
        """Serve one complete request to one of ``paths`` or ``gets``; returns at once."""
        raise NotImplementedError

    def add_status_fields(self, status: ServiceStatus) -> ServiceStatus:
        return msgspec.structs.replace(status, refused_connections=self.descriptors.lacking)

    def refused_connection(self, reason: str) -> None:
        """A connection was refused or dropped, because there are too many."""


def plain_path(path: str) -> str:
    """The path without empty parts: clients join a base URL and a path with two slashes, or end it with one."""
    if "//" not in path and (len(path) == 1 or not path.endswith("/")):
        return path
    return "/" + "/".join(part for part in path.split("/") if part)


async def _respond(send: AsgiSend, status: int, headers: list[Header], body: bytes) -> None:
    length = [(b"content-length", b"%d" % len(body))] if status != NO_CONTENT else []
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *length]})
    await send({"type": "http.response.body", "body": body})


def _adding(more: list[Header], send: AsgiSend) -> AsgiSend:
    """``send`` with more headers in the response's head."""

    async def sends(message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await send(message)

    return sends
