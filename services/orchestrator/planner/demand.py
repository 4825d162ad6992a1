"""What a fleet's clients want, from the requests that ended in the last seconds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from shared.contracts.inference import RequestFinished
from shared.contracts.planning import Demand

REQUESTS_MAX = 20_000
"""Remembered of one fleet; of more than that within the window the newest count, over the time that they span."""
TURNED_AWAY = (429, 503)
"""HTTP statuses of requests that would have been served if there had been room: they are demand too."""
P95 = 0.95


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request that ended."""

    at: float
    served: bool = False
    prompt_tokens: int = 0
    uncached_tokens: int = 0
    completion_tokens: int = 0
    admission_s: float = 0.0
    """In the router's own queue."""
    queue_s: float = 0.0
    """That, and in engines' queues."""
    ttft_s: float = -1.0
    itl_s: float = -1.0


@dataclass(frozen=True, slots=True)
class Wish:
    """The demand of a window, with what only the planner needs to know."""

    demand: Demand
    waiting: float = 0.0
    """Requests that wait in routers just now, as those which ended tell: by Little's law, rate times wait."""
    turned_away_per_s: float = 0.0
    """Requests that found no room."""


class RequestWindow:
    """The requests of one fleet in the last ``seconds``."""

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds = seconds
        self._since = now
        self._requests: deque[Wanted] = deque(maxlen=REQUESTS_MAX)

    def ended(self, request: RequestFinished, now: float) -> None:
        """A request ended. Those that were wrong or given up say nothing of what is wanted."""
        if request.status in TURNED_AWAY:
            self._requests.append(Wanted(now))
        elif request.status == 200 and request.prompt_tokens >= 0:
            self._requests.append(_wanted(request, now))

    def wish(self, now: float) -> Wish:
        """What was wanted until ``now``."""
        while self._requests and self._requests[0].at < now - self._seconds:
            self._requests.popleft()
        seconds = min(self._seconds, now - self._since)
        if len(self._requests) == REQUESTS_MAX:
            seconds = now - self._requests[0].at
        if seconds <= 0.0:
            return Wish(Demand())
        served = [one for one in self._requests if one.served]
        rate = len(self._requests) / seconds
        turned_away = (len(self._requests) - len(served)) / seconds
        if not served:
            return Wish(Demand(requests_per_s=rate, seconds=seconds), turned_away_per_s=turned_away)
        demand = Demand(
            requests_per_s=rate,
            prompt_tokens=_mean([one.prompt_tokens for one in served]),
            uncached_tokens=_mean([one.uncached_tokens for one in served]),
            completion_tokens=_mean([one.completion_tokens for one in served]),
            queue_s=_mean([one.queue_s for one in served]),
            ttft_s_p95=_p95([one.ttft_s for one in served]),
            itl_s_p95=_p95([one.itl_s for one in served]),
            seconds=seconds,
        )
        return Wish(demand, len(served) / seconds * _mean([one.admission_s for one in served]), turned_away)


def _wanted(request: RequestFinished, now: float) -> Wanted:
    parts = request.ttft_parts
    had = max(0, request.cached_tokens) + max(0, request.readback_tokens)
    return Wanted(
        at=now,
        served=True,
        prompt_tokens=request.prompt_tokens,
        uncached_tokens=max(0, request.prompt_tokens - had),
        completion_tokens=max(0, request.completion_tokens),
        admission_s=parts.admission_s if parts else 0.0,
        queue_s=parts.admission_s + parts.queue_s + parts.decode_queue_s if parts else 0.0,
        ttft_s=request.ttft_s,
        itl_s=request.itl_s,
    )


def _mean(values: list[int] | list[float]) -> float:
    return sum(values) / len(values)


def _p95(values: list[float]) -> float:
    known = sorted(value for value in values if value >= 0.0)
    return known[min(len(known) - 1, int(P95 * len(known)))] if known else 0.0
