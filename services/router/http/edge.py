"""Admits HTTP requests: authentication and limits first, then the relay. A bug ends its request, not the process."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import secrets
from collections.abc import Coroutine
from typing import Any, Final

import msgspec

from services.router.auth.authenticator import Authenticator
from services.router.relay.relay import Relay
from services.router.request.client import ANYONE, ApiClient
from services.router.request.errors import BUG, bad_request, error_for, failed
from services.router.request.facts import Mode
from services.router.request.form import form_type
from services.router.request.head import JSON_TYPE, Head
from services.router.request.http_request import Connection, HttpRequest, Upload, UploadTotals, header_lines
from services.router.responses.responses import Responses
from services.router.settings import Settings
from services.router.telemetry.request_log import RequestLog
from shared.contracts.engine_paths import FORMS, PASSED_THROUGH, PLACED, RESPONSES, TOKENIZER_INFO
from shared.contracts.failures import Reason
from shared.contracts.request_body import BYTE_ORDER_MARK
from shared.http.edge import AsgiApp, HttpEdge
from shared.http.edge_limits import EdgeLimits
from shared.http.encodings import DECODERS, BadEncoding, BodyTooLarge, UnknownEncoding, decoded, encodings_of
from shared.http.errors import Header, HttpError, error_body
from shared.http.origin import AllowedPages, OriginPolicy
from shared.runtime.clock import Clock
from shared.telemetry.tracing import trace_named

log = logging.getLogger("baton.router")

UPLOAD_DISCARDED_FACTOR: Final = 4
"""A body whose Content-Length is up to this many times the limit is read and discarded: most clients read the response
only after they have sent the body, so that closing at once would show them a reset connection instead of the 413.
"""
JSON_TYPES: Final = re.compile(
    r"[ \t]*application/(?:[a-z0-9][a-z0-9!#$&^_.-]*\+)?json[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?",
    re.IGNORECASE | re.ASCII,
)
"""One media type, and its parameters."""
BAD_MODE: Final = bad_request(f"x-baton-mode must be one of {', '.join(Mode)}.")
NOT_JSON: Final = HttpError(
    415,
    error_body(
        415, "Send JSON, with the header `Content-Type: application/json` (`curl -d` sends a form's without it)."
    ),
    reason="not_json",
)
DECODED_AT_ONCE_MAX: Final = 2
BODY_BUG: Final = failed(Reason.INTERNAL, BUG)
NOT_A_FORM: Final = HttpError(
    415,
    error_body(415, "Send a form, with the header `Content-Type: multipart/form-data; boundary=...` (`curl -F`)."),
    reason="not_a_form",
)


class Edge(HttpEdge[HttpRequest]):
    """Serves the relayed paths. As an ASGI app it passes everything else on to FastAPI, after authentication."""

    paths = {path.encode(): path for path in (*PLACED, *PASSED_THROUGH)}  # noqa: RUF012
    gets = {TOKENIZER_INFO.encode(): TOKENIZER_INFO}  # noqa: RUF012

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        relay: Relay,
        responses: Responses,
        request_log: RequestLog,
        authenticator: Authenticator,
        app: AsgiApp,
    ) -> None:
        pages = AllowedPages(settings.allowed_hosts)
        super().__init__(app, clock.now, limits_of(settings), pages, origins_of(settings, pages, authenticator))
        self._settings = settings
        self._now = clock.now
        self._relay = relay
        self._responses = responses
        self._request_log = request_log
        self._authenticator = authenticator
        self.upload_totals = UploadTotals()
        self._tasks: set[asyncio.Task[None]] = set()
        self._decoding = asyncio.Semaphore(DECODED_AT_ONCE_MAX)
        prefix, numbers = secrets.token_hex(6), itertools.count(1)
        self._new_id = lambda: f"{prefix}-{next(numbers)}"

    def refusal(self, scope: Any) -> HttpError | None:
        """Why FastAPI does not get this request; None when it does."""
        refusal = super().refusal(scope) or self._authenticator.refusal(scope)
        if refusal is None:
            return None
        self._request_log.refused(refusal.status, refusal.reason)
        return error_for(scope["path"], refusal)

    def admit(
        self, connection: Connection, path: str, headers: list[Header], *, http11: bool, keep: bool, query: bytes = b""
    ) -> HttpRequest:
        """A request's head is complete. Its ``refusal`` is set if it is refused before its body is read."""
        head = Head(path, headers, self._new_id)
        head.query = query
        http_request = HttpRequest(
            connection,
            head,
            Upload(self._now(), self.upload_totals),
            http11=http11,
            keep_alive=keep and not self.leaving,
        )
        if head.origin:
            http_request.page_headers = header_lines(self.pages.headers(head.origin))
        client = self._authenticator.client(headers)
        if not self._lets_in(http_request, client, headers):
            return http_request
        if client is not ANYONE:
            self.connections.know(connection)
        if head.mode is None:
            self._refuse(http_request, BAD_MODE)
        elif (wrong := type_fault(head) or encoding_fault(head)) is not None:
            self._refuse(http_request, wrong)
        elif len(self._relay.in_flight) >= self._settings.requests_at_once_max:
            self._refuse(http_request, failed(Reason.WORKER_BUSY, "The router is full. Try again shortly."))
        else:
            self.limit_body(http_request, head.length)
        return http_request

    def _lets_in(self, http_request: HttpRequest, client: ApiClient | None, headers: list[Header]) -> bool:
        """Whether the client may have requests served. A refusal closes rather than read a large body."""
        refusal = self.origins.refusal(headers) if self.origins is not None else None
        if refusal is None:
            refusal = self._authenticator.unknown(headers) if client is None else self._authenticator.request(client)
        if refusal is not None:
            closes = http_request.head.length > UPLOAD_DISCARDED_FACTOR * self._settings.body_bytes_max
            self._refuse(http_request, msgspec.structs.replace(refusal, closes=closes))
        elif client is not None:
            http_request.head.client = client
        return refusal is None

    def refused_connection(self, reason: str) -> None:
        """Count a connection that was refused or dropped."""
        self._request_log.refused(503, reason)

    def limit_body(self, http_request: HttpRequest, body_bytes: int) -> bool:
        """Refuse a body larger than the limit, announced or received, or one that the router has no memory for.

        Returns whether the body was refused.
        """
        bytes_max = self._settings.body_bytes_max
        if body_bytes <= bytes_max:
            if self.upload_totals.bytes_held <= self._settings.bodies_bytes_max:
                return False
            return self._drop_body(http_request, failed(Reason.WORKER_BUSY, "The router is full. Try again shortly."))
        discarded = 0 <= http_request.head.length <= UPLOAD_DISCARDED_FACTOR * bytes_max
        message = f"The body is larger than {bytes_max} bytes."
        return self._drop_body(http_request, failed(Reason.TOO_LARGE, message, closes=not discarded))

    def _drop_body(self, http_request: HttpRequest, why: HttpError) -> bool:
        self._refuse(http_request, why)
        http_request.upload.over()
        return True

    def end_slow_uploads(self) -> None:
        """Refuse requests whose body does not arrive in time."""
        late = self._now() - self._settings.body_s_max
        for http_request in [http_request for http_request in self.uploads if http_request.upload.begun_at < late]:
            self.uploads.discard(http_request)
            if http_request.ended:
                http_request.abort()
                continue
            message = f"The body did not arrive within {self._settings.body_s_max:g} s."
            self._refuse(http_request, HttpError(408, error_body(408, message), reason="body_slow", closes=True))
            if http_request.is_current and http_request.refusal is not None:
                http_request.refuse(http_request.refusal)

    def begin(self, http_request: HttpRequest) -> None:
        """Serve one request whose body is complete; returns at once."""
        if http_request.head.encoding:
            self._spawn(self._decode(http_request), "decode-body")
        else:
            self._begin(http_request)

    async def _decode(self, http_request: HttpRequest) -> None:
        """Continue with the body as it was before the client compressed it."""
        error: HttpError | None = BODY_BUG
        try:
            async with self._decoding:  # What a small body becomes is counted only when it is there.
                error = await self._decoded(http_request)
        except Exception:
            log.exception("a body could not be decoded because of an internal error")
        if http_request.left:
            http_request.upload.over()
        elif error is not None:
            self._refuse(http_request, error)
            http_request.refuse(error)
        elif not self.limit_body(http_request, http_request.upload.size):
            self._begin(http_request)
        elif http_request.refusal is not None:
            http_request.refuse(http_request.refusal)

    async def _decoded(self, http_request: HttpRequest) -> HttpError | None:
        """Put the decoded body into the place of the other, or return why that cannot be."""
        bytes_max = self._settings.body_bytes_max
        names = encodings_of(http_request.head.encoding)
        try:
            body = await asyncio.to_thread(decoded, http_request.upload.body(), names, bytes_max)
        except BodyTooLarge:
            return failed(Reason.TOO_LARGE, f"The body, decoded, is larger than {bytes_max} bytes.")
        except BadEncoding as wrong:
            return bad_request(f"The body is not encoded as {', '.join(names)}, as its header says: {wrong}.")
        http_request.replace_body(body)
        return None

    def _begin(self, http_request: HttpRequest) -> None:
        if http_request.upload.has_mark():
            http_request.replace_body(http_request.upload.body().removeprefix(BYTE_ORDER_MARK))
        # ``takes`` compares the path, too, but is Python's: only this path pays for the call.
        if http_request.head.path == RESPONSES and self._responses.takes(http_request):
            self._spawn(self.serve(http_request), "serve-response")
        else:
            self._relay.begin(http_request, http_request.upload.over)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def serve(self, http_request: HttpRequest) -> None:
        """As ``begin``, and wait for the end."""
        try:
            await self._responses.serve(http_request)
        except Exception:
            log.exception("a request failed with an internal error")
            http_request.crash()
        finally:
            http_request.upload.over()

    def _refuse(self, http_request: HttpRequest, error: HttpError) -> None:
        http_request.refusal = error
        head = http_request.head
        known = {"request_id": head.request_id, "path": head.path, "trace_id": trace_named(head.trace)}
        self._request_log.refused(error.status, error.reason, **known)


def limits_of(settings: Settings) -> EdgeLimits:
    """What the router's clients may hold."""
    return EdgeLimits(
        connections_max=settings.connections_max,
        connections_per_address_max=settings.connections_per_address_max,
        head_s_max=settings.head_s_max,
        read_s_max=settings.read_s_max,
        keep_alive_s=settings.keep_alive_s,
        drain_s_max=settings.drain_s_max,
    )


def origins_of(settings: Settings, pages: AllowedPages, authenticator: Authenticator) -> OriginPolicy | None:
    """Which pages may use the router. Where a key is needed, a page needs one: browsers attach none by themselves."""
    if authenticator.closed:
        return None
    return OriginPolicy("ROUTER_ALLOWED_HOSTS", pages, checks_host=settings.is_local)


def type_fault(head: Head) -> HttpError | None:
    """Why a body of this type is refused; None when it is not, and ``head`` has its type as workers get it."""
    if head.path in FORMS:
        head.content_type = form_type(head.content_type)
        return None if head.content_type else NOT_A_FORM
    if head.content_type != JSON_TYPE:
        head.content_type = JSON_TYPE if is_json(head.content_type) or head.path == TOKENIZER_INFO else ""
    return None if head.content_type else NOT_JSON


def encoding_fault(head: Head) -> HttpError | None:
    """Why a body with this Content-Encoding is refused; None when it can be decoded, or need not be."""
    if not head.encoding:
        return None
    try:
        encodings = encodings_of(head.encoding)
    except UnknownEncoding as unknown:
        message = f"The body's encoding, {unknown}, is not read here. Send it as it is, or as {', '.join(DECODERS)}."
        accepted = (b"accept-encoding", ", ".join(DECODERS).encode())
        return HttpError(415, error_body(415, message), reason="unknown_encoding", more=(accepted,))
    if not encodings:
        head.encoding = ""
    return None


def is_json(content_type: str) -> bool:
    """Whether the body is JSON by its type: ``application/json``, or ``application/...+json`` (RFC 6839). A page of
    another site can send other types only.
    """
    return JSON_TYPES.fullmatch(content_type) is not None
