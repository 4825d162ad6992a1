"""Resuming an answer on vLLM. vLLM's output processor gets the earlier tokens one by one, as if this engine had
generated them, and the server gets their output first. So all state about the answer (half a character, text held back
for a stop string, a parser's place in a tool call, offsets, counts) is restored; the worker drops that output. Then the
engine, for which these tokens are part of the prompt, generates its own. Both legs of a resumed stream draw the same
ids for the answer and its parts.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from copy import copy
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import numpy as np
import vllm.utils
from vllm.config import ModelConfig
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists

from services.worker.engines.port import CURRENT_LEG, Leg, LegInput
from services.worker.legs.body import COMPLETION_PATHS
from shared.contracts.inference import LegKind

SEED_STEP = 0x9E3779B97F4A7C15
"""Odd and without a pattern, so that the seeds of one request's legs are unrelated."""
SEED_MASK = (1 << 63) - 1
FIRST_WEIGHT_VERSION = "default"
"""vLLM's name of the weights that an engine has loaded at its start."""
TOKENS_PER_TURN_MAX = 64
"""Tokens replayed before other tasks of the event loop may run."""
TOKEN_PROMPTS = ("token", "multimodal")
STATEFUL = ("structured_outputs", "presence_penalty", "frequency_penalty", "bad_words", "repetition_detection")
"""Parameters whose state depends on the engine's own output and would be lost."""


def obstacle(
    prompt: Any, params: SamplingParams, leg: LegInput, model: ModelConfig, thought_end: Sequence[int] = ()
) -> str:
    """Why the request cannot resume; empty if it can, or has nothing to resume. ``thought_end``: the tokens with which
    the engine ends a thought that has used up its budget.
    """
    if (tokens := leg.resume) is None:
        return ""
    if not isinstance(prompt, dict) or prompt.get("type") not in TOKEN_PROMPTS:
        return "its prompt is not made of tokens"
    if tokens and max(tokens) >= model.get_vocab_size():
        return "its tokens are not in the vocabulary"
    if len(prompt["prompt_token_ids"]) + len(tokens) > model.max_model_len:
        return "its tokens do not fit the model's context"
    if params.n != 1:
        return "it has several completions"
    if leg.kind is not LegKind.PREFILL and params.output_kind is not RequestOutputKind.DELTA:
        return "it is no stream"
    # The engine counts a thought in the prompt, but begins the end that it forces anew.
    if params.thinking_token_budget is not None and _ends_within(tokens, thought_end):
        return "it broke off within the end of a thought"
    names = [name for name in STATEFUL if getattr(params, name)]
    return f"the state of {', '.join(names)} is lost" if names else ""


def _ends_within(tokens: list[int], mark: Sequence[int]) -> bool:
    """Whether the tokens end with a part of ``mark`` whose rest is missing."""
    return any(tokens[-size:] == [*mark[:size]] for size in range(1, len(mark)))


class CatchUp:
    """Replays ``tokens`` of one request's answer. The server gets those in ``joined`` together with the token before,
    as the first engine's server did: some parsers emit one item per call, and the rest with the next token.
    """

    def __init__(
        self,
        tokens: list[int],
        kind: LegKind,
        joined: frozenset[int] = frozenset(),
        weight_version: str = FIRST_WEIGHT_VERSION,
    ) -> None:
        """``weight_version``: that of the engine, to which it counts also the earlier tokens."""
        self.tokens = tokens
        self.weight_version = weight_version
        self.joined = joined
        self.outputs: list[RequestOutput] = []
        """Outputs for the server before the engine's own."""
        self.has_ended = False
        """The answer was complete, so the engine has nothing to do."""
        self._is_prefill = kind is LegKind.PREFILL

    async def begin(
        self, processor: OutputProcessor, request: EngineCoreRequest, queue: RequestOutputCollector
    ) -> bool:
        """``processor`` has just got ``request`` as its client sent it. Changes it to what the engine has to do;
        returns False if there is nothing to do.
        """
        params, said = request.sampling_params, len(self.tokens)
        request_tokens = [*(request.prompt_token_ids or ()), *self.tokens]
        if params is None or params.max_tokens is None:
            raise AssertionError("vLLM has not prepared the request")
        if not self._is_prefill:
            await self._replay(processor, request.request_id, params, queue)
            params.max_tokens -= said
            params.min_tokens = max(0, params.min_tokens - said)
            if params.seed is not None and said:
                params.seed = (params.seed + said * SEED_STEP) & SEED_MASK
        request.prompt_token_ids = request_tokens
        return not self.has_ended

    async def _replay(
        self, processor: OutputProcessor, name: str, params: SamplingParams, queue: RequestOutputCollector
    ) -> None:
        try:
            for count, token in enumerate(self.tokens, start=1):
                if count % TOKENS_PER_TURN_MAX == 0:
                    await asyncio.sleep(0)
                _process(processor, _output(name, token, count, params), self.weight_version)
                ended = name not in processor.request_states
                if count in self.joined and count < len(self.tokens) and not ended:
                    continue  # The queue joins the next output with this one.
                output = queue.get_nowait()
                if isinstance(output, RequestOutput):
                    self.outputs.append(output)
                if ended:
                    self.has_ended = True
                    queue.put(self.outputs[-1])
                    return
        except BaseException:
            processor.abort_requests([name], internal=True)
            raise
        # The engine's first output still carries the prompt's data.
        processor.request_states[name].is_prefilling = True


def _process(processor: OutputProcessor, output: EngineCoreOutput, weight_version: str) -> None:
    """Bypasses the wrapper that measures outputs, and tracing: no engine step made this output."""
    traced, processor.tracing_enabled = processor.tracing_enabled, False
    try:
        OutputProcessor.process_outputs(processor, [output], weight_version=weight_version)
    finally:
        processor.tracing_enabled = traced


def _output(name: str, token: int, count: int, params: SamplingParams) -> EngineCoreOutput:
    """The engine's output for the ``count``-th token. Its logprob is unknown, and the worker drops it."""
    logprobs = None
    if params.num_logprobs is not None:
        logprobs = LogprobsLists(np.array([[token]]), np.zeros((1, 1)), np.ones(1, dtype=int))
    reason, why = _ending(token, count, params)
    return EngineCoreOutput(name, [token], new_logprobs=logprobs, finish_reason=reason, stop_reason=why)


def _ending(token: int, count: int, params: SamplingParams) -> tuple[FinishReason | None, int | None]:
    """As vLLM's scheduler decides it; ``max_tokens`` includes the limit of the context."""
    if token == params.eos_token_id:
        return FinishReason.STOP, None
    if token in (params.stop_token_ids or ()):
        return FinishReason.STOP, token
    return (FinishReason.LENGTH if params.max_tokens is not None and count >= params.max_tokens else None), None


async def opening(
    leg: Leg, output: RequestOutput, params: SamplingParams, catch_up: CatchUp | None
) -> AsyncGenerator[RequestOutput, None]:
    """Outputs for the server before the engine's first.

    A chat's stream opens with the role: it gets an output without tokens for that. Otherwise the role would be sent
    with the first token's id but ahead of its text, and a leg that resumes after that id would lose the text. Messages
    and responses need none: see ``AsgiCall``.
    """
    said = catch_up.outputs if catch_up is not None else []
    if said:
        leg.result.completion_tokens += sum(len(one.token_ids) for earlier in said for one in earlier.outputs)
        leg.result.finish_reason = said[-1].outputs[0].finish_reason or ""
    if leg.input.path in COMPLETION_PATHS and params.output_kind is RequestOutputKind.DELTA and params.n == 1:
        bare = copy(output)
        bare.outputs, bare.finished = [], False
        said = [bare, *said]
    for number, earlier in enumerate(said, start=1):
        earlier.num_cached_tokens = output.num_cached_tokens  # The server takes them from its first output.
        earlier.num_cache_creation_tokens = output.num_cache_creation_tokens
        if number % TOKENS_PER_TURN_MAX == 0:
            await asyncio.sleep(0)
        yield earlier


def derive_ids() -> None:
    """From now on the ids of ``vllm.utils.random_uuid`` follow from the current leg's ``answer_id``, if it has one.

    The modules of vLLM's server have imported that function by name, so that what it calls is replaced: nothing else in
    its module uses ``uuid``.
    """
    vllm.utils.uuid = SimpleNamespace(uuid4=_drawn)


def _drawn() -> UUID:
    leg = CURRENT_LEG.get()
    return leg.draw_id() if leg is not None and leg.input.answer_id else uuid.uuid4()
