"""`baton explain`: fetches a decision, from any router over HTTP or from its own router over NATS."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from services.launcher.bus_client import CommandFailed, ask_service, open_bus
from services.launcher.system.machine import API_KEY_VARIABLE, key_headers
from shared.bus.port import Envelope
from shared.contracts.channels import DECISION, SERVICE_STATUS
from shared.contracts.control import ServiceStatus
from shared.contracts.decisions import AskDecision, DecisionRecord
from shared.contracts.ids import DecisionId, router_of

T = TypeVar("T")

LATEST = "latest"
"""End of a decision id; the id of its router comes before it."""
HTTP_S_MAX = 10.0
ASK_S_MAX = 3.0
ROUTER_STATUS_S_MAX = 5.0
"""Routers publish their status every two seconds."""


class DecisionList(msgspec.Struct):
    """The response of ``GET /baton/decisions``."""

    decisions: list[DecisionRecord]


@dataclass(frozen=True)
class Query:
    """A decision by its id (or ``latest``), or the last one for a request."""

    decision_id: str = LATEST
    request_id: str = ""


def query_of(name: str, request_id: str) -> Query:
    """``name`` may be the id of a decision or of a request."""
    if request_id:
        return Query(request_id=request_id)
    return Query(name) if name == LATEST or router_of(name) else Query(request_id=name)


async def ask_router(url: str, query: Query) -> DecisionRecord:
    """Fetch over HTTP. Raises CommandFailed."""
    base = url.rstrip("/").removesuffix("/v1")
    try:
        async with httpx.AsyncClient(
            base_url=base, timeout=HTTP_S_MAX, headers=key_headers(), trust_env=False
        ) as client:
            decision_id = query.decision_id
            if query.request_id:
                params: dict[str, str | int] = {"request_id": query.request_id, "limit": 1}
                found = read(await client.get("/baton/decisions", params=params), DecisionList, base).decisions
                if not found:
                    raise CommandFailed(f"No router has a decision for the request {query.request_id}. {REQUEST_HINT}")
                decision_id = found[0].decision_id
            return read(await client.get(f"/baton/decisions/{quote(decision_id, safe='')}"), DecisionRecord, base)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise CommandFailed(f"{url} is not the URL of a router, such as http://127.0.0.1:8000: {error}") from error
    except httpx.TransportError as error:
        raise CommandFailed(f"No router responds at {base} ({error or type(error).__name__}).") from error


KEY_HINT = f"Set {API_KEY_VARIABLE} to an API key with the permission admin."
REQUEST_HINT = (
    "The response header x-request-id has its id. Routers keep only the newest decisions (ROUTER_DECISIONS_MAX)."
)


async def ask_over_nats(nats_url: str, query: Query) -> DecisionRecord:
    """Fetch from the router that made the decision; if the query does not name it, from any router over HTTP. Raises
    CommandFailed, BusError.
    """
    if query.request_id or query.decision_id == LATEST:
        return await ask_router(await any_router(nats_url), query)
    router_id = router_of(query.decision_id)
    if not router_id:
        raise CommandFailed(f"{query.decision_id} is not a decision id. The response header x-baton-decision has one.")
    ask = AskDecision(router_id=router_id, decision_id=DecisionId(query.decision_id))
    missing = f"Router {router_id}, which made that decision, does not respond. It may have stopped."
    found = (await ask_service(nats_url, DECISION, ask, s_max=ASK_S_MAX, missing=missing)).decision
    if found is None:
        raise CommandFailed(
            f"Router {router_id} no longer has that decision: it keeps the newest only (ROUTER_DECISIONS_MAX)."
        )
    return found


async def any_router(nats_url: str) -> str:
    """The HTTP address of some router. Raises CommandFailed, BusError."""
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_status(status: ServiceStatus, _envelope: Envelope) -> None:
        if status.url and not url.done():
            url.set_result(status.url)

    async with open_bus(nats_url) as bus:
        await bus.subscribe(SERVICE_STATUS, on_status, service="router")
        try:
            return await asyncio.wait_for(url, ROUTER_STATUS_S_MAX)
        except TimeoutError as error:
            raise CommandFailed(
                f"No router on {nats_url} has published its status within {ROUTER_STATUS_S_MAX:g} s."
            ) from error


def read(response: httpx.Response, kind: type[T], base: str) -> T:
    """Decode the response. Raises CommandFailed with the router's error message."""
    try:
        if response.status_code == httpx.codes.OK:
            return msgspec.json.decode(response.content, type=kind)
        error = msgspec.json.decode(response.content, type=dict[str, dict[str, Any]])
        hint = f" {KEY_HINT}" if response.status_code == httpx.codes.UNAUTHORIZED else ""
        raise CommandFailed(str(error["error"]["message"]) + hint)
    except (msgspec.DecodeError, msgspec.ValidationError, LookupError) as error:
        raise CommandFailed(f"The server at {base} is not a Baton router (status {response.status_code}).") from error
