"""``/v1/responses/{id}``: the responses that routers keep for their clients."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, Query, Request, Response

from services.router.auth.authenticator import refusal_of
from services.router.request.client import CLIENT_SCOPE_KEY, ApiClient
from services.router.request.errors import error_response
from services.router.responses.history import BadRequest, fields_of
from services.router.responses.response_store import NotKept
from services.router.responses.responses import Responses, not_found, refusal_for
from shared.contracts.engine_paths import RESPONSES
from shared.http.errors import HttpError, error_body

JSON = "application/json"
ITEMS_MAX, ITEMS_DEFAULT = 100, 20
PATH = RESPONSES + "/{response_id}"
NOT_ENABLED = HttpError(
    404, error_body(404, "This system keeps no responses: ROUTER_RESPONSE_BYTES_MAX is 0.", code="responses_not_kept")
)
STATUSES: dict[int | str, dict[str, Any]] = {
    400: {"description": "A parameter is invalid; the message says which. Only a response in the background can be "
          "cancelled."},
    401: {"description": "An API key is needed, and no valid one was given."},
    403: {"description": "The key does not permit inference."},
    404: {"description": "No such response is kept, it has expired, or it belongs to another tenant."},
    422: {"description": "Not used: invalid parameters get 400."},
    429: {"description": "The key has reached its rate limit; Retry-After says when to try again."},
    503: {"description": "NATS, which stores the responses, cannot be used now."},
}  # fmt: skip


def add_responses(app: FastAPI, responses: Responses, now: Callable[[], float]) -> None:
    routes = Routes(responses, now)
    for method, path, handler in (
        ("GET", PATH, routes.retrieve),
        ("DELETE", PATH, routes.delete),
        ("POST", f"{PATH}/cancel", routes.cancel),
        ("GET", f"{PATH}/input_items", routes.input_items),
    ):
        app.add_api_route(path, handler, methods=[method], tags=["inference"], responses=STATUSES)


class Routes:
    """The handlers; their docstrings are in the OpenAPI document."""

    def __init__(self, responses: Responses, now: Callable[[], float]) -> None:
        self._responses = responses
        self._now = now

    async def retrieve(self, response_id: str, request: Request, stream: bool = False) -> Response:
        """A response, as its client got it; one in the background as it is now."""

        async def answer(client: ApiClient) -> bytes | None:
            if stream:
                raise BadRequest("A stored response cannot be streamed.", "stream")
            entry = await self._responses.find(client, response_id)
            return bytes(entry.response) if entry is not None else None

        return await self._answered(request, response_id, answer)

    async def delete(self, response_id: str, request: Request) -> Response:
        """Forget a response; one in the background is cancelled first."""

        async def answer(client: ApiClient) -> bytes | None:
            if not await self._responses.delete(client, response_id):
                return None
            return msgspec.json.encode({"id": response_id, "object": "response", "deleted": True})

        return await self._answered(request, response_id, answer)

    async def cancel(self, response_id: str, request: Request) -> Response:
        """Cancel a response in the background, wherever it runs."""

        async def answer(client: ApiClient) -> bytes | None:
            entry = await self._responses.cancel(client, response_id)
            return bytes(entry.response) if entry is not None else None

        return await self._answered(request, response_id, answer)

    async def input_items(
        self,
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=ITEMS_MAX)] = ITEMS_DEFAULT,
        order: Literal["asc", "desc"] = "desc",
        after: str = "",
    ) -> Response:
        """The whole input of a response: of all earlier turns, and its own."""

        async def answer(client: ApiClient) -> bytes | None:
            entry = await self._responses.find(client, response_id)
            return None if entry is None else page_of(entry.items, limit, after, is_newest_first=order == "desc")

        return await self._answered(request, response_id, answer)

    async def _answered(
        self, request: Request, response_id: str, answer: Callable[[ApiClient], Awaitable[bytes | None]]
    ) -> Response:
        client: ApiClient = request.scope[CLIENT_SCOPE_KEY]
        refusal = refusal_of(client, self._now()) if self._responses.enabled else NOT_ENABLED
        if refusal is not None:
            return error_response(refusal)
        try:
            body = await answer(client)
        except (BadRequest, NotKept) as error:
            return error_response(refusal_for(error))
        return Response(body, media_type=JSON) if body is not None else error_response(not_found(response_id))


def page_of(items: list[msgspec.Raw], limit: int, after: str, *, is_newest_first: bool) -> bytes:
    """A page of OpenAI's list of input items. Raises BadRequest if there is no item ``after``."""
    listed = [_item(raw, number) for number, raw in enumerate(items)]
    if is_newest_first:
        listed.reverse()
    ids = [item["id"] for item in listed]
    if after and after not in ids:
        raise BadRequest("There is no item with this id.", "after")
    begin = ids.index(after) + 1 if after else 0
    page, page_ids = listed[begin : begin + limit], ids[begin : begin + limit]
    return msgspec.json.encode(
        {
            "object": "list",
            "data": page,
            "first_id": page_ids[0] if page else None,
            "last_id": page_ids[-1] if page else None,
            "has_more": begin + limit < len(listed),
        }
    )


def _item(raw: msgspec.Raw, number: int) -> dict[str, Any]:
    """An input item in the form of OpenAI's lists: with a type, an id, and its content in parts."""
    fields: dict[str, Any] = dict(fields_of(raw) or {"content": raw})
    content = fields.get("content", msgspec.Raw(b"null"))
    if bytes(memoryview(content)[:1]) == b'"':
        kind = "output_text" if _text(fields, "role") == "assistant" else "input_text"
        fields["content"] = [{"type": kind, "text": content, **({"annotations": []} if kind == "output_text" else {})}]
    kind = _text(fields, "type") or "message"
    return {**fields, "type": kind, "id": _text(fields, "id") or f"item_{number}"}


def _text(fields: dict[str, Any], name: str) -> str:
    try:
        return msgspec.json.decode(fields.get(name, b'""'), type=str)
    except msgspec.DecodeError:
        return ""
