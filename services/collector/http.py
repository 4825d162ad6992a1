"""The metrics collector's HTTP side: /metrics for Prometheus, /health and /ready."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI, Response

from shared.telemetry.families import PROMETHEUS_CONTENT_TYPE

LISTEN_S_MAX = 10.0
LISTEN_LOOK_S = 0.01
CLOSE_S_MAX = 3
"""For scrapes that are under way when the process stops."""


def make_app(metrics: Callable[[], bytes], ready: Callable[[], bool]) -> FastAPI:
    """The routes; they only read."""
    app = FastAPI(title="Baton metrics collector", docs_url=None, redoc_url=None)

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


class HttpServer(uvicorn.Server):
    """uvicorn as a child of our task group: signals are the process's business."""

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=CLOSE_S_MAX,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the service."""
        yield

    async def listening(self) -> None:
        """Wait until connections are accepted. Raises TimeoutError."""
        async with asyncio.timeout(LISTEN_S_MAX):
            while not self.started:  # noqa: ASYNC110  # uvicorn has no event for it.
                await asyncio.sleep(LISTEN_LOOK_S)
