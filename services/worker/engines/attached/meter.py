"""What a worker can tell of a server's load and speed from the requests that it passes on itself, and from the server's
Prometheus metrics: the names of vLLM, SGLang, llama.cpp, TGI and TensorRT-LLM.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import msgspec

from services.worker.engines.attached.bodies import Usage
from services.worker.engines.port import EngineLoad
from shared.contracts.load import StepTotals

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
        """Until here the server's time is accounted for."""
        self._steps = 0.0
        """Decode steps: a token each of all requests that generate makes one."""
        self._totals = StepTotals()
        self._usage = Usage(0, 0, 0)
        self._listeners: list[Callable[[], None]] = []

    @property
    def running(self) -> int:
        """Requests that the server has from this worker."""
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

    def load(self, kv_blocks: int = 0) -> EngineLoad:
        """``kv_blocks``: of the server; 0: it has not said."""
        gauges = self.gauges or Gauges(0, 0, 0.0)
        # The server's numbers are up to a second old, and include the requests of others.
        running = max(self._running - gauges.waiting, gauges.running)
        return EngineLoad(
            running=running,
            waiting=gauges.waiting,
            waiting_tokens=self._waiting_tokens,
            kv_blocks_used=round(gauges.kv_used * kv_blocks),
            prompt_tokens_total=self._usage.prompt,
            computed_tokens_total=self._usage.prompt - self._usage.cached,
            cached_tokens_total=self._usage.cached,
            generation_tokens_total=self._usage.completion,
            steps=self._totals,
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
            self._generating += 1
            self._add(prefill_steps=1, prefill_tokens=tokens, prefill_pairs=0.5 * tokens * tokens)
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

    def _add(self, **work: float) -> None:
        """The server's time since the last progress went into this work, and into nothing else that is known."""
        now, totals = self._now(), self._totals
        sums: dict[str, Any] = {name: getattr(totals, name) + amount for name, amount in work.items()}
        seconds = totals.seconds + max(0.0, now - self._progress_at)
        self._totals = msgspec.structs.replace(totals, seconds=seconds, **sums)
        self._progress_at = now


class MeteredRequest:
    """One request. Leaving the context ends it; ``is_done`` must be set before if it ended well."""

    def __init__(self, meter: Meter, tokens: int) -> None:
        self.usage = Usage()
        self.tokens = 0
        """Generated so far, counted by events."""
        self.is_done = False
        self.prompt_tokens = tokens
        """To be computed, as far as that is known beforehand."""
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
        """More of the answer has come."""
        before, self.tokens = self.tokens, self.tokens + tokens
        if not self._generating:
            self._generating = True
            self._meter.prompt_over(self.prompt_tokens, computed=True)
            before, tokens = 1, tokens - 1  # The step that computes the prompt makes the first token.
        if tokens > 0:
            self._meter.generated(tokens, self.prompt_tokens + before + tokens // 2)
