"""The metrics collector's HTTP side: /metrics for Prometheus, /health and /ready, and the console."""

from __future__ import annotations

from collections.abc import Callable
from typing import Never

from fastapi import FastAPI, Response

from shared.http.edge import HttpEdge
from shared.http.limits import EdgeLimits
from shared.telemetry.prometheus import PROMETHEUS_CONTENT_TYPE

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
"""On every response: other sites can neither embed nor read the pages, and no foreign script runs in them."""


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


def make_app(metrics: Callable[[], bytes], ready: Callable[[], bool]) -> FastAPI:
    """The app with metrics, health and readiness."""
    app = FastAPI(title="Baton metrics collector", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics(), media_type=PROMETHEUS_CONTENT_TYPE)

    @app.get("/health")
    async def show_health() -> dict[str, str]:
        return {"status": "healthy"}

    @app.get("/ready")
    async def show_ready(response: Response) -> dict[str, str]:
        response.status_code = 200 if ready() else 503
        return {"status": "ready" if ready() else "not ready"}

    return app
