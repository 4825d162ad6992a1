"""The console over HTTP: the page, its events, one request's decision, and what an operator may have done."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import RedirectResponse

from services.collector.console.actions import Actions
from services.collector.console.event_stream import EventStream
from services.collector.console.feed import Feed
from services.collector.console.find_decision import find_decision
from services.collector.console.orders import Refusal, order_of, refusal_of
from services.collector.console.requests import RecentRequests
from services.collector.http.access import Access
from shared.bus.port import Bus
from shared.runtime.settings import SettingsError

JSON = "application/json"
PAGE = "index.html"
BODY_BYTES_MAX = 16 * 1024
BODY_S_MAX = 10.0
KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": JSON,
    "svg": "image/svg+xml",
    "png": "image/png",
    "woff2": "font/woff2",
}
"""What the page's files are, by the end of their names."""
CHALLENGE = {"www-authenticate": "Bearer"}


@dataclass(frozen=True)
class ConsoleHandlers:
    """What the routes work with."""

    bus: Bus
    feed: Feed
    recent: RecentRequests
    actions: Actions
    access: Access


def add_console(app: FastAPI, desk: ConsoleHandlers) -> None:
    """The routes."""
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
    async def show_events() -> Response:
        return EventStream(desk.feed)

    @app.get("/console/requests/{decision_id}")
    async def show_request(decision_id: str) -> Response:
        return told(await find_decision(desk.bus, desk.recent, decision_id))

    @app.post("/console/actions")
    async def act(request: Request) -> Response:
        return await acted(desk, request)


async def acted(desk: ConsoleHandlers, request: Request) -> Response:
    """An order, if whoever gives it may."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        return told(Refusal(status=415, message=f"Orders are {JSON}."))
    try:
        standing = await asyncio.to_thread(desk.access.standing, request.headers)
    except SettingsError:
        return told(Refusal(status=503, message="The file of the admin key cannot be read: see the collector's log."))
    if (refusal := refusal_of(standing)) is not None:
        return told(refusal)
    body = await body_of(request)
    order = order_of(body) if isinstance(body, bytes) else body
    done = await desk.actions.obey(order) if not isinstance(order, Refusal) else order
    return told(done if isinstance(done, Refusal) else {"told": done})


async def body_of(request: Request) -> bytes | Refusal:
    """All of it, if it is no more than an order can be and comes in time."""
    body = b""
    try:
        async with asyncio.timeout(BODY_S_MAX):
            async for piece in request.stream():
                body += piece
                if len(body) > BODY_BYTES_MAX:
                    return Refusal(status=413, message="No order is that large.")
    except TimeoutError:
        return Refusal(status=408, message="The order did not come in time.")
    return body


def told(answer: Any) -> Response:
    """As JSON."""
    if isinstance(answer, Refusal):
        body = {"error": {"message": answer.message}}
        headers = CHALLENGE if answer.status == 401 else {}
        return Response(msgspec.json.encode(body), answer.status, headers, JSON)
    return Response(msgspec.json.encode(answer), media_type=JSON)


def page_files() -> Mapping[str, bytes]:
    """The page and what it is made of, read once."""
    folder = resources.files("services.collector.console").joinpath("static")
    found = [file for file in folder.iterdir() if file.name.rpartition(".")[2] in KINDS] if folder.is_dir() else []
    return {file.name: file.read_bytes() for file in found}


def file_of(files: Mapping[str, bytes], name: str) -> Response:
    """One of them."""
    content = files.get(name)
    if content is None:
        return told(Refusal(status=404, message="There is no such file."))
    return Response(content, media_type=KINDS[name.rpartition(".")[2]])
