"""Demand of a fleet's clients, from the requests that ended recently."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from shared.contracts.inference import RequestFinished
from shared.contracts.planning import Demand

REQUESTS_MAX = 20_000
"""Remembered of one fleet. If the window has more, the newest count, over the time that they span."""
REJECTED = (429, 503)
"""HTTP statuses of requests rejected for lack of capacity: they are demand as well."""
P95 = 0.95


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """One request that ended."""

    at: float
    served: bool = False
    prompt_tokens: int = 0
    uncached_tokens: int = 0
    completion_tokens: int = 0
    admission_s: float = 0.0
    """In the router's own queue."""
    queue_s: float = 0.0
    """In the router's and the engines' queues."""
    ttft_s: float = -1.0
    itl_s: float = -1.0


@dataclass(frozen=True, slots=True)
class ObservedDemand:
    """The demand of a window, and what only the planner needs."""

    demand: Demand
    waiting: float = 0.0
    """Requests that wait in routers, by Little's law: rate times wait of the ended ones."""
    rejected_per_s: float = 0.0
    """Requests rejected for lack of capacity."""


class RequestWindow:
    """The requests of one fleet in the last ``seconds``."""

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds = seconds
        self._since = now
        self._requests: deque[EndedRequest] = deque(maxlen=REQUESTS_MAX)

    def ended(self, request: RequestFinished, now: float) -> None:
        """A request ended. Invalid and cancelled ones do not count."""
        if request.status in REJECTED:
            self._requests.append(EndedRequest(now))
        elif request.status == 200 and request.prompt_tokens >= 0:
            self._requests.append(_ended(request, now))

    def observed(self, now: float) -> ObservedDemand:
        """The demand until ``now``."""
        while self._requests and self._requests[0].at < now - self._seconds:
            self._requests.popleft()
        seconds = min(self._seconds, now - self._since)
        if len(self._requests) == REQUESTS_MAX:
            seconds = now - self._requests[0].at
        if seconds <= 0.0:
            return ObservedDemand(Demand())
        served = [one for one in self._requests if one.served]
        rate = len(self._requests) / seconds
        rejected = (len(self._requests) - len(served)) / seconds
        if not served:
            return ObservedDemand(Demand(requests_per_s=rate, seconds=seconds), rejected_per_s=rejected)
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
        return ObservedDemand(demand, len(served) / seconds * _mean([one.admission_s for one in served]), rejected)


def _ended(request: RequestFinished, now: float) -> EndedRequest:
    parts = request.ttft_parts
    cached = max(0, request.cached_tokens) + max(0, request.readback_tokens)
    return EndedRequest(
        at=now,
        served=True,
        prompt_tokens=request.prompt_tokens,
        uncached_tokens=max(0, request.prompt_tokens - cached),
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
