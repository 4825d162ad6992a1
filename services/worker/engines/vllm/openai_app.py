"""vLLM's OpenAI server as a worker calls it, without what only a server of HTTP needs; and which calls still run.

Only the worker calls it, on the paths that routers pass on. Nobody reads vLLM's own metrics, and headers for browsers
would go nowhere: together they cost a request a tenth of the CPU that it takes in this process.
"""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

from vllm.v1.metrics.loggers import PrometheusStatLogger

from services.worker.engines.port import AsgiApp
from shared.contracts.engine_paths import PLACED

UNUSED_MIDDLEWARE = ("CORSMiddleware", "PrometheusInstrumentatorMiddleware")
"""Classes of Starlette and of prometheus-fastapi-instrumentator, by name."""


def trim(app: Any) -> None:
    """Change the FastAPI ``app`` before its first call: it finds the paths of most requests first."""
    app.user_middleware[:] = [one for one in app.user_middleware if one.cls.__name__ not in UNUSED_MIDDLEWARE]
    app.middleware_stack = None  # vLLM has had it built already; the first call builds it anew
    app.router.routes.sort(key=lambda route: getattr(route, "path", None) not in PLACED)


def without_prometheus(logger_manager: Any) -> None:
    """Keep no metrics of vLLM's; its other loggers of statistics stay. ``logger_manager``: of an AsyncLLM."""
    kept = [one for one in logger_manager.stat_loggers if not isinstance(one, PrometheusStatLogger)]
    logger_manager.stat_loggers = kept


class VllmServer:
    """vLLM's OpenAI server, and which of its calls still run."""

    def __init__(self, app: Any) -> None:
        """``app``: vLLM's FastAPI app, with its state set up."""
        self._app: AsgiApp = app
        self.models = app.state.openai_serving_models
        self.paths = frozenset(path for route in app.routes if isinstance(path := getattr(route, "path", None), str))
        """Paths that the server has routes for, which depend on the model's tasks."""
        self._numbers = count()
        self._running: set[int] = set()
        self._ended = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        number = next(self._numbers)
        self._running.add(number)
        try:
            await self._app(scope, receive, send)
        finally:
            self._running.discard(number)
            self._ended.set()

    async def present_ones_ended(self) -> None:
        """Wait for the end of all calls that run now; later ones do not count."""
        before = next(self._numbers)
        while any(number < before for number in self._running):
            self._ended.clear()
            await self._ended.wait()
