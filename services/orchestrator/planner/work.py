"""The demand of a fleet's clients, and how much work it is, in workers' worth: 2.0 keeps two engines busy.

Demand comes from the requests that ended recently.

Prefill is measured in engine seconds per second: what prompts took lately, and what their queues will take. Decode
steps are shared by a batch, so its measure is tokens per second over what one engine gives with the largest batch that
still meets the target between tokens and fits into its KV cache. The planner compares the minimum of the work over a
short time with its maximum over long ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from services.orchestrator.planner.rules import Rules
from shared.contracts.inference import RequestFinished
from shared.contracts.planning import Demand
from shared.engine_speed.steps import Steps, StepTimeModel

REQUESTS_MAX = 20_000
"""Remembered of one fleet. If the window has more, the newest count, over the time that they span."""
REJECTED = (429, 503)
"""HTTP statuses of requests rejected for lack of capacity: they are demand as well."""
P95 = 0.95


@dataclass(frozen=True, slots=True)
class EndedRequest:
    at: float
    served: bool = False
    is_batch: bool = False
    prompt_tokens: int = 0
    uncached_tokens: int = 0
    completion_tokens: int = 0
    admission_s: float = 0.0
    """Time in the router's own queue."""
    queue_s: float = 0.0
    """Time in the router's and the engines' queues."""
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
    prefill_share: float = 1.0
    """Share of the prompt tokens computed by engines that clients' requests had; the rest is of batches."""
    decode_share: float = 1.0
    """Share of the generated tokens that clients' requests had."""

    def of_clients(self, rate: Steps) -> Steps:
        """The part of the engines' work that was for clients' requests. Batches use what is there: they need no engine
        of their own.
        """
        return Steps(
            seconds=rate.seconds,
            prefill_steps=rate.prefill_steps * self.prefill_share,
            prefill_tokens=rate.prefill_tokens * self.prefill_share,
            prefill_pairs=rate.prefill_pairs * self.prefill_share,
            decode_steps=rate.decode_steps,
            decode_requests=rate.decode_requests * self.decode_share,
            decode_context_tokens=rate.decode_context_tokens * self.decode_share,
        )


class RequestWindow:
    """The requests of one fleet in the last ``seconds``."""

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds = seconds
        self._since = now
        self._requests: deque[EndedRequest] = deque(maxlen=REQUESTS_MAX)

    def ended(self, request: RequestFinished, now: float) -> None:
        """A request ended. Invalid and cancelled ones do not count, nor lines of batches that must wait."""
        if request.status in REJECTED:
            if not request.is_batch:
                self._requests.append(EndedRequest(now))
        elif request.status == 200 and request.prompt_tokens >= 0:
            self._requests.append(_ended(request, now))

    def observed(self, now: float) -> ObservedDemand:
        while self._requests and self._requests[0].at < now - self._seconds:
            self._requests.popleft()
        seconds = min(self._seconds, now - self._since)
        if len(self._requests) == REQUESTS_MAX:
            seconds = now - self._requests[0].at
        if seconds <= 0.0:
            return ObservedDemand(Demand())
        clients = [one for one in self._requests if not one.is_batch]
        served = [one for one in clients if one.served]
        rate = len(clients) / seconds
        rejected = (len(clients) - len(served)) / seconds
        of_prefill, of_decode = self._shares(served)
        if not served:
            demand = Demand(requests_per_s=rate, seconds=seconds)
            return ObservedDemand(demand, 0.0, rejected, of_prefill, of_decode)
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
        waiting = len(served) / seconds * _mean([one.admission_s for one in served])
        return ObservedDemand(demand, waiting, rejected, of_prefill, of_decode)

    def _shares(self, served: list[EndedRequest]) -> tuple[float, float]:
        """Clients' shares of the computed prompt tokens and of the generated ones; 1 while nothing has ended."""
        lines = [one for one in self._requests if one.is_batch]
        return (
            _share(sum(one.uncached_tokens for one in served), sum(one.uncached_tokens for one in lines)),
            _share(sum(one.completion_tokens for one in served), sum(one.completion_tokens for one in lines)),
        )


def _share(tokens: int, others: int) -> float:
    return tokens / (tokens + others) if others else 1.0


def _ended(request: RequestFinished, now: float) -> EndedRequest:
    parts = request.ttft_parts
    cached = max(0, request.cached_tokens) + max(0, request.readback_tokens)
    return EndedRequest(
        at=now,
        served=True,
        is_batch=request.is_batch,
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


CAUSE_SHARE = 0.8
"""A phase with so much of the busiest phase's load may be why requests wait in routers."""
TAIL_FACTOR = 3.0
"""The 95th percentile of a wait over its mean: e-fold tails have 3.0."""
LOAD_MIN = 0.3
"""However tight the target, engines are not kept emptier than this: more of them would hardly help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """Capacity of one engine, and the number of engines for each phase."""

    kv_tokens: int
    requests_max: int
    prefill: float
    decode: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Queues:
    """What engines have accepted and not done yet."""

    prompt_tokens: int = 0
    requests: int = 0
    """Requests in the queues of workers that only decode."""
    decoding: int = 0
    """Requests in the batches of the workers that decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of each phase in workers' worth, and the loads that the targets allow."""

    prefill: float
    decode: float
    prompt_s: float
    """Time of one prompt on an idle engine."""
    batch: float
    """Completions that one engine may have at a time."""
    ttft_s: float
    load_max: float
    prefill_waiting: float
    """Prompt tokens that wait in engines."""
    decode_waiting: float
    """Requests that wait for a batch, or are too many in it."""
    prefill_cause: str
    """What makes the prefill work, as text."""
    decode_cause: str

    def prefill_load_max(self, workers: float) -> float:
        """The load at which waiting and computing together take what the target allows, for 95 of 100 prompts.

        The mean wait before one of n engines with load u is about u / (1 - u) / n prompts.
        """
        spare_s = self.ttft_s - self.prompt_s
        if not self.ttft_s or not self.prompt_s or spare_s <= 0.0:
            return self.load_max
        odds = workers * spare_s / (TAIL_FACTOR * self.prompt_s)
        return min(self.load_max, max(LOAD_MIN, odds / (1.0 + odds)))

    def decode_load_max(self, _workers: float) -> float:
        """The batch already respects the target between tokens."""
        return self.load_max


def work_of(
    rate: Steps, queues: Queues, observed: ObservedDemand, times: StepTimeModel, engines: Engines, rules: Rules
) -> Work:
    """``rate``: what all engines together did per second."""
    demand, rate = observed.demand, observed.of_clients(rate)
    prompt_work = times.prefill_s(rate)
    token_s = prompt_work / rate.prefill_tokens if rate.prefill_tokens >= 1.0 else times.prefill_token_s
    context = rate.decode_context_tokens / rate.decode_requests if rate.decode_requests else demand.prompt_tokens
    batch = batch_max(times, context, engines, rules.itl_s)
    tokens_worth = times.decode_step_of(batch, context) / batch
    prefill = prompt_work + queues.prompt_tokens * token_s / rules.clear_s
    decoding = queues.decoding * observed.decode_share
    # Beyond the target a batch gives hardly more tokens: what is too much of it is a queue, half done on average.
    too_many = max(0.0, decoding - batch * engines.decode)
    queued = queues.requests + 0.5 * too_many
    decode = (rate.decode_requests + queued * demand.completion_tokens / rules.clear_s) * tokens_worth
    # Batches show at once what the averages of the window show late.
    decode = max(decode, min(decoding / batch, engines.decode))
    # Requests wait in a router for the phase that is full: the engines of the other have room.
    load = (prefill / max(engines.prefill, 1.0), decode / max(engines.decode, 1.0))
    waits_for = [each >= CAUSE_SHARE * max(load) for each in load]
    later = observed.waiting / rules.clear_s
    more_prompts, more_answers = (observed.rejected_per_s + later * waits for waits in waits_for)
    prompt_s = demand.uncached_tokens * token_s
    return Work(
        prefill=prefill + more_prompts * prompt_s,
        decode=decode + more_answers * demand.completion_tokens * tokens_worth,
        prompt_s=prompt_s,
        batch=batch,
        ttft_s=rules.ttft_s,
        load_max=rules.load_max,
        prefill_waiting=queues.prompt_tokens,
        decode_waiting=queues.requests + too_many,
        prefill_cause=_cause(f"{rate.prefill_tokens:.0f} prompt tokens/s", queues.prompt_tokens, "tokens", observed),
        decode_cause=_cause(
            f"{decoding:.0f} requests decode where {batch:.0f} per worker may", queues.requests, "requests", observed
        ),
    )


def _cause(work: str, waiting: int, unit: str, observed: ObservedDemand) -> str:
    parts = [work]
    if waiting:
        parts.append(f"{waiting} {unit} wait in engines")
    if observed.waiting >= 1.0:
        parts.append(f"{observed.waiting:.0f} requests wait in routers")
    if observed.rejected_per_s:
        parts.append(f"{observed.rejected_per_s:.2g}/s are rejected")
    return ", ".join(parts)


def batch_max(times: StepTimeModel, context_tokens: float, engines: Engines, itl_s: float) -> float:
    """Completions at a time: as many as the target allows and the cache holds. At least one, whatever the target."""
    fits = float(engines.requests_max)
    if context_tokens >= 1.0:
        fits = min(fits, engines.kv_tokens / context_tokens)
    each_s = times.decode_request_s + context_tokens * times.decode_context_token_s
    in_time = (itl_s - times.decode_step_s) / each_s if itl_s else fits
    # An engine that misses the target with one request misses it with many: then only the capacity counts.
    return max(1.0, min(fits, in_time) if in_time >= 1.0 else fits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Work in workers' worth, over the times of ``Rules``."""

    now: float
    """Instant of the last sample."""
    lasting: float
    """The minimum over ``lasting_s``."""
    spare: float
    """The maximum over ``spare_s``; infinite before it was observed for so long."""
    hold: float
    """The maximum over ``hold_s``."""
    queue_grows: bool = False
    """Whether what waits has grown in ``lasting_s``."""


QUEUE_GROWTH = 1.1
"""Growth of a queue in ``lasting_s`` that is no fluctuation."""
Measure = Callable[[Work], float]


class Steadiness:
    """The latest samples of one family's work."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._samples: deque[tuple[float, Work]] = deque()

    def add(self, work: Work, now: float) -> None:
        self._samples.append((now, work))
        keep_s = max(self._rules.lasting_s, self._rules.spare_s, self._rules.hold_s)
        # One older sample stays, so that all of the time is covered.
        while len(self._samples) > 1 and self._samples[1][0] <= now - keep_s:
            self._samples.popleft()

    def clear(self) -> None:
        """The work is unknown for a while: earlier samples no longer count."""
        self._samples.clear()

    def observed(self, measure: Measure, waiting: Measure, now: float) -> Observed | None:
        """None before ``lasting_s`` was observed."""
        lasting = self._since(now - self._rules.lasting_s, measure)
        if not lasting:
            return None
        queue = self._since(now - self._rules.lasting_s, waiting)
        return Observed(
            now=lasting[-1],
            lasting=min(lasting),
            spare=max(self._since(now - self._rules.spare_s, measure), default=math.inf),
            hold=max(self._since(now - self._rules.hold_s, measure), default=math.inf),
            queue_grows=queue[-1] > QUEUE_GROWTH * min(queue),
        )

    def _since(self, start: float, measure: Measure) -> list[float]:
        """All samples from ``start`` on; none unless there is an older one."""
        if not self._samples or self._samples[0][0] > start:
            return []
        return [measure(work) for at, work in self._samples if at >= start]
