"""The metrics collector's HTTP side: /metrics for Prometheus, /health and /ready, and the console."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.telemetry.families import PROMETHEUS_CONTENT_TYPE

SECURITY_HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'self'; base-uri 'none'; form-action 'none'; object-src 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
"""On every response: other sites can neither embed nor read the pages, and no foreign script runs in them."""


def make_app(metrics: Callable[[], bytes], ready: Callable[[], bool]) -> FastAPI:
    """The app with metrics, health and readiness."""
    app = FastAPI(title="Baton metrics collector", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(WithSecurityHeaders)

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics(), media_type=PROMETHEUS_CONTENT_TYPE)

    @app.get("/health")
    async def show_health() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/ready")
    async def show_ready(response: Response) -> dict[str, str]:
        response.status_code = 200 if ready() else 503
        return {"status": "ready" if ready() else "not ready"}

    return app


class WithSecurityHeaders:
    """ASGI middleware: adds the headers when a response starts, without buffering streams."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *SECURITY_HEADERS]
            await send(message)

        await self._app(scope, receive, send_with_headers)
