"""The HTTP edge of the relayed paths: bounds first, then the relay; a bug costs its request, not the process."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from services.router.auth.authenticator import Authenticator
from services.router.auth.client import ApiClient
from services.router.http.connections import Connections
from services.router.http.errors import HttpError, error_body, error_event, failed
from services.router.http.idle_clients import IdleClients
from services.router.http.request import Bodies, Connection, Head, Header, HttpRequest, Upload
from services.router.placement.request_fields import CHAT, COMPLETIONS, Mode
from services.router.relay.relay import Relay
from services.router.settings import Settings
from services.router.telemetry.request_log import Ledger
from shared.contracts.failures import Reason
from shared.runtime.clock import Clock
from shared.telemetry.propagation import trace_named

log = logging.getLogger("baton.router")

PASSED_THROUGH = (
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/score",
    "/rerank",
    "/pooling",
    "/classify",
    "/tokenize",
    "/detokenize",
)
"""Other endpoints of vLLM's server, served by one worker as they are."""
RELAYED = (COMPLETIONS, CHAT, *PASSED_THROUGH)

UPLOAD_DISCARDED_FACTOR = 4
"""A body announced as up to so many times the limit is read and thrown away, so that the client reads its 413 instead
of a broken connection.
"""
BAD_MODE = f"x-baton-mode must be one of {', '.join(Mode)}."
BUG = "The router has a bug; its log says more."

AsgiMessage = MutableMapping[str, Any]
AsgiApp = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[AsgiMessage]], Callable[[AsgiMessage], Awaitable[None]]],
    Awaitable[None],
]


class Edge:
    """Serves exchanges; as an ASGI app, passes everything else on to ``app``."""

    def __init__(self, settings: Settings, clock: Clock, relay: Relay, ledger: Ledger, gate: Authenticator) -> None:
        self._settings = settings
        self._now = clock.now
        self._relay = relay
        self._ledger = ledger
        self._gate = gate
        self.app: AsgiApp | None = None
        self.uploads: set[HttpRequest] = set()
        """Requests whose body does not come in one piece."""
        self.bodies = Bodies()
        self.connections = Connections(
            count_max=settings.connections_max, per_address_max=settings.connections_per_address_max
        )
        self.idle = IdleClients(clock.now, head_s_max=settings.head_s_max, read_s_max=settings.read_s_max)
        prefix, numbers = secrets.token_hex(6), itertools.count(1)
        self._new_id = lambda: f"{prefix}-{next(numbers)}"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI."""
        assert self.app is not None
        refusal = self._gate.refusal(scope)
        if refusal is None:
            await self.app(scope, receive, send)
            return
        self._ledger.refused(refusal.status, refusal.reason)
        headers = [*refusal.headers(), (b"content-length", b"%d" % len(refusal.body))]
        await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await send({"type": "http.response.body", "body": refusal.body})

    def admit(
        self, connection: Connection, path: str, headers: list[Header], *, http11: bool, keep: bool
    ) -> HttpRequest:
        """The head is there. May refuse before any of the body is read."""
        head = Head(path, headers, self._new_id)
        exchange = HttpRequest(connection, head, Upload(self._now(), self.bodies), http11=http11, keep_alive=keep)
        if not self._lets_in(exchange, self._gate.client(headers)):
            return exchange
        if head.mode is None:
            self._refuse(exchange, HttpError(400, error_body(400, BAD_MODE), reason="bad_request"))
        elif len(self._relay.flights) >= self._settings.requests_at_once_max:
            self._refuse(exchange, failed(Reason.WORKER_BUSY, "The router is full. Try again shortly."))
        else:
            self.bound(exchange, head.length)
        return exchange

    def _lets_in(self, exchange: HttpRequest, client: ApiClient | None) -> bool:
        """Whether it may have a request served. A large body that nobody will read is not waited for."""
        refusal = self._gate.request(client)
        if refusal is not None:
            closes = exchange.head.length > UPLOAD_DISCARDED_FACTOR * self._settings.body_bytes_max
            self._refuse(exchange, msgspec.structs.replace(refusal, closes=closes))
        elif client is not None:
            exchange.head.client = client
        return refusal is None

    def turned_away(self) -> None:
        """A connection was one too many."""
        self._ledger.refused(503, "too_many_connections")

    def bound(self, exchange: HttpRequest, body_bytes: int) -> bool:
        """Refuse a body that is, or says it will be, too large, or one too many; answers whether it was refused."""
        bytes_max = self._settings.body_bytes_max
        if body_bytes <= bytes_max:
            if self.bodies.bytes_held <= self._settings.bodies_bytes_max:
                return False
            self._refuse(exchange, failed(Reason.WORKER_BUSY, "The router is full. Try again shortly."))
            exchange.upload.over()
            return True
        discarded = 0 <= exchange.head.length <= UPLOAD_DISCARDED_FACTOR * bytes_max
        message = f"The body is larger than {bytes_max} bytes."
        self._refuse(exchange, failed(Reason.TOO_LARGE, message, closes=not discarded))
        exchange.upload.over()
        return True

    def end_slow_uploads(self) -> None:
        """Refuse bodies that do not come in time."""
        late = self._now() - self._settings.body_s_max
        for exchange in [exchange for exchange in self.uploads if exchange.upload.begun_at < late]:
            self.uploads.discard(exchange)
            if exchange.ended:
                exchange.abort()
                continue
            message = f"The body did not come within {self._settings.body_s_max:g} s."
            self._refuse(exchange, HttpError(408, error_body(408, message), reason="body_slow", closes=True))
            if exchange.my_turn and exchange.refusal is not None:
                exchange.refuse(exchange.refusal)

    async def serve(self, exchange: HttpRequest) -> None:
        """One complete request."""
        try:
            await self._relay.serve(exchange)
        except Exception:
            log.exception("a request ended in a bug")
            if exchange.left or exchange.ended:
                return
            if exchange.begun:
                exchange.end(error_event(Reason.INTERNAL, BUG))
            else:
                exchange.refuse(failed(Reason.INTERNAL, BUG))
        finally:
            exchange.upload.over()

    def _refuse(self, exchange: HttpRequest, error: HttpError) -> None:
        exchange.refusal = error
        head = exchange.head
        known = {"request_id": head.request_id, "path": head.path, "trace_id": trace_named(head.trace)}
        self._ledger.refused(error.status, error.reason, **known)
