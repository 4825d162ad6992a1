"""The workload to plan for: a trace, a router's log, or a rate with mean lengths; and its busiest part."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from replay.traces import BLOCK_TOKENS, Request, TraceError, read_trace

PER_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "hour": 3600.0}
LENGTH_SPREAD = 1.0
"""Standard deviation over mean of generated lengths (log-normal). That of Azure's conversations of 2023 is 0.96 for
prompts and 0.77 for outputs.
"""
GENERATED_TOKENS_MAX = 1_000_000
DONORS_MAX = 64
"""Earlier requests of a log that a cached prompt may share its beginning with."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Size of a workload."""

    requests: int
    seconds: float
    requests_per_s: float
    prompt_tokens: float
    """Mean number of prompt tokens."""
    output_tokens: float
    """Mean number of output tokens."""
    shared: float
    """Share of the prompt tokens that repeat the beginning of an earlier prompt: the hits of an unlimited cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests in the order of arrival."""

    name: str
    requests: list[Request]
    note: str = ""
    """What is not known of the workload."""


def read_workload(path: Path, seed: int) -> Workload:
    """A trace as published, or the log of a router. Raises TraceError and OSError."""
    try:
        if is_router_log(path):
            return read_router_log(path)
        return Workload(name=path.name, requests=read_trace(path, seed=seed))
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not text: {error}") from error


def is_router_log(path: Path) -> bool:
    """Whether the first line is a log record in JSON."""
    with path.open(encoding="utf-8") as file:
        line = _object(file.readline())
    return "logger" in line and "message" in line


def read_router_log(path: Path) -> Workload:
    """The finished requests in a log that a router wrote with ``BATON_LOG_FORMAT=json``.

    The log has no prompts, but it says how many tokens of each were cached. A prompt is taken to share that many tokens
    with the latest earlier prompt that is long enough.
    """
    lines = [line for line in _log_lines(path) if line.get("message") == "request" and "completion_tokens" in line]
    lines.sort(key=lambda line: line["arrived_at"])
    donors: list[tuple[int, ...]] = []
    requests: list[Request] = []
    unique = 0
    for line in lines:
        prompt_tokens = max(1, int(line["prompt_tokens"]))
        full = prompt_tokens // BLOCK_TOKENS
        cached = min(full, int(line.get("cached_tokens", 0)) // BLOCK_TOKENS)
        shared = next((blocks[:cached] for blocks in reversed(donors) if len(blocks) >= cached), ())
        blocks = (*shared, *range(unique, unique + full - len(shared)))
        unique += full - len(shared)
        donors = [*donors[1 - DONORS_MAX :], blocks]
        at_s = line["arrived_at"] - lines[0]["arrived_at"]
        requests.append(Request(at_s, blocks, prompt_tokens, max(1, int(line["completion_tokens"]))))
    if not requests:
        raise TraceError(f"{path} has no finished requests")
    note = "A log does not say which prompts share tokens, only how many."
    return Workload(name=path.name, requests=requests, note=note)


def _log_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            line = _object(text)
            if not line:
                continue
            try:
                ended_at = datetime.fromisoformat(line["time"]).timestamp()
                yield {**line, "arrived_at": ended_at - float(line.get("e2e_s", 0.0))}
            except (KeyError, TypeError, ValueError) as error:
                raise TraceError(f"{path}, line {number}: a log record without a time") from error


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def rate_of(text: str) -> float:
    """Requests per second of ``5``, ``5/s``, ``300/min`` or ``18000/h``. Raises ValueError."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*(?:/\s*([a-z]+))?\s*", text.lower())
    unit = PER_S.get((match[2] or "s") if match else "")
    if match is None or unit is None:
        raise ValueError(f"{text!r} is no rate; write 5/s, 300/min or 18000/h")
    rate = float(match[1]) / unit
    if not 0.0 < rate < math.inf:
        raise ValueError(f"a rate must be more than 0, got {text!r}")
    return rate


def generated(rate_per_s: float, prompt_tokens: int, output_tokens: int, *, count: int, seed: int) -> Workload:
    """Poisson arrivals, log-normal lengths with these means, nothing shared."""
    rng = random.Random(seed)
    requests: list[Request] = []
    at_s, unique = 0.0, 0
    for _ in range(count):
        prompt, output = _length(prompt_tokens, rng), _length(output_tokens, rng)
        full = prompt // BLOCK_TOKENS
        requests.append(Request(at_s, tuple(range(unique, unique + full)), prompt, output))
        unique += full
        at_s += rng.expovariate(rate_per_s)
    name = f"{rate_per_s:g} requests/s, generated"
    return Workload(name=name, requests=requests, note="Generated prompts share nothing, so no cache helps them.")


def _length(mean: int, rng: random.Random) -> int:
    variance = math.log(1 + LENGTH_SPREAD**2)
    length = rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))
    return max(1, min(GENERATED_TOKENS_MAX, round(length)))


def busiest(requests: list[Request], count: int) -> list[Request]:
    """So many consecutive requests with the most tokens per second, the first at 0 s; 0: all of them."""
    if not count or count >= len(requests):
        return requests
    tokens = sum(request.input_tokens + request.output_tokens for request in requests[:count])
    best, start = 0.0, 0
    for first in range(len(requests) - count + 1):
        if first:
            left, new = requests[first - 1], requests[first + count - 1]
            tokens += new.input_tokens + new.output_tokens - left.input_tokens - left.output_tokens
        rate = tokens / max(requests[first + count - 1].at_s - requests[first].at_s, 1e-9)
        if rate > best:
            best, start = rate, first
    chosen = requests[start : start + count]
    return [replace(request, at_s=request.at_s - chosen[0].at_s) for request in chosen]


def summary_of(requests: list[Request]) -> Summary:
    """Means, and what an unlimited cache would find."""
    count = len(requests)
    seconds = max(requests[-1].at_s, 1e-9)
    prompt_tokens = sum(request.input_tokens for request in requests)
    return Summary(
        requests=count,
        seconds=seconds,
        requests_per_s=count / seconds,
        prompt_tokens=prompt_tokens / count,
        output_tokens=sum(request.output_tokens for request in requests) / count,
        shared=sum(seen_before(requests)) / prompt_tokens,
    )


def seen_before(requests: list[Request]) -> list[int]:
    """For each request the prompt tokens that repeat the beginning of an earlier prompt."""
    seen: set[int] = set()
    found = []
    for request in requests:
        # Equal blocks are counted as equal wherever they are in a prompt: an upper bound.
        shared = next((index for index, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
        found.append(min(shared * BLOCK_TOKENS, request.input_tokens - 1))
        seen.update(request.blocks)
    return found
