"""``/v1/files`` and ``/v1/batches``, as OpenAI's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from services.router.auth.authenticator import refusal_of
from services.router.batches.batches import Batches, batch_object
from services.router.batches.files import FILE_BYTES_MAX, FILE_S_MIN, PURPOSE, FileRefused, IncomingFile, file_object
from services.router.batches.store import StoreFailed
from services.router.http.transfers import Pace, Transfers
from services.router.http.upload_form import BadForm, UploadForm
from services.router.request.client import CLIENT_SCOPE_KEY, ApiClient
from services.router.request.errors import error_response, failed
from shared.contracts.batches import FILE_S_MAX, StoredFile
from shared.contracts.failures import Reason
from shared.http.errors import HttpError, error_body
from shared.http.limits import BodyRefused, small_body

log = logging.getLogger("baton.router")

T = TypeVar("T")

JSON = "application/json"
FILES, BATCHES = "/v1/files", "/v1/batches"
FILE, BATCH = FILES + "/{file_id}", BATCHES + "/{batch_id}"
FILES_MAX, BATCHES_MAX, BATCHES_DEFAULT = 10_000, 100, 20
"""Entries of one page of a listing."""
FORM_BYTES_MAX = FILE_BYTES_MAX + 1024 * 1024
"""Bytes of an upload: a file, and what is around it."""
PIECE_S_MAX, UPLOAD_S_MAX = 30.0, 900.0
"""Seconds for the next piece of an upload, and for all of it."""
NOT_ENABLED = HttpError(
    404, error_body(404, "This system keeps no files: ROUTER_FILES_BYTES_MAX is 0.", code="files_not_kept")
)
STATUSES: dict[int | str, dict[str, Any]] = {
    400: {"description": "A field or parameter is invalid; the message says which."},
    401: {"description": "An API key is needed, and no valid one was given."},
    403: {"description": "The key does not permit inference, or the tenant has too many files."},
    404: {"description": "There is no such file or batch, it has expired, or it belongs to another tenant."},
    408: {"description": "The body did not arrive in time."},
    409: {"description": "A batch that has not ended reads the file; or the batch has ended already."},
    413: {"description": "The file is too large, or the tenant's files have no room for it."},
    415: {"description": "A file must be sent as a form."},
    422: {"description": "Not used: invalid parameters get 400."},
    429: {
        "description": "The key has reached its rate limit, or too many of the tenant's uploads, downloads or batches "
        "have not ended."
    },
    503: {"description": "NATS, which stores the files, cannot be used now, or the router has too many transfers."},
}
UPLOAD_BODY = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"enum": [PURPOSE]},
                    "expires_after[anchor]": {"enum": ["created_at"]},
                    "expires_after[seconds]": {"type": "integer", "minimum": FILE_S_MIN, "maximum": FILE_S_MAX},
                },
            }
        }
    },
}
BATCH_BODY = {
    "required": True,
    "content": {
        JSON: {
            "schema": {
                "type": "object",
                "required": ["input_file_id", "endpoint", "completion_window"],
                "properties": {
                    "input_file_id": {"type": "string"},
                    "endpoint": {"type": "string"},
                    "completion_window": {"type": "string"},
                    "metadata": {"type": ["object", "null"]},
                },
            }
        }
    },
}


def add_files(app: FastAPI, batches: Batches, now: Callable[[], float]) -> None:
    routes = Routes(batches, now)
    for method, path, handler, extra in (
        ("POST", FILES, routes.upload, {"requestBody": UPLOAD_BODY}),
        ("GET", FILES, routes.list_files, None),
        ("GET", FILE, routes.retrieve_file, None),
        ("DELETE", FILE, routes.delete_file, None),
        ("GET", f"{FILE}/content", routes.content, None),
        ("POST", BATCHES, routes.create, {"requestBody": BATCH_BODY}),
        ("GET", BATCHES, routes.list_batches, None),
        ("GET", BATCH, routes.retrieve_batch, None),
        ("POST", f"{BATCH}/cancel", routes.cancel, None),
    ):
        app.add_api_route(path, handler, methods=[method], tags=["inference"], responses=STATUSES, openapi_extra=extra)


class Routes:
    """The handlers; their docstrings are in the OpenAPI document."""

    def __init__(self, batches: Batches, now: Callable[[], float]) -> None:
        self._batches = batches
        self._files = batches.files
        self._now = now
        self._uploads, self._downloads = Transfers("uploads"), Transfers("downloads")

    async def upload(self, request: Request) -> Response:
        """Keep a file, the input of a batch."""

        async def answer(client: ApiClient) -> Any:
            tenant = client.key.tenant
            if (refusal := self._uploads.refusal(tenant)) is not None:
                return error_response(refusal)
            with self._uploads.one_of(tenant):
                return await self._upload(tenant, request)

        return await self._answered(request, answer)

    async def list_files(
        self,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=FILES_MAX)] = FILES_MAX,
        order: Literal["asc", "desc"] = "desc",
        after: str = "",
        purpose: str = "",
    ) -> Response:
        """The tenant's files."""

        async def answer(client: ApiClient) -> Any:
            files = await self._files.of_tenant(client.key.tenant)
            found = [file_object(one) for one in files if purpose in ("", one.purpose)]
            return page(found if order == "desc" else found[::-1], limit, after)

        return await self._answered(request, answer)

    async def retrieve_file(self, file_id: str, request: Request) -> Response:
        """What is known of a file."""

        async def answer(client: ApiClient) -> Any:
            return file_object(await self._file(client, file_id))

        return await self._answered(request, answer)

    async def delete_file(self, file_id: str, request: Request) -> Response:
        """Delete a file that no running batch reads."""

        async def answer(client: ApiClient) -> Any:
            if not await self._files.delete(client.key.tenant, file_id):
                raise no_file(file_id)
            return {"id": file_id, "object": "file", "deleted": True}

        return await self._answered(request, answer)

    async def content(self, file_id: str, request: Request) -> Response:
        """The bytes of a file."""

        async def answer(client: ApiClient) -> Response:
            tenant = client.key.tenant
            if (refusal := self._downloads.refusal(tenant)) is not None:
                return error_response(refusal)
            file = await self._file(client, file_id)
            pieces = self._files.content(file)
            # An error at the beginning still gets a status of its own.
            first = await anext(pieces, b"")
            headers = {"content-length": str(file.size)}
            content = _streamed(first, pieces, Pace(self._now))
            return Download(self._downloads, tenant, content, headers)

        return await self._answered(request, answer)

    async def create(self, request: Request) -> Response:
        """Have the lines of a file served as requests, in the gaps between others."""

        async def answer(client: ApiClient) -> Any:
            return batch_object(await self._batches.create(client, await small_body(request)))

        return await self._answered(request, answer)

    async def list_batches(
        self, request: Request, limit: Annotated[int, Query(ge=1, le=BATCHES_MAX)] = BATCHES_DEFAULT, after: str = ""
    ) -> Response:
        """The tenant's batches, the newest first."""

        async def answer(client: ApiClient) -> Any:
            return page([batch_object(one) for one in await self._batches.of_tenant(client.key.tenant)], limit, after)

        return await self._answered(request, answer)

    async def retrieve_batch(self, batch_id: str, request: Request) -> Response:
        """A batch, with its progress."""

        async def answer(client: ApiClient) -> Any:
            batch = await self._batches.find(client.key.tenant, batch_id)
            if batch is None:
                raise no_batch(batch_id)
            return batch_object(batch)

        return await self._answered(request, answer)

    async def cancel(self, batch_id: str, request: Request) -> Response:
        """End a batch soon. What it has computed is in its output file."""

        async def answer(client: ApiClient) -> Any:
            batch = await self._batches.cancel(client.key.tenant, batch_id)
            if batch is None:
                raise no_batch(batch_id)
            return batch_object(batch)

        return await self._answered(request, answer)

    async def _upload(self, tenant: str, request: Request) -> Any:
        incoming = await self._files.incoming(tenant)
        try:
            form = _form_of(request, incoming)
            await _receive(request, form, Pace(self._now))
            purpose, expires_s = _fields(form)
            file = await self._files.keep(
                tenant, incoming, filename=form.filename, purpose=purpose, expires_s=expires_s
            )
        except BaseException:
            await _discard(incoming)
            raise
        finally:
            self._files.arrived(tenant, incoming)
        return file_object(file)

    async def _file(self, client: ApiClient, file_id: str) -> StoredFile:
        file = await self._files.find(client.key.tenant, file_id)
        if file is None:
            raise no_file(file_id)
        return file

    async def _answered(self, request: Request, answer: Callable[[ApiClient], Awaitable[Any]]) -> Response:
        client: ApiClient = request.scope[CLIENT_SCOPE_KEY]
        refusal = refusal_of(client, self._now()) if self._batches.enabled else NOT_ENABLED
        if refusal is not None:
            return error_response(refusal)
        try:
            result = await answer(client)
        except FileRefused as error:
            body = error_body(error.status, str(error), code=error.code, param=error.param)
            return error_response(HttpError(error.status, body, 10.0 if error.status == 429 else None))
        except BodyRefused as error:
            return error_response(HttpError(error.status, error_body(error.status, str(error))))
        except StoreFailed as error:
            return error_response(unavailable(error))
        return result if isinstance(result, Response) else Response(msgspec.json.encode(result), media_type=JSON)


class Download(StreamingResponse):
    """The bytes of a file; counts from its first to its last."""

    def __init__(
        self, downloads: Transfers, tenant: str, content: AsyncIterator[bytes], headers: dict[str, str]
    ) -> None:
        super().__init__(content, media_type="application/octet-stream", headers=headers)
        self._downloads = downloads
        self._tenant = tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._downloads.one_of(self._tenant):
            try:
                await super().__call__(scope, receive, send)
            except SlowReader:
                log.info("a client read a file too slowly: its connection is closed")


class SlowReader(Exception):
    """The client takes too long to read a file."""


def _form_of(request: Request, incoming: IncomingFile) -> UploadForm:
    """Raises FileRefused."""
    try:
        return UploadForm(request.headers.get("content-type", ""), incoming.add)
    except BadForm as bad:
        raise FileRefused(415, str(bad), "not_a_form") from bad


async def _receive(request: Request, form: UploadForm, pace: Pace) -> None:
    """Feed the whole body to the form. Raises FileRefused."""
    try:
        async with asyncio.timeout(UPLOAD_S_MAX), aclosing(request.stream()) as stream:
            while True:
                with pace.waiting():
                    async with asyncio.timeout(PIECE_S_MAX):
                        piece = await anext(stream, None)
                if piece is None:
                    break
                pace.moved += len(piece)
                if pace.is_slow:
                    raise TimeoutError
                if pace.moved > FORM_BYTES_MAX:
                    raise FileRefused(413, f"A file may have at most {FILE_BYTES_MAX} bytes.", "file_too_large", "file")
                await form.feed(piece)
        form.close()
    except BadForm as bad:
        raise FileRefused(400, str(bad), "bad_form") from bad
    except (TimeoutError, ClientDisconnect):  # A client that has left does not read the refusal.
        raise FileRefused(408, "The file did not arrive in time.", "upload_slow") from None


def _fields(form: UploadForm) -> tuple[str, int]:
    """Purpose and lifetime of the file, in seconds; 0: as long as possible. Raises FileRefused."""
    purpose = form.fields.get("purpose", "")
    if purpose != PURPOSE:
        raise FileRefused(400, f"purpose must be {PURPOSE}.", "invalid_purpose", "purpose")
    anchor, seconds = form.fields.get("expires_after[anchor]"), form.fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return purpose, 0
    if anchor != "created_at" or not (seconds or "").isdecimal() or len(seconds or "") > 8:
        raise _bad_expiry()
    expires_s = int(seconds or "0")
    if not FILE_S_MIN <= expires_s <= FILE_S_MAX:
        raise _bad_expiry()
    return purpose, expires_s


def _bad_expiry() -> FileRefused:
    message = f"expires_after must have the anchor created_at, and {FILE_S_MIN} to {FILE_S_MAX} seconds."
    return FileRefused(400, message, "invalid_request", "expires_after")


async def _discard(incoming: IncomingFile) -> None:
    try:
        await incoming.discard()
    except StoreFailed as error:
        log.info("cannot delete the parts of an incomplete file, they will expire: %s", error)


async def _streamed(first: bytes, pieces: AsyncGenerator[bytes, None], pace: Pace) -> AsyncGenerator[bytes, None]:
    """All pieces. A failure, or a client that reads too slowly, ends the connection before the promised length: the
    client sees that bytes are missing.
    """
    with pace.waiting():
        yield first
    pace.moved = len(first)
    async with aclosing(pieces):
        async for piece in pieces:
            if pace.is_slow:
                raise SlowReader
            with pace.waiting():
                yield piece
            pace.moved += len(piece)


def page(found: list[dict[str, Any]], limit: int, after: str) -> dict[str, Any]:
    """A page of OpenAI's lists. Raises FileRefused if nothing has the id ``after``."""
    ids = [one["id"] for one in found]
    if after and after not in ids:
        raise FileRefused(400, "There is nothing with this id.", "invalid_request", "after")
    begin = ids.index(after) + 1 if after else 0
    data = found[begin : begin + limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": begin + limit < len(found),
    }


def no_file(file_id: str) -> FileRefused:
    """404."""
    return FileRefused(404, f"No such File object: {file_id[:64]}", "file_not_found", "file_id")


def no_batch(batch_id: str) -> FileRefused:
    """404."""
    return FileRefused(404, f"No batch found with id '{batch_id[:64]}'.", "batch_not_found", "batch_id")


def unavailable(error: StoreFailed) -> HttpError:
    """503: the buckets cannot be read or written now."""
    return failed(Reason.BUS_DOWN, f"Files and batches cannot be used now: {error}.")
