"""An engine with pipeline stages in virtual time, as vLLM runs it: each batch in flight has requests of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

from services.worker.engines.simulated.core.settings import StepTiming
from services.worker.engines.vllm.steps import StepMeter


@dataclass(eq=False)
class Request:
    arrives_s: float
    prompt: int
    output: int
    given_up: bool = False
    """Its client leaves when the first chunk of the prompt is computed."""
    computed: int = 0
    scheduled_s: float = 0.0
    in_flight: int = 0
    token_times: list[float] = field(default_factory=list)


class PipelinedEngine:
    """``run`` serves requests, and tells the meter what vLLM's statistics say of each batch. ``told`` is called then.

    As ``EngineCore.step_with_batch_queue`` does, it schedules batches until as many are in flight as there are stages.
    A request in flight is in no other batch, unless it has further tokens of its prompt to compute.
    """

    def __init__(
        self, timing: StepTiming, stages: int, meter: StepMeter, told: Callable[[], None], *, batch_tokens: int = 2048
    ) -> None:
        self._timing, self._stages, self._meter, self._told = timing, stages, meter, told
        self._batch_tokens = batch_tokens
        self._stage_free_s = [0.0] * stages
        self._in_flight: deque[tuple[float, list[tuple[Request, int]]]] = deque()
        self._running: list[Request] = []
        self.now = 0.0

    def run(self, requests: list[Request]) -> None:
        coming = deque(sorted(requests, key=lambda one: one.arrives_s))
        while coming or self._running:
            while coming and coming[0].arrives_s <= self.now:
                self._running.append(coming.popleft())
            batch = list(self._scheduled()) if len(self._in_flight) < self._stages else []
            if batch:
                self._start(batch)
            elif self._in_flight:
                self._end()
            else:
                self.now = coming[0].arrives_s

    def _scheduled(self) -> Iterator[tuple[Request, int]]:
        budget = self._batch_tokens
        for request in self._running:
            missing = request.prompt - request.computed
            count = min(budget, missing) if missing else int(not request.in_flight)
            if count and budget:
                budget -= count
                yield request, count

    def _start(self, batch: list[tuple[Request, int]]) -> None:
        prompt_tokens = pairs = decoding = context = 0
        for request, count in batch:
            request.in_flight += 1
            request.scheduled_s = request.scheduled_s or self.now
            if request.computed < request.prompt:
                pairs += count * (request.computed + count / 2)
                prompt_tokens += count
                request.computed += count
            else:
                decoding += 1
                context += request.prompt + len(request.token_times)
        stage_s = self._timing.step_s(prompt_tokens, pairs, decoding, context) / self._stages
        at_s = self.now
        for stage, free_s in enumerate(self._stage_free_s):
            at_s = self._stage_free_s[stage] = max(at_s, free_s) + stage_s
        self._in_flight.append((at_s, batch))

    def _end(self) -> None:
        ended_s, batch = self._in_flight.popleft()
        self.now = max(self.now, ended_s)
        outputs, ctx = [], [(one, count) for one, count in batch if not one.token_times]
        for request, _count in batch:
            request.in_flight -= 1
            if request.given_up and request in self._running:
                self._running.remove(request)
            if request.given_up:
                continue
            if request.computed < request.prompt or (not request.token_times and request.in_flight):
                continue
            stats = events = None
            if not request.token_times:
                cached = {"num_local_cached_tokens": 0, "num_external_cached_tokens": 0}
                stats = SimpleNamespace(num_computed_tokens=request.prompt, **cached)
                events = [SimpleNamespace(type=SimpleNamespace(name="SCHEDULED"), timestamp=request.scheduled_s)]
            outputs.append(SimpleNamespace(prefill_stats=stats, events=events))
            request.token_times.append(self.now)
            if len(request.token_times) == request.output:
                self._running.remove(request)
        details = SimpleNamespace(
            num_ctx_requests=len(ctx),
            num_ctx_tokens=sum(count for _one, count in ctx),
            num_generation_requests=len(batch) - len(ctx),
            is_dummy=False,
        )
        tokens = sum(one.computed + len(one.token_times) for one in self._running)
        self._meter.results(outputs, self.now)
        usage = tokens / self._meter.tokens_per_use
        self._meter.step(
            SimpleNamespace(iteration_details=details, kv_cache_usage=usage, num_running_reqs=len(self._running)),
            self.now,
        )
        self._told()
