"""``GET /baton/decisions``: how the routers placed requests, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.routing import APIRoute

from services.router.decisions.decision import LISTED_MAX
from services.router.decisions.decision_filter import DecisionFilter
from services.router.decisions.decision_service import DecisionService
from services.router.request.client import ANYONE, CLIENT_SCOPE_KEY, QUESTIONS_PER_MINUTE, ApiClient
from shared.contracts.decisions import DecisionRecord
from shared.contracts.ids import router_of
from shared.contracts.message import in_full
from shared.http.errors import error_body
from shared.text.explanation import NO_DECISION_ID

JSON = "application/json"
LATEST = "latest"
DECISIONS, OLD_DECISIONS = "/baton/decisions", "/v1/decisions"
"""vLLM 0.33 has an endpoint of its own under the old path."""
DEPRECATED = {"deprecation": "@1795392000", "link": f'<{DECISIONS}>; rel="successor-version"'}
"""Headers of answers under the old path (RFC 9745): since when it is deprecated, and what replaces it."""
ID_CHARS_MAX = 256
Responses = dict[int | str, dict[str, Any]]
BAD_REQUEST: Responses = {
    400: {"description": "A parameter is invalid; the message says which."},
    422: {"description": "Not used: invalid parameters get 400."},
    429: {"description": "The key has asked for too many decisions; Retry-After says when to try again."},
}
NOT_FOUND: Responses = {
    **BAD_REQUEST,
    404: {"description": "No such decision is stored, or it belongs to another tenant."},
}


def add_decisions(app: FastAPI, decisions: DecisionService, now: Callable[[], float]) -> None:
    """Add the routes to ``app``, also under their old path."""

    async def decision(decision_id: str, request: Request) -> Response:
        """One decision, from the router that made it; ``latest``: the newest of all routers."""
        client: ApiClient = request.scope[CLIENT_SCOPE_KEY]
        if (refused := too_many(client, now())) is not None:
            return refused
        asked, tenant = decision_id[:ID_CHARS_MAX], tenant_of(client)
        found = await (decisions.newest(tenant) if asked == LATEST else decisions.find(asked, tenant))
        return _decision_response(found) if found is not None else _not_found(decisions, asked)

    async def listed(
        request: Request,
        request_id: str = "",
        worker: str = "",
        outcome: str = "",
        slow: Annotated[float, Query(description="Only requests with a TTFT of at least this many seconds.")] = -1.0,
        missed: Annotated[bool, Query(description="Only requests that missed a target.")] = False,
        limit: Annotated[int, Query(ge=1, le=LISTED_MAX)] = 20,
    ) -> Response:
        """Decisions of this router, newest first, without their candidates; with ``request_id``, from any router."""
        client: ApiClient = request.scope[CLIENT_SCOPE_KEY]
        if (refused := too_many(client, now())) is not None:
            return refused
        tenant = tenant_of(client)
        wanted = DecisionFilter(
            tenant=tenant,
            request_id=request_id,
            worker_id=worker,
            outcome=outcome,
            ttft_s_min=slow,
            missed=missed,
            limit=limit,
        )
        found = await decisions.listed(wanted)
        if request_id and not found:
            elsewhere = await decisions.of_request(request_id, tenant)
            found = [elsewhere] if elsewhere is not None else []
        body = {"router_id": decisions.router_id, "decisions": [in_full(one) for one in found]}
        return Response(msgspec.json.encode(body), media_type=JSON)

    for path, is_old in ((DECISIONS, False), (OLD_DECISIONS, True)):
        routes = APIRouter(route_class=DeprecatedRoute if is_old else APIRoute, deprecated=is_old, tags=["state"])
        routes.add_api_route(f"{path}/{{decision_id}}", decision, responses=NOT_FOUND)
        routes.add_api_route(path, listed, responses=BAD_REQUEST)
        app.include_router(routes)


class DeprecatedRoute(APIRoute):
    """Marks each response as deprecated."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, with headers added to its answers."""
        handle = super().get_route_handler()

        async def marked(request: Request) -> Response:
            response = await handle(request)
            response.headers.update(DEPRECATED)
            return response

        return marked


def tenant_of(client: ApiClient) -> str | None:
    """The tenant whose decisions this client may read; None: all."""
    return None if client.key.sees_all else client.key.tenant


def too_many(client: ApiClient, now: float) -> Response | None:
    """429, when the key has asked too often; each question may make the router look at all its decisions."""
    if client is ANYONE:
        return None
    if wait_s := client.questions.wait_s(now):
        message = f"A key may ask for decisions {QUESTIONS_PER_MINUTE} times a minute."
        headers = {"retry-after": str(math.ceil(wait_s))}
        return Response(error_body(429, message, code="rate_limit_exceeded"), 429, headers, JSON)
    client.questions.take(now, 1)
    return None


def _decision_response(found: DecisionRecord) -> Response:
    return Response(msgspec.json.encode(in_full(found)), media_type=JSON)


def _not_found(decisions: DecisionService, asked: str) -> Response:
    router_id = router_of(asked)
    if asked == LATEST:
        why = "No router has placed a request of yours yet."
    elif not router_id:
        why = NO_DECISION_ID
    elif router_id == decisions.router_id or router_id in set(decisions.others()):
        why = f"Router {router_id} does not store it. It keeps only the newest (ROUTER_DECISIONS_BYTES_MAX)."
    else:
        why = f"Router {router_id}, named by this id, does not respond; routers keep their decisions in memory only."
    return Response(error_body(404, why, code="decision_not_found"), 404, media_type=JSON)
