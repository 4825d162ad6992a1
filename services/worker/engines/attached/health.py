"""Whether the server can serve, its load and its speed: asked at intervals, and learned from the requests that pass.

The load comes from the requests that this worker passes on itself, and from the server's Prometheus metrics, by the
names of vLLM, SGLang, llama.cpp, TGI and TensorRT-LLM.
"""

from __future__ import annotations

import asyncio
import logging
import math
import operator
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Self

from services.worker.engines.attached.bodies import BadAnswer, Usage
from services.worker.engines.attached.server import MODELS, NOT_THERE, REFUSES_KEY, Server, ServerAway, list_models
from services.worker.engines.port import EngineLoad
from shared.contracts.load import NO_STEP_TOTALS, StepTotals
from shared.engine_speed.steps import by_field

RUNNING = (
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "llamacpp:requests_processing",
    "tgi_batch_current_size",
    "trtllm_num_requests_running",
)
WAITING = (
    "vllm:num_requests_waiting",
    "sglang:num_queue_reqs",
    "llamacpp:requests_deferred",
    "tgi_queue_size",
    "trtllm_num_requests_waiting",
)
KV_USED = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "llamacpp:kv_cache_usage_ratio",
    "trtllm_kv_cache_utilization",
)
"""Shares, 0.0 to 1.0."""
WANTED = frozenset((*RUNNING, *WAITING, *KV_USED))
REQUESTS_MAX = 1_000_000
LINE_CHARS_MAX = 4096
SAMPLE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{[^\n]*\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*")


class Gauges(NamedTuple):
    """The server's requests, also those of others than this worker."""

    running: int
    waiting: int
    kv_used: float
    """0.0 where the server does not say."""


def read_gauges(text: str) -> Gauges | None:
    """None if these are no metrics that are known. Gauges with several label sets (ranks, models) are summed."""
    sums: dict[str, float] = {}
    shares: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#") or len(line) > LINE_CHARS_MAX:
            continue
        found = SAMPLE.fullmatch(line)
        if found is None or found[1] not in WANTED or (value := _number(found[2])) is None:
            continue
        sums[found[1]] = sums.get(found[1], 0.0) + value
        shares[found[1]] = max(shares.get(found[1], 0.0), value)
    running, waiting = _first(RUNNING, sums), _first(WAITING, sums)
    if running is None and waiting is None:
        return None
    return Gauges(
        min(int(running or 0.0), REQUESTS_MAX),
        min(int(waiting or 0.0), REQUESTS_MAX),
        min(_first(KV_USED, shares) or 0.0, 1.0),
    )


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0.0 else None


def _first(names: tuple[str, ...], values: Mapping[str, float]) -> float | None:
    return next((values[name] for name in names if name in values), None)


BYTES_PER_TOKEN = 4
"""Guess for a prompt whose tokens were not counted."""
PROMPT_TOKENS_MAX = 1 << 24


class Meter:
    """Counts this worker's requests. The learned speed includes the network, and what the server has cached."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.gauges: Gauges | None = None
        """The server's own numbers; None while it gives none."""
        self._now = now
        self._running = 0
        self._generating = 0
        self._waiting_tokens = 0
        self._progress_at = 0.0
        """Instant up to which the server's time is accounted for."""
        self._steps = 0.0
        """Decode steps: a token each of all requests that generate makes one."""
        self._totals = self._prompt_totals = NO_STEP_TOTALS
        self._usage = Usage(0, 0, 0)
        self._listeners: list[Callable[[], None]] = []

    @property
    def running(self) -> int:
        return self._running

    def on_changed(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` when a request begins, has its first token or ends."""
        self._listeners.append(listener)

    def changed(self) -> None:
        for listener in self._listeners:
            listener()

    def request(self, tokens: int, body_bytes: int) -> MeteredRequest:
        """The server gets a request with ``tokens`` to compute (-1: not known)."""
        return MeteredRequest(self, min(tokens if tokens >= 0 else body_bytes // BYTES_PER_TOKEN, PROMPT_TOKENS_MAX))

    def load(self, kv_tokens: int = 0) -> EngineLoad:
        """``kv_tokens``: capacity of the server; 0: it has not said."""
        gauges = self.gauges or Gauges(0, 0, 0.0)
        # The server's numbers are up to a second old, and include the requests of others.
        running = max(self._running - gauges.waiting, gauges.running)
        return EngineLoad(
            running=running,
            waiting=gauges.waiting,
            waiting_tokens=self._waiting_tokens,
            kv_tokens_used=round(gauges.kv_used * kv_tokens),
            prompt_tokens_total=self._usage.prompt,
            computed_tokens_total=self._usage.prompt - self._usage.cached,
            cached_tokens_total=self._usage.cached,
            generation_tokens_total=self._usage.completion,
            steps=self._totals,
            prompt_steps=self._prompt_totals,
        )

    def began(self, tokens: int) -> None:
        if not self._running:
            self._progress_at = self._now()
        self._running += 1
        self._waiting_tokens += tokens
        self.changed()

    def prompt_over(self, tokens: int, *, computed: bool) -> None:
        """The prompt was computed, or will not be."""
        self._waiting_tokens -= tokens
        if computed:
            done = self._add(prefill_steps=1, prefill_tokens=tokens, prefill_pairs=0.5 * tokens * tokens)
            if not self._generating:  # Nobody generated meanwhile: all of the time is the prompt's.
                self._prompt_totals = by_field(operator.add, self._prompt_totals, done)
            self._generating += 1
            self.changed()

    def generated(self, tokens: int, context: int) -> None:
        """A request has so many tokens more, with ``context`` tokens before each on average."""
        before = int(self._steps)
        self._steps += tokens / max(1, self._generating)
        self._add(
            decode_steps=int(self._steps) - before, decode_requests=tokens, decode_context_tokens=tokens * context
        )

    def ended(self, usage: Usage, *, generating: bool, failed: bool) -> None:
        """``failed``: what the server did meanwhile is not known, and teaches nothing of its speed."""
        self._running -= 1
        self._generating -= generating
        if failed:
            self._progress_at = self._now()
        prompt = max(0, usage.prompt)
        self._usage.prompt += prompt
        self._usage.cached += min(max(0, usage.cached), prompt)
        self._usage.completion += max(0, usage.completion)
        self.changed()

    def _add(self, **work: Any) -> StepTotals:
        """The server's time since the last progress went into this work, and into nothing else that is known."""
        now = self._now()
        done = StepTotals(seconds=max(0.0, now - self._progress_at), **work)
        self._totals = by_field(operator.add, self._totals, done)
        self._progress_at = now
        return done


class MeteredRequest:
    """One request. Leaving the context ends it; ``is_done`` must be set before if it ended well."""

    def __init__(self, meter: Meter, tokens: int) -> None:
        self.usage = Usage()
        self.tokens = 0
        """Tokens generated so far, counted by events."""
        self.is_done = False
        self.prompt_tokens = tokens
        """Tokens to compute, as far as that is known beforehand."""
        self._meter = meter
        self._generating = False

    def __enter__(self) -> Self:
        self._meter.began(self.prompt_tokens)
        return self

    def __exit__(self, *_error: object) -> None:
        if not self._generating:
            self._meter.prompt_over(self.prompt_tokens, computed=False)
        self._meter.ended(self.usage, generating=self._generating, failed=not self.is_done)

    def progress(self, tokens: int = 1) -> None:
        before, self.tokens = self.tokens, self.tokens + tokens
        if not self._generating:
            self._generating = True
            self._meter.prompt_over(self.prompt_tokens, computed=True)
            before, tokens = 1, tokens - 1  # The step that computes the prompt makes the first token.
        if tokens > 0:
            self._meter.generated(tokens, self.prompt_tokens + before + tokens // 2)


log = logging.getLogger("baton.worker")

HEALTH = "/health"
METRICS = ("/metrics", "/prometheus/metrics")
"""The second one is TensorRT-LLM's, whose first one has statistics in JSON."""
PROBE_PERIOD_S = 2.0
LIST_PERIOD_S = 10.0
"""Interval of probes of a server without /health, whose list of models may count against a limit."""
PROBE_S_MAX = 3.0
FAILURES_MAX = 2
"""Probes in succession that must fail before the server counts as away. A connection may break by chance."""
RETRY_S = 0.25
"""Pause before a failed probe is repeated."""
GAUGES_PERIOD_S = 1.0
GAUGES_S_MAX = 2.0
GAUGES_BYTES_MAX = 2 << 20
BODY_BYTES_MAX = 4 << 20
METRICS_RETRY_S = 60.0
"""Interval at which a server that had no metrics is asked for them again."""
BAD_KEY_S = 30.0
"""Pause before a refused key is tried again, unless its file has another one."""
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
        self._listeners.append(listener)

    def doubt(self) -> None:
        """A request has failed: probe now."""
        self._doubted.set()

    def refused_key(self, key: str) -> None:
        """The server refuses requests with this key, although it may answer its probe without one."""
        self._bad_key, self._bad_key_until = key, self._now() + BAD_KEY_S
        self._set(KEY_REFUSED)

    async def follow(self) -> None:
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
