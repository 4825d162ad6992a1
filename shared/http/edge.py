"""What all connections of one HTTP server share: its limits, the ASGI app, and the paths served without ASGI."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from shared.contracts.control import ServiceStatus
from shared.http.edge_limits import EdgeLimits
from shared.http.errors import NO_SNIFFING, Header, HttpError
from shared.http.limits import Connections, Descriptors, IdleClients
from shared.http.origin import OriginPolicy
from shared.http.plain_requests import PlainRequests

AsgiMessage = MutableMapping[str, Any]
AsgiApp = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[AsgiMessage]], Callable[[AsgiMessage], Awaitable[None]]],
    Awaitable[None],
]


HEALTH_PATHS = frozenset({"/health", "/ready", "/healthcheck"})
"""Load balancers ask them under any name."""
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
        self, app: AsgiApp, now: Callable[[], float], limits: EdgeLimits, origins: OriginPolicy | None
    ) -> None:
        """``origins`` None: no request is refused for the page that makes it, because each needs a key."""
        self.app = app
        self.origins = origins
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
        refusal = self.refusal(scope)
        if refusal is None:
            await self.app(scope, receive, send)
            return
        headers = [header for header in refusal.headers() if header != NO_SNIFFING]  # It is one of ``headers``.
        headers.append((b"content-length", b"%d" % len(refusal.body)))
        await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await send({"type": "http.response.body", "body": refusal.body})

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
