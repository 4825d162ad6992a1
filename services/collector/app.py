"""The metrics collector's HTTP side: /metrics for Prometheus, /health and /ready, and the console: page, event
stream, one request's decision, orders.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any, Never

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import RedirectResponse
from starlette.types import Receive, Scope, Send

from services.collector.access import Access
from services.collector.console.feed import Feed, Watcher
from services.collector.console.orders import NATS_DOWN, OrderHandler, Refusal, parse_order, refusal_of
from services.collector.console.requests import RecentRequests, detail_of
from shared.bus.port import AskRefused, AskTimedOut, Bus, BusError, NoResponders
from shared.contracts.channels import DECISION
from shared.contracts.decisions import AskDecision
from shared.contracts.ids import DecisionId, router_of
from shared.http.edge import HttpEdge
from shared.http.edge_limits import EdgeLimits
from shared.http.limits import UNNAMED, BodyRefused, owner_of, small_body
from shared.runtime.settings import SettingsError
from shared.text.explanation import NO_DECISION_ID, not_kept, router_away

SECURITY_HEADERS = (
    (
        "content-security-policy",
        "default-src 'self'; base-uri 'none'; form-action 'none'; object-src 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("x-frame-options", "DENY"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cache-control", "no-store"),
)
"""Headers of every response: other sites can neither embed nor read the pages, and no foreign script runs in them."""


LIMITS = EdgeLimits(
    connections_max=512,
    connections_per_address_max=256,
    head_s_max=20.0,
    read_s_max=10.0,
    keep_alive_s=20.0,
    drain_s_max=3.0,
)


class CollectorEdge(HttpEdge[Never]):
    """Serves everything through the app."""

    headers = SECURITY_HEADERS


def make_app(metrics: Callable[[str], tuple[bytes, str]], ready: Callable[[], bool]) -> FastAPI:
    """The app with metrics, health and readiness. ``metrics`` gets the Accept header, and returns page and type."""
    app = FastAPI(title="Baton metrics collector", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/metrics")
    async def show_metrics(request: Request) -> Response:
        body, content_type = metrics(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    @app.get("/health")
    async def show_health() -> dict[str, str]:
        return {"status": "healthy"}

    @app.get("/ready")
    async def show_ready(response: Response) -> dict[str, str]:
        response.status_code = 200 if ready() else 503
        return {"status": "ready" if ready() else "not ready"}

    return app


JSON = "application/json"
PAGE = "index.html"
DECISION_S_MAX = 3.0
CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": JSON,
    "svg": "image/svg+xml",
    "png": "image/png",
    "woff2": "font/woff2",
}
"""Content types by file extension."""
CHALLENGE = {"www-authenticate": "Bearer"}
FULL = b'{"error":{"message":"Too many browsers watch the console already."}}'
RETRY_AFTER_S = "10"


@dataclass(frozen=True)
class ConsoleContext:
    """What the routes work with."""

    bus: Bus
    feed: Feed
    recent: RecentRequests
    orders: OrderHandler
    access: Access


def add_console(app: FastAPI, context: ConsoleContext) -> None:
    """Add the routes."""
    files = page_files()

    @app.get("/")
    async def show_root() -> Response:
        return RedirectResponse("/console")

    @app.get("/console")
    async def show_page() -> Response:
        return file_of(files, PAGE)

    @app.get("/console/files/{name}")
    async def show_file(name: str) -> Response:
        return file_of(files, name)

    @app.get("/console/events")
    async def show_events(request: Request) -> Response:
        owner = owner_of(request.client.host) if request.client is not None else UNNAMED
        return EventStream(context.feed, owner, operator=await may_act(context.access, request))

    @app.get("/console/requests/{decision_id}")
    async def show_request(decision_id: str) -> Response:
        return json_response(await find_decision(context.bus, context.recent, decision_id))

    @app.post("/console/orders")
    async def give_order(request: Request) -> Response:
        return await execute_order(context, request)


async def find_decision(bus: Bus, recent: RecentRequests, decision_id: str) -> dict[str, Any] | Refusal:
    """The decision and its request; a refusal says why there is none."""
    router_id = router_of(decision_id)
    if not router_id:
        return Refusal(status=404, message=NO_DECISION_ID)
    ask = AskDecision(router_id=router_id, decision_id=DecisionId(decision_id))
    try:
        decision = (await bus.ask(DECISION, ask, timeout_s=DECISION_S_MAX)).decision
    except (NoResponders, AskTimedOut, AskRefused):
        return Refusal(status=404, message=router_away(router_id))
    except BusError:
        return NATS_DOWN
    if decision is None:
        return Refusal(status=404, message=not_kept(router_id))
    return detail_of(recent.find(decision_id), decision)


async def execute_order(context: ConsoleContext, request: Request) -> Response:
    """Check the client's permission before its body is read."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        return json_response(Refusal(status=415, message=f"Send orders as {JSON}."))
    try:
        client = await asyncio.to_thread(context.access.client_of, request.headers)
    except SettingsError:
        return json_response(Refusal(status=503, message="The admin key file cannot be read: see the collector's log."))
    if (refusal := refusal_of(client)) is not None:
        return json_response(refusal)
    try:
        order = parse_order(await small_body(request))
    except BodyRefused as refused:
        order = Refusal(status=refused.status, message=str(refused))
    result = await context.orders.execute(order) if not isinstance(order, Refusal) else order
    return json_response(result if isinstance(result, Refusal) else {"message": result})


async def may_act(access: Access, request: Request) -> bool:
    """Whether this client may give orders."""
    try:
        client = await asyncio.to_thread(partial(access.client_of, request.headers, from_page=True))
        return refusal_of(client) is None
    except SettingsError:
        return False


def json_response(content: Any) -> Response:
    """A refusal as an error object with its status, anything else with 200."""
    if isinstance(content, Refusal):
        body = {"error": {"message": content.message}}
        headers = CHALLENGE if content.status == 401 else {}
        return Response(msgspec.json.encode(body), content.status, headers, JSON)
    return Response(msgspec.json.encode(content), media_type=JSON)


def page_files() -> Mapping[str, bytes]:
    """The page's files by name, read once."""
    folder = resources.files("services.collector.console").joinpath("static")
    found = [file for file in folder.iterdir() if file.name.rpartition(".")[2] in CONTENT_TYPES]
    return {file.name: file.read_bytes() for file in found}


def file_of(files: Mapping[str, bytes], name: str) -> Response:
    """One of the page's files, or 404."""
    content = files.get(name)
    if content is None:
        return json_response(Refusal(status=404, message="There is no such file."))
    return Response(content, media_type=CONTENT_TYPES[name.rpartition(".")[2]])


class EventStream(Response):
    """Server-sent events, for as long as the client reads and the process serves."""

    def __init__(self, feed: Feed, owner: str, *, operator: bool) -> None:
        super().__init__()
        self._feed = feed
        self._owner = owner
        self._operator = operator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = self._feed.join(self._owner, operator=self._operator)
        if watcher is None:
            await Response(FULL, 503, {"retry-after": RETRY_AFTER_S}, JSON)(scope, receive, send)
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                leaving = tasks.create_task(_until_left(receive, watcher), name="console-client-leaves")
                await _relay(watcher, send)
                leaving.cancel()
        finally:
            self._feed.leave(watcher)


async def _relay(watcher: Watcher, send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while (frame := await watcher.next()) is not None:
        await send({"type": "http.response.body", "body": frame, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_left(receive: Receive, watcher: Watcher) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    watcher.end()
