"""The engine's load from vLLM's step statistics, the source of each prompt's tokens, and reports of KV transfers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import msgspec
from vllm.v1.metrics.loggers import StatLoggerBase

from connector.scheduler.first_token import BEFORE_STEP
from services.worker.engines.port import EngineLoad, LegResult
from services.worker.engines.vllm.steps import NoIterations, StepMeter
from shared.bounded import Bounded
from shared.contracts.kv_exchange import KvTransferReport

PARAMS = "baton"
"""Key of Baton's connector in ``kv_transfer_params``: a packed LegOrder in, a packed KvTransferReport out."""
SUMMED = (
    "prompt_tokens",
    "local_tokens",
    "fetched_tokens",
    "recomputed_tokens",
    "refetched_tokens",
    "reprefilled_tokens",
    "preemptions",
    "drafted_tokens",
    "accepted_tokens",
)

_decode = msgspec.msgpack.Decoder(KvTransferReport).decode


def take_transfer_report(result: LegResult, request_id: str, output: Any) -> None:
    """Move the report from the engine's output to the leg's result, so that no client sees it. One comes with the first
    token, a more complete one at the end. Parameters of other connectors stay.
    """
    packed = (output.kv_transfer_params or {}).get(PARAMS)
    if not isinstance(packed, bytes):
        return
    output.kv_transfer_params = None
    result.transfer_reports[request_id] = _decode(packed)
    report = result.transfer_report = reduce(added, result.transfer_reports.values())
    result.cached_tokens = report.local_tokens
    result.received_tokens = report.fetched_tokens
    result.received_bytes = sum(read.bytes for read in report.reads)


def added(one: KvTransferReport, other: KvTransferReport) -> KvTransferReport:
    sums: dict[str, Any] = {name: getattr(one, name) + getattr(other, name) for name in SUMMED}
    sums |= {"refused": one.refused or other.refused, "hit_share": (one if one.refused else other).hit_share}
    return msgspec.structs.replace(one, **sums, reads=one.reads + other.reads)


SMOOTHING = 0.2
"""Weight of the newest sample in a moving average."""
SOURCES_MAX = 8192
"""Prompts whose sources were not taken yet; the oldest is dropped."""


@dataclass(frozen=True, slots=True)
class PromptSources:
    """Where a prompt's tokens came from."""

    computed: int = 0
    cached: int = 0
    received: int = 0


class SourceTap:
    """Records the sources of each prompt, and takes its transfer report, before vLLM's output processor gets an output.

    vLLM does not give the sources to its caller. And when the caller is slow, it joins a request's outputs and keeps
    the ``kv_transfer_params`` of the last one only, so that the report that comes with the first token would be lost.
    """

    def __init__(self, steps: StepMeter) -> None:
        self._by_request = Bounded[str, PromptSources](SOURCES_MAX)
        self._results: dict[str, LegResult] = {}
        """Results of legs by the engine's request id."""
        self._computing: set[str] = set()
        """Requests whose prompt has no token yet. vLLM tells the caller of a response that is sent whole nothing before
        its last token.
        """
        self._steps = steps

    def expect(self, request_id: str, result: LegResult) -> None:
        """The engine gets a prompt of this leg; ``forget`` must follow."""
        self._results[request_id] = result
        self._computing.add(request_id)
        result.prompts_computing += 1

    def watching(self, processor: Any) -> Callable[..., Any]:
        """``processor.process_outputs`` with this tap before it."""
        process = processor.process_outputs

        def process_outputs(outputs: list[Any], made_at: float | None = None, *args: Any, **options: Any) -> Any:
            if len(outputs) == 1 and BEFORE_STEP in (outputs[0].kv_transfer_params or ()):
                self._steps.begun(outputs[0])
            else:
                self._steps.results(outputs, made_at or 0.0)
            for output in outputs:
                if output.prefill_stats is None and output.kv_transfer_params is None:
                    continue
                if (state := processor.request_states.get(output.request_id)) is not None:
                    self._note((state.parent_req or state).external_req_id, output)
            return process(outputs, made_at, *args, **options)

        return process_outputs

    def _note(self, request_id: str, output: Any) -> None:
        if (stats := output.prefill_stats) is not None:
            self._computed(request_id)
            self._by_request[request_id] = PromptSources(
                computed=stats.num_computed_tokens,
                cached=stats.num_local_cached_tokens,
                received=stats.num_external_cached_tokens,
            )
        if (result := self._results.get(request_id)) is not None:
            take_transfer_report(result, request_id, output)

    def take(self, request_id: str) -> PromptSources:
        """The sources of a request's prompt, once; zeros if unknown."""
        return self._by_request.pop(request_id, PromptSources())

    def forget(self, request_id: str) -> None:
        """The request has ended. Of a prompt that the engine died with, its leg's result keeps the count."""
        self._computing.discard(request_id)
        self._results.pop(request_id, None)
        self._by_request.pop(request_id, None)

    def _computed(self, request_id: str) -> None:
        if request_id in self._computing:
            self._computing.discard(request_id)
            self._results[request_id].prompts_computing -= 1


class Waiting:
    """A prompt that was accepted and not computed yet."""

    __slots__ = ("_meter", "_tokens")

    def __init__(self, meter: EngineMeter, tokens: int) -> None:
        self._meter, self._tokens = meter, tokens
        meter.waiting_tokens += tokens

    def over(self) -> None:
        """It was computed, or its request has ended. Idempotent."""
        self._meter.waiting_tokens -= self._tokens
        self._tokens = 0


class EngineMeter(StatLoggerBase):
    """Sums vLLM's step statistics; makes an ``EngineLoad`` of them only when asked. Runs on the event loop's thread."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0, *, stages: int = 1) -> None:
        """``stages``: of the engine's pipeline."""
        del vllm_config, engine_index
        self.steps = StepMeter(stages)
        self.sources = SourceTap(self.steps)
        self.waiting_tokens = 0
        self.kv_tokens = 0
        """Capacity of the KV cache."""
        self._queues: Any = None
        """The scheduler's statistics of the last step that had any."""
        self._load = EngineLoad()
        """Totals since the engine's start, and moving averages; the rest is filled in when asked."""
        self._listeners: list[Callable[[], None]] = []
        logging.getLogger("vllm.v1.metrics.loggers").addFilter(NoIterations())

    def on_changed(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def expect(self, prompt: Any, expected_tokens: int, more: int = 0) -> Waiting:
        """A prompt is on its way to the engine, which probably computes ``expected_tokens`` of it; -1: unknown.
        ``more`` resumed tokens are added to the prompt.
        """
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        tokens = len(ids or ()) + more
        return Waiting(self, min(tokens, expected_tokens) if expected_tokens >= 0 else tokens)

    def log_engine_initialized(self) -> None:
        """Nothing to log."""

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """After each step, from vLLM's output loop."""
        del mm_cache_stats, engine_idx
        if scheduler_stats is not None:
            self.steps.step(scheduler_stats, time.monotonic())
            self._queues = scheduler_stats
            if scheduler_stats.kv_connector_stats:
                self._add_transfers(scheduler_stats.kv_connector_stats)
        if iteration_stats is not None:
            self._add_step(iteration_stats)
        for listener in self._listeners:
            listener()

    def load(self) -> EngineLoad:
        queues = {} if self._queues is None else _queues(self._queues, self.kv_tokens)
        counter = self.steps.counter
        return msgspec.structs.replace(
            self._load,
            waiting_tokens=self.waiting_tokens,
            prefill_tokens_per_s=counter.prefill_tokens_per_s,
            steps=self.steps.totals(),
            prompt_steps=counter.prompt_totals(),
            **queues,
        )

    def _add_transfers(self, transfers: Any) -> None:
        """From the NIXL connector's lists of transfers that ended in this step."""
        self._load.received_bytes_total += sum(transfers.get("bytes_transferred", ()))
        self._load.received_seconds_total += sum(transfers.get("transfer_duration", ()))

    def _add_step(self, step: Any) -> None:
        load = self._load
        if step.num_prompt_tokens:
            prompts = step.prompt_token_stats
            load.prompt_tokens_total += prompts.total
            load.computed_tokens_total += prompts.computed
            load.cached_tokens_total += prompts.local_cache_hit
            load.received_tokens_total += prompts.external_kv_transfer
        load.generation_tokens_total += step.num_generation_tokens
        load.preemptions_total += step.num_preempted_reqs
        # VLLM's gaps are those between a request's steps, each of which has several tokens where drafts are accepted.
        later_tokens = step.num_generation_tokens - len(step.time_to_first_tokens_iter)
        if later_tokens > 0 and (gaps := step.inter_token_latencies_iter):
            load.decode_s_per_token = smooth(load.decode_s_per_token, sum(gaps) / later_tokens)


def _queues(stats: Any, kv_tokens: int) -> dict[str, Any]:
    return {
        "running": stats.num_running_reqs,
        "waiting": stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
        "kv_tokens_used": round(stats.kv_cache_usage * kv_tokens),
        "adapters_running": _with_requests(stats.running_lora_adapters),
        "adapters_waiting": _with_requests(stats.waiting_lora_adapters),
    }


def _with_requests(adapters: dict[str, int]) -> list[str]:
    """The engine lists an adapter of any unfinished request under both states, with the number of requests."""
    return [name for name, requests in adapters.items() if requests]


def smooth(average: float, sample: float) -> float:
    """The moving average after ``sample``; the first sample is the average."""
    return sample if average == 0.0 else average + SMOOTHING * (sample - average)
