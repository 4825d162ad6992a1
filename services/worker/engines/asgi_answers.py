"""The messages with which an engine's ASGI app answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from services.worker.engines.port import AsgiMessage

Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]


def start(status: int, content_type: str) -> AsgiMessage:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type.encode())]}


def part(data: bytes, *, more: bool = True) -> AsgiMessage:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def respond(send: Send, status: int, body: bytes) -> None:
    """A whole response, as JSON."""
    await send(start(status, "application/json"))
    await send(part(body, more=False))
