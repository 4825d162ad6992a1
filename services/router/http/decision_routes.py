"""``GET /v1/decisions``: how the routers placed requests, and why."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Query, Request, Response

from services.router.auth.api_keys import Key
from services.router.auth.client import CLIENT_SCOPE_KEY
from services.router.placement.decision_log import LISTED_MAX, DecisionFilter, router_of
from services.router.placement.decision_service import DecisionService
from shared.contracts.decisions import DecisionRecord
from shared.contracts.message import in_full
from shared.http.errors import error_body

JSON = "application/json"
LATEST = "latest"
ID_CHARS_MAX = 256
OF_ANOTHER = "That decision belongs to another tenant: reading it requires a key with the permission view or admin."
Responses = dict[int | str, dict[str, Any]]
BAD_REQUEST: Responses = {
    400: {"description": "A parameter is invalid; the message says which."},
    422: {"description": "Not used: invalid parameters get 400."},
}
NOT_FOUND: Responses = {
    **BAD_REQUEST,
    403: {"description": "The decision belongs to another tenant."},
    404: {"description": "The decision was never made, or is no longer stored; the message says which."},
}


def add_decisions(app: FastAPI, decisions: DecisionService) -> None:
    """Add the routes to ``app``."""

    @app.get("/v1/decisions/{decision_id}", tags=["state"], responses=NOT_FOUND)
    async def decision(decision_id: str, request: Request) -> Response:
        """One decision, from the router that made it; ``latest``: the newest of all routers."""
        asked = decision_id[:ID_CHARS_MAX]
        found = await (decisions.newest() if asked == LATEST else decisions.find(asked))
        if found is not None and not may_read(request.scope[CLIENT_SCOPE_KEY].key, found.tenant):
            return Response(error_body(403, OF_ANOTHER, code="forbidden"), 403, media_type=JSON)
        return _decision_response(found) if found is not None else _not_found(decisions, asked)

    @app.get("/v1/decisions", tags=["state"], responses=BAD_REQUEST)
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
        key = request.scope[CLIENT_SCOPE_KEY].key
        wanted = DecisionFilter(
            tenant=None if key.sees_all else key.tenant,
            request_id=request_id,
            worker_id=worker,
            outcome=outcome,
            ttft_s_min=slow,
            missed=missed,
            limit=limit,
        )
        found = decisions.log.listed(wanted)
        if request_id and not found:
            elsewhere = await decisions.of_request(request_id)
            found = [elsewhere] if elsewhere is not None and may_read(key, elsewhere.tenant) else []
        body = {"router_id": decisions.router_id, "decisions": [in_full(one) for one in found]}
        return Response(msgspec.json.encode(body), media_type=JSON)


def may_read(key: Key, tenant: str) -> bool:
    """Whether this key may read decisions of that tenant's requests."""
    return key.sees_all or key.tenant == tenant


def _decision_response(found: DecisionRecord) -> Response:
    return Response(msgspec.json.encode(in_full(found)), media_type=JSON)


def _not_found(decisions: DecisionService, asked: str) -> Response:
    router_id = router_of(asked)
    if asked == LATEST:
        why = "No router has placed a request yet."
    elif not router_id:
        why = "That is not a decision id: each response has one in its header x-baton-decision."
    elif router_id == decisions.router_id or router_id in set(decisions.others()):
        kept = len(decisions.log)
        why = f"Router {router_id} no longer stores it. It keeps only the newest (here: {kept}; ROUTER_DECISIONS_MAX)."
    else:
        why = f"Router {router_id}, named by this id, does not respond; routers keep their decisions in memory only."
    return Response(error_body(404, why, code="decision_not_found"), 404, media_type=JSON)
