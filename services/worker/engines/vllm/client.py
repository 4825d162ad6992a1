"""vLLM's engine client, extended for legs: one token for prefill legs, orders about KV beside a request's body,
transfer reports beside its response, and each leg's result.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from itertools import count
from typing import Any

import msgspec
from vllm.exceptions import QueueOverflowError, VLLMValidationError
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from services.worker.engines.port import CURRENT_LEG, Leg, LegInput, LegResult
from services.worker.engines.vllm.arguments import OWN_CONNECTOR
from services.worker.engines.vllm.grammar_trials import GrammarRefused, GrammarTrials
from services.worker.engines.vllm.resume import FIRST_WEIGHT_VERSION, CatchUp, obstacle, opening
from services.worker.engines.vllm.stats import PARAMS, EngineMeter
from shared.contracts.inference import LegKind
from shared.contracts.kv_exchange import KvTransferReport, LegOrder
from shared.fair_slots import NoTurn

TRANSFER = "kv_transfer_params"
CACHE_THRESHOLD = "cache_threshold"
"""``stop_reason`` of Baton's scheduler for a refused request, and the ``finish_reason`` that its client sees."""

_encode = msgspec.msgpack.Encoder().encode


class NoTokens(list[int]):
    """An empty list that is true: vLLM's server drops a stream's chunk without text and tokens, and with it the finish
    reason.
    """

    def __bool__(self) -> bool:
        return True


def give_order(params: SamplingParams, order: LegOrder) -> None:
    """Send the order with the request to Baton's connector. Replaces whatever a client put there."""
    params.extra_args = {**(params.extra_args or {}), TRANSFER: {PARAMS: _encode(order)}}


def correct_output(leg: LegInput, report: KvTransferReport | None, output: RequestOutput, hash_block_size: int) -> None:
    """What the client sees: the finish reason of a refused request, and what the prefill worker read from its cache and
    wrote to it.
    """
    for completion in output.outputs:
        if completion.stop_reason == CACHE_THRESHOLD:
            completion.finish_reason, completion.stop_reason = CACHE_THRESHOLD, None
            completion.token_ids = completion.token_ids or NoTokens()
    if leg.kind is not LegKind.DECODE or leg.order is None:
        return
    if report is not None and report.prefill_cached_tokens >= 0:
        cached = report.prefill_cached_tokens
    elif leg.order.take is not None:
        cached = leg.prefill_cached_tokens
    else:
        return
    output.num_cached_tokens = cached
    output.num_cache_creation_tokens = max(0, in_full_blocks(output, hash_block_size) - cached)


def without_resumed(leg: LegInput, output: RequestOutput, hash_block_size: int) -> None:
    """Count as cached what the first engine had cached, if that is known; and limit cached and written tokens to the
    client's prompt: resumed tokens are prompt to the engine only.
    """
    found = output.num_cached_tokens or 0 if leg.resume_cached_tokens is None else leg.resume_cached_tokens
    cached = output.num_cached_tokens = min(found, len(output.prompt_token_ids or ()))
    left = max(0, in_full_blocks(output, hash_block_size) - cached)
    output.num_cache_creation_tokens = min(output.num_cache_creation_tokens or 0, left)


def in_full_blocks(output: RequestOutput, hash_block_size: int) -> int:
    """Tokens of the client's prompt that fill blocks, which is what caches keep."""
    prompt_tokens = len(output.prompt_token_ids or ())
    return prompt_tokens - prompt_tokens % hash_block_size


PRIVATE_ARGUMENTS = ("ec_transfer_params", "kv_cache_report_mode")
"""Internal arguments of the engine that no client may set."""


SALT = "cache_salt"
"""Field of vLLM's prompts."""
POOLED = "pooled"
"""Finish reason of a leg that generates nothing, so that its worker does not take the lack of one for a failure."""


class LegEngine(AsyncLLM):
    """Serves the current leg by its kind and fills the leg's result."""

    meter: EngineMeter
    died: asyncio.Future[str]
    token_bytes: int = 0
    """``fingerprint.token_bytes`` of the engine."""
    hash_block_size: int
    """Tokens of each block hash."""
    numbers: count[int]
    traced: bool = False
    thought_end: Sequence[int] = ()
    """Tokens with which the engine ends a thought that has used up its budget."""
    has_exchange: bool = False
    """Whether the engine's connector is Baton's."""
    grammars: GrammarTrials | None = None
    """None in an engine that generates nothing."""
    weight_version: str = FIRST_WEIGHT_VERSION
    """The engine's name of its weights, which its outputs have."""
    catching_up: dict[str, CatchUp | None]
    """Tokens to replay by the engine's request id; None for requests that resume nothing."""

    def attach(self, meter: EngineMeter, token_bytes: int, hash_block_size: int) -> None:
        """Bind to the running event loop. Call once, before the first request."""
        self.meter = meter
        self.token_bytes = token_bytes
        self.hash_block_size = hash_block_size
        self.numbers = count()
        self.catching_up = {}
        self.traced = self.vllm_config.observability_config.otlp_traces_endpoint is not None
        thoughts = self.vllm_config.reasoning_config
        self.thought_end = (thoughts.reasoning_end_token_ids or ()) if thoughts is not None else ()
        self.has_exchange = self.vllm_config.kv_transfer_config.kv_connector == OWN_CONNECTOR
        self.died = asyncio.get_running_loop().create_future()
        self.output_processor.process_outputs = meter.sources.watching(self.output_processor)

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """One sequence of the current leg."""
        current = CURRENT_LEG.get() or Leg(LegInput(request_id=request_id))
        leg, result = current.input, current.result
        prompt = salted(prompt, leg.cache_salt)
        if leg.rendered is not None:
            await self._render(prompt, sampling_params, request_id, leg.rendered, options.get("lora_request"))
            return
        result.cannot_resume = obstacle(prompt, sampling_params, leg, self.model_config, self.thought_end)
        if result.cannot_resume:
            return
        catch_up = None if leg.resume is None else CatchUp(leg.resume, leg.kind, leg.resume_joined, self.weight_version)
        await self._prepare(sampling_params, leg)
        if leg.trace_headers and self.traced:
            options["trace_headers"] = leg.trace_headers
        # Clients choose request ids and may use one twice; a number keeps their results apart.
        request_id = f"{request_id}-{next(self.numbers)}"
        self.catching_up[request_id] = catch_up
        waiting = self.meter.expect(prompt, leg.expected_tokens, more=len(leg.resume or ()))
        outputs = super().generate(prompt, sampling_params, request_id, **options)
        first = True
        result.sequence_began()
        self.meter.sources.expect(request_id, result)
        try:
            async for output in outputs:
                self._correct(current, output)
                if first:
                    first = False
                    waiting.over()
                    self._note_prompt(result, request_id, output)
                    result.usage_cached_tokens = output.num_cached_tokens
                    async for earlier in opening(current, output, sampling_params, catch_up):
                        yield earlier
                    result.caught_up = True
                    if catch_up is not None and catch_up.has_ended:
                        continue
                _note_output(current, output)
                yield output
                await result.shown()
        except EngineDeadError as error:
            self.note_death(str(error))
            raise
        finally:
            result.sequence_ended()
            waiting.over()
            self.catching_up.pop(request_id, None)
            self.meter.sources.forget(request_id)
            await outputs.aclose()

    async def _prepare(self, params: SamplingParams, leg: LegInput) -> None:
        """Raises VLLMValidationError, or QueueOverflowError, for a grammar that the engine must not compile."""
        guard(params, leg.kind)
        if self.grammars is not None and params.structured_outputs is not None:
            try:
                await self.grammars.permit(params.structured_outputs, leg.cache_salt)
            except GrammarRefused as refused:
                raise VLLMValidationError(str(refused), parameter="structured_outputs") from None
            except NoTurn:
                raise QueueOverflowError from None
        if self.has_exchange:
            give_order(params, leg.order or LegOrder())

    async def _render(
        self, prompt: Any, params: SamplingParams, request_id: str, rendered: asyncio.Future[Any], adapter: Any
    ) -> None:
        """Makes the request as vLLM does for its engine, and waits to be cancelled. Raises what vLLM raises."""
        params.structured_outputs = None  # No part of the prompt, but the server would examine it.
        tasks = await self.get_supported_tasks()
        request = self.input_processor.process_inputs(
            request_id, prompt, params, supported_tasks=tasks, lora_request=adapter
        )
        if not rendered.done():
            rendered.set_result(request)
        await asyncio.Event().wait()

    async def encode(
        self, prompt: Any, pooling_params: PoolingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """One input of the current leg, for an endpoint that generates nothing."""
        current = CURRENT_LEG.get() or Leg(LegInput(request_id=request_id))
        result = current.result
        prompt = salted(prompt, current.input.cache_salt)
        result.prompts_computing += 1
        async for output in super().encode(prompt, pooling_params, request_id, **options):
            if output.finished:
                result.prompts_computing -= 1
                result.prompt_tokens += len(output.prompt_token_ids)
                result.cached_tokens += output.num_cached_tokens
                result.finish_reason = result.finish_reason or POOLED
            yield output

    async def _add_request(self, request: Any, prompt: Any, parent_req: Any, index: int, queue: Any) -> None:
        """Overrides the step in which vLLM passes a request to its output processor and then to its engine."""
        catch_up = self.catching_up.get(request.external_req_id)
        if catch_up is None:
            await super()._add_request(request, prompt, parent_req, index, queue)
            return
        self.check_admission(request_id=request.request_id)
        self.output_processor.add_request(request, prompt, parent_req, index, queue)
        if await catch_up.begin(self.output_processor, request, queue):
            await self.engine_core.add_request_async(request)

    def _correct(self, leg: Leg, output: RequestOutput) -> None:
        if self.has_exchange:
            correct_output(leg.input, leg.result.transfer_report, output, self.hash_block_size)
        if leg.input.resume is not None:
            without_resumed(leg.input, output, self.hash_block_size)

    def _note_prompt(self, result: LegResult, request_id: str, output: RequestOutput) -> None:
        sources = self.meter.sources.take(request_id)
        result.prompt_tokens += len(output.prompt_token_ids or ())
        if request_id not in result.transfer_reports:  # A report says the same.
            result.cached_tokens += sources.cached
            result.received_tokens += sources.received
            in_blocks = -(-sources.received // self.hash_block_size) * self.hash_block_size
            result.received_bytes += in_blocks * self.token_bytes
        times = output.metrics
        if times is None or not times.first_token_ts:
            return
        result.first_token_at = result.first_token_at or times.first_token_ts
        result.queue_s = max(result.queue_s, times.scheduled_ts - times.queued_ts)
        result.prefill_s = max(result.prefill_s, times.first_token_ts - times.scheduled_ts)

    def note_death(self, why: str) -> None:
        """The engine cannot go on; the first reason counts."""
        if not self.died.done():
            self.died.set_result(why)


def salted(prompt: Any, salt: str) -> Any:
    """The prompt with its tenant's salt. vLLM takes the salt from most bodies by itself, but those of Cohere's
    embeddings and forms of audio have no field for it.
    """
    if not salt or not isinstance(prompt, dict):
        return prompt
    if "decoder_prompt" in prompt:
        return {**prompt, "decoder_prompt": salted(prompt["decoder_prompt"], salt)}
    return prompt if prompt.get(SALT) else {**prompt, SALT: salt}


def guard(params: SamplingParams, kind: LegKind) -> None:
    """Remove private arguments of the client, and limit a prefill leg to the one token that vLLM must sample.

    The body of a prefill leg is the client's, so that it is checked and rendered exactly as the decode leg's; only the
    sampling differs. A stop string would end the request from outside and lose its KV handoff, and a grammar would be
    compiled for a token that is not used.
    """
    if params.extra_args:
        for name in PRIVATE_ARGUMENTS:
            params.extra_args.pop(name, None)
        order = params.extra_args.get("kv_transfer_params")
        # The worker's order is a dict; one from ``vllm_xargs`` never is.
        if kind is LegKind.AGGREGATED or not isinstance(order, dict):
            params.extra_args.pop("kv_transfer_params", None)
    if kind is LegKind.PREFILL:
        params.max_tokens = 1
        params.min_tokens = 0
        params.stop = []
        params.output_text_buffer_length = 0
        params.structured_outputs = None


def _note_output(leg: Leg, output: RequestOutput) -> None:
    result = leg.result
    for completion in output.outputs:
        result.add_tokens(completion.token_ids, last=output.finished)
        result.finish_reason = completion.finish_reason or result.finish_reason
    if leg.input.kind is LegKind.PREFILL and output.kv_transfer_params:
        result.kv_transfer = msgspec.json.encode(output.kv_transfer_params)
