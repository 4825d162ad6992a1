"""Responses with state on engines without: what a client's earlier response contains becomes part of the body that an
engine gets, and what the engine answers is kept, before the client has its end.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable
from functools import partial

import msgspec

from services.router.relay.relay import Relay
from services.router.request.client import ApiClient
from services.router.request.errors import EVENT_END, bad_request, failed
from services.router.request.http_request import HttpRequest, header_lines
from services.router.responses.background import TENANT_MAX, Background, Run
from services.router.responses.history import (
    FAILED,
    BadRequest,
    StoredResponse,
    Wanted,
    continued,
    ended,
    input_items,
    queued,
    read_kept,
    read_wanted,
    stateless,
    with_fields,
)
from services.router.responses.inner_request import InnerRequest, response_in, with_response
from services.router.responses.response_store import NotKept, ResponseStore, on_loop_or_thread
from services.router.settings import Settings
from services.router.telemetry.request_log import RequestLog
from shared.bus.port import Bus
from shared.contracts.engine_paths import RESPONSES
from shared.contracts.failures import Reason
from shared.contracts.ids import RouterId
from shared.contracts.request_body import body_fault
from shared.contracts.routers import entry_key
from shared.http.errors import HttpError, error_body
from shared.runtime.clock import Clock
from shared.telemetry.tracing import trace_named

log = logging.getLogger("baton.router")

QUOTED_CHARS = 64
"""Characters of an id that an error message quotes."""
OK = 200
LOST = "The router that made this response was lost."
KEPT, NOT_KEPT = "kept", "failed"


class ResponseRefused(Exception):
    """The request is not served."""

    def __init__(self, error: HttpError) -> None:
        super().__init__(error.reason)
        self.error = error


class Responses:
    """``serve`` is for every request; those that need no state go to the relay as they are."""

    def __init__(
        self, *, settings: Settings, router_id: RouterId, bus: Bus, clock: Clock, relay: Relay, request_log: RequestLog
    ) -> None:
        self.enabled = settings.response_bytes_max > 0
        self._settings = settings
        self._router_id = router_id
        self._clock = clock
        self._relay = relay
        self._request_log = request_log
        self._store = ResponseStore(bus, settings.response_bytes_max, settings.responses_tenant_bytes_max)
        self._background = Background(router_id, bus, self._store, relay.serve)
        self.counts: dict[str, int] = {KEPT: 0, NOT_KEPT: 0}
        self.failure = ""
        """Why the last response could not be kept; empty if it was."""

    async def open(self) -> None:
        """Questions of other routers are answered when it returns."""
        if self.enabled:
            await self._background.open()

    async def drain(self) -> None:
        """Let responses in the background end."""
        await self._background.drain(self._settings.drain_s_max)

    async def close(self) -> None:
        """End those that still run."""
        await self._background.close()

    def takes(self, http_request: HttpRequest) -> bool:
        """Whether ``serve`` must look at the request; all others can go to the relay."""
        return self.enabled and http_request.head.path == RESPONSES

    def serve(self, http_request: HttpRequest) -> Awaitable[None]:
        """Serve one request from its complete body to the end of its response."""
        return self._serve_response(http_request) if self.takes(http_request) else self._relay.serve(http_request)

    async def _serve_response(self, http_request: HttpRequest) -> None:
        try:
            body = http_request.upload.body()
            wanted = await on_loop_or_thread(len(body), _wanted, body)
            if wanted is None:
                await self._relay.serve(http_request)
            else:
                await self._serve(http_request, wanted)
        except (BadRequest, NotKept, ResponseRefused) as error:
            self._refuse(http_request, refusal_for(error))

    async def find(self, client: ApiClient, response_id: str) -> StoredResponse | None:
        """The client's response. Raises NotKept."""
        key = entry_key(client.key.tenant, response_id)
        entry = await self._store.get(key)
        if entry is None or not entry.router_id or await self._background.runs(entry.router_id, key):
            return entry
        entry = await self._store.get(key)  # It may have ended before its router was asked.
        if entry is None or not entry.router_id:
            return entry
        lost = StoredResponse(response=msgspec.Raw(ended(entry.response, FAILED, LOST)), items=entry.items)
        await self._store.put(client.key.tenant, key, lost)
        return lost

    async def cancel(self, client: ApiClient, response_id: str) -> StoredResponse | None:
        """Cancel a response in the background, wherever it runs; one that has ended stays as it is. Raises NotKept,
        BadRequest.
        """
        entry = await self.find(client, response_id)
        if entry is None:
            return None
        kept = read_kept(entry.response)
        if kept is None or not kept.background:
            raise BadRequest("Cannot cancel a synchronous response.", "response_id")
        if not entry.router_id:
            return entry
        await self._background.runs(entry.router_id, entry_key(client.key.tenant, response_id), cancel=True)
        return await self.find(client, response_id)

    async def delete(self, client: ApiClient, response_id: str) -> bool:
        """Remove a response; one in the background is cancelled. False: there is none. Raises NotKept."""
        entry = await self.find(client, response_id)
        key = entry_key(client.key.tenant, response_id)
        if entry is not None and entry.router_id and await self._background.runs(entry.router_id, key, cancel=True):
            raise NotKept("the response does not end")
        return await self._store.delete(client.key.tenant, key)

    async def _serve(self, http_request: HttpRequest, wanted: Wanted) -> None:
        size = http_request.upload.size
        items = await on_loop_or_thread(size, input_items, wanted.fields)
        if wanted.previous_id and items is not None:
            entry = await self.find(http_request.head.client, wanted.previous_id)
            if entry is None:
                raise ResponseRefused(previous_not_found(wanted.previous_id))
            items = continued(entry, items)
            size += sum(len(memoryview(item)) for item in items)
        body = await on_loop_or_thread(size, stateless, wanted.fields, items if wanted.previous_id else None)
        self._limit(http_request, len(body))
        for_client = partial(self._for_client, wanted)
        inner = InnerRequest(http_request, body, for_client, None if wanted.background else http_request)
        if not wanted.background:
            await self._respond(http_request, wanted, inner, items or [])
            return
        try:
            await self._begin(http_request, wanted, inner, items or [])
        except BaseException:
            inner.upload.over()
            raise

    def _limit(self, http_request: HttpRequest, size: int) -> None:
        if size > self._settings.body_bytes_max:
            message = f"The input with its history is larger than {self._settings.body_bytes_max} bytes."
            raise ResponseRefused(failed(Reason.TOO_LARGE, message))
        if http_request.upload.totals.bytes_held + size > self._settings.bodies_bytes_max:
            raise ResponseRefused(failed(Reason.WORKER_BUSY, "The router is full. Try again shortly."))

    async def _respond(
        self, http_request: HttpRequest, wanted: Wanted, inner: InnerRequest, items: list[msgspec.Raw]
    ) -> None:
        """Relay the request, keep the response, and then let the client have its end."""
        http_request.on_left.append(inner.client_left)
        if http_request.left:
            inner.client_left()
        try:
            await self._relay.serve(inner)
        finally:
            http_request.on_left.remove(inner.client_left)
            inner.upload.over()
        client = http_request.head.client
        if inner.whole is not None:
            status, headers, body = inner.whole
            if status == OK and not wanted.is_prefetch:
                body = await self._kept(client, wanted, items, body)
            if not http_request.left:
                http_request.answer(status, headers, body)
        elif inner.ended:
            event = b""
            if inner.last:
                said = await self._kept(client, wanted, items, response_in(inner.last))
                event = with_response(inner.last, lambda _response: said) + EVENT_END
            if not http_request.left:
                http_request.end(inner.before + event + inner.rest)

    async def _kept(self, client: ApiClient, wanted: Wanted, items: list[msgspec.Raw], response: bytes) -> bytes:
        """The response object for the client; ``store`` in it says whether it is kept now."""
        said = self._for_client(wanted, response)
        if not wanted.store:
            return said
        try:
            kept = read_kept(said)
            if kept is None:
                raise NotKept("the engine's response has no id")
            tenant = client.key.tenant
            entry = StoredResponse(response=msgspec.Raw(said), items=items)
            await self._store.put(tenant, entry_key(tenant, kept.id), entry)
        except NotKept as error:
            self._note(str(error))
            return with_fields(said, store=False) or said
        self._note("")
        return said

    def _note(self, failure: str) -> None:
        if failure and not self.failure:
            log.warning("a response is not kept for its client: %s", failure)
        self.failure = failure
        self.counts[NOT_KEPT if failure else KEPT] += 1

    def _for_client(self, wanted: Wanted, response: bytes) -> bytes:
        return with_fields(response, previous_response_id=wanted.previous_id or None, store=wanted.store) or response

    async def _begin(
        self, http_request: HttpRequest, wanted: Wanted, inner: InnerRequest, items: list[msgspec.Raw]
    ) -> None:
        """Make the response in the background; the client gets its id at once."""
        tenant = http_request.head.client.key.tenant
        if self._background.is_full(tenant):
            message = f"At most {TENANT_MAX} responses are made in the background at a time."
            body = error_body(429, message, code="too_many_background", param="background")
            raise ResponseRefused(HttpError(429, body, 1.0, "too_many_background"))
        response_id = f"resp_{secrets.token_hex(16)}"
        created_at = self._clock.wall_ms() // 1000
        begun = queued(wanted.fields, response_id, created_at, wanted.previous_id)
        entry = StoredResponse(response=msgspec.Raw(begun), items=items, router_id=self._router_id)
        try:
            await self._background.begin(entry_key(tenant, response_id), response_id, Run(tenant, inner, entry))
        except NotKept as error:
            if error.passes:
                raise
            raise ResponseRefused(failed(Reason.TOO_LARGE, f"The response cannot be kept: {error}.")) from error
        named = (b"x-request-id", http_request.head.request_id.encode())
        http_request.answer(OK, header_lines([(b"content-type", b"application/json"), named]), begun)

    def _refuse(self, http_request: HttpRequest, error: HttpError) -> None:
        head = http_request.head
        self._request_log.refused(
            error.status, error.reason, request_id=head.request_id, path=head.path, trace_id=trace_named(head.trace)
        )
        if not http_request.left:
            http_request.refuse(error)


def not_found(response_id: str) -> HttpError:
    """404: the client has no such response, or it has expired."""
    message = f"Response with id '{response_id[:QUOTED_CHARS]}' not found. It may have expired."
    return HttpError(404, error_body(404, message, code="response_not_found", param="response_id"), None, "not_found")


def previous_not_found(response_id: str) -> HttpError:
    """404: what the client wants to continue is not there."""
    message = f"Previous response with id '{response_id[:QUOTED_CHARS]}' not found. It may have expired."
    body = error_body(404, message, code="previous_response_not_found", param="previous_response_id")
    return HttpError(404, body, None, "not_found")


def refusal_for(error: BadRequest | NotKept | ResponseRefused) -> HttpError:
    """The client's error. 503 for NotKept: the bucket cannot be read or written now."""
    if isinstance(error, BadRequest):
        return bad_request(str(error), error.param)
    if isinstance(error, ResponseRefused):
        return error.error
    return failed(Reason.BUS_DOWN, f"Kept responses cannot be used now: {error}.")


def _wanted(body: bytes) -> Wanted | None:
    """As ``read_wanted``; None for a body that costs too much to read: the relay refuses it."""
    return None if body_fault(body) else read_wanted(body)
