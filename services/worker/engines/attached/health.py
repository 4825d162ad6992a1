"""Whether the server can serve, and how busy it is: asked at intervals, and by what becomes of requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from services.worker.engines.attached.bodies import BadAnswer
from services.worker.engines.attached.meter import Gauges, Meter, read_gauges
from services.worker.engines.attached.server import MODELS, NOT_THERE, REFUSES_KEY, Server, ServerAway, list_models

log = logging.getLogger("baton.worker")

HEALTH = "/health"
METRICS = ("/metrics", "/prometheus/metrics")
"""The second one is TensorRT-LLM's, whose first one has statistics in JSON."""
PROBE_PERIOD_S = 2.0
LIST_PERIOD_S = 10.0
"""For a server without /health, whose list of models may count against a limit."""
PROBE_S_MAX = 3.0
FAILURES_MAX = 2
"""Probes in succession that must fail before the server counts as away. A connection may break by chance."""
RETRY_S = 0.25
"""Before a failed probe is repeated."""
GAUGES_PERIOD_S = 1.0
GAUGES_S_MAX = 2.0
GAUGES_BYTES_MAX = 2 << 20
BODY_BYTES_MAX = 4 << 20
METRICS_RETRY_S = 60.0
"""For a server that had no metrics."""
BAD_KEY_S = 30.0
"""Until a key that was refused is tried again, unless its file has another one."""
KEY_REFUSED = "it refuses the API key of this worker"


class ServerHealth:
    """``follow`` keeps ``fault``; ``follow_load`` keeps the meter's gauges. Neither ends by itself."""

    def __init__(self, server: Server, meter: Meter, model: str, now: Callable[[], float] = time.monotonic) -> None:
        self.fault = ""
        """Why the server cannot serve now; empty while it can."""
        self._server = server
        self._meter = meter
        self._model = model
        self._now = now
        self._path = HEALTH
        self._metrics_path = ""
        """Where the server has metrics that are known; empty: not found yet."""
        self._failures = 0
        self._bad_key: str | None = None
        self._bad_key_until = 0.0
        self._doubted = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    def on_changed(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` when ``fault`` has changed."""
        self._listeners.append(listener)

    def doubt(self) -> None:
        """A request has failed: probe now."""
        self._doubted.set()

    def refused_key(self, key: str) -> None:
        """The server refuses requests with this key, although it may answer its probe without one."""
        self._bad_key, self._bad_key_until = key, self._now() + BAD_KEY_S
        self._set(KEY_REFUSED)

    async def follow(self) -> None:
        """Probe until cancelled."""
        while True:
            pause_s = LIST_PERIOD_S if self._path == MODELS and not self.fault else PROBE_PERIOD_S
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if self._failures else pause_s):
                    await self._doubted.wait()
            if self._failures:
                await asyncio.sleep(RETRY_S)  # However often it is doubted.
            self._doubted.clear()
            await self._probe()

    async def follow_load(self) -> None:
        """Read the server's metrics until cancelled."""
        while True:
            gauges = await self._gauges() if not self.fault else None
            if gauges != self._meter.gauges:
                self._meter.gauges = gauges
                self._meter.changed()
            await asyncio.sleep(GAUGES_PERIOD_S if gauges is not None or self.fault else METRICS_RETRY_S)

    async def _gauges(self) -> Gauges | None:
        for path in (self._metrics_path,) if self._metrics_path else METRICS:
            if (gauges := await self._gauges_at(path)) is not None:
                self._metrics_path = path
                return gauges
        self._metrics_path = ""
        return None

    async def _gauges_at(self, path: str) -> Gauges | None:
        try:
            status, body = await self._server.ask("GET", path, bytes_max=GAUGES_BYTES_MAX, s_max=GAUGES_S_MAX)
        except (ServerAway, BadAnswer) as error:
            log.debug("the server's metrics cannot be read: %s", error)
            return None
        return read_gauges(body.decode("utf-8", "replace")) if status == 200 else None

    async def _probe(self) -> None:
        """A server that computes a request may be too busy to list its models, and one that does one thing at a time
        may break off the request for it. So it is not asked for the list then: the request itself shows whether it
        lives.
        """
        if self._path == MODELS and self._meter.running and not self.fault:
            return
        why = await self._why_away() or self._why_not_with_key()
        self._failures = self._failures + 1 if why else 0
        if not why or self._failures >= FAILURES_MAX:
            self._failures = 0
            self._set(why)

    async def _why_away(self) -> str:
        try:
            status = await self._ask()
            if status in NOT_THERE and self._path == HEALTH:
                self._path = MODELS
                status = await self._ask()
            return _why(status) or (await self._why_not_same() if self.fault else "")
        except ServerAway as away:
            return str(away)
        except BadAnswer as bad:
            return f"{self._path}: {bad}"

    async def _why_not_same(self) -> str:
        """A server that is back may have another model now."""
        listed = await list_models(self._server)
        is_same = listed is None or any(one.id == self._model for one in listed)
        return "" if is_same else f"it has no model {self._model} any more"

    async def _ask(self) -> int:
        return (await self._server.ask("GET", self._path, bytes_max=BODY_BYTES_MAX, s_max=PROBE_S_MAX)).status

    def _why_not_with_key(self) -> str:
        is_bad = self._bad_key == self._server.key and self._now() < self._bad_key_until
        return KEY_REFUSED if is_bad else ""

    def _set(self, fault: str) -> None:
        if fault == self.fault:
            return
        self.fault = fault
        if fault:
            log.warning("the server is away: %s", fault)
        else:
            log.info("the server is back")
        for listener in self._listeners:
            listener()


def _why(status: int) -> str:
    """Why a server that answers its probe with this status is away; empty if it is not."""
    if status in REFUSES_KEY:
        return KEY_REFUSED
    return "" if status < 300 or status in NOT_THERE or status == 429 else f"it answers its health check with {status}"
