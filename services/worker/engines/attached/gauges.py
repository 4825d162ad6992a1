"""What a server's Prometheus metrics say of its load: vLLM's, SGLang's, llama.cpp's and TGI's names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

RUNNING = (
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "llamacpp:requests_processing",
    "tgi_batch_current_size",
)
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred", "tgi_queue_size")
KV_USED = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "llamacpp:kv_cache_usage_ratio",
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
