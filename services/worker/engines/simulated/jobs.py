"""Turns a request's body into a job: prompt tokens, parameters for the engine core, and the shape of the response.

``engine_tokens`` returns the tokens and block hashes of a body without serving it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from services.worker.engines.port import EnginePrompt, EngineTokens, LegInput, LegResult
from services.worker.engines.simulated.core.batch import NO_ORDER, RequestParams
from services.worker.engines.simulated.core.tokens import BlockHasher
from services.worker.engines.simulated.model import ChatTemplateFailed, SimulatedTokenizer
from services.worker.engines.simulated.requests import (
    ApiError,
    ChatBody,
    CompletionBody,
    ResponseBody,
    SamplingBody,
    chat_of,
    messages_of,
    prompts_of,
    read_chat,
    read_completion,
    read_message,
    read_response,
    stop_strings,
)
from services.worker.engines.simulated.responses import (
    ChatResponses,
    Choice,
    CompletionResponses,
    Ending,
    Inbox,
    MessageObjects,
    ResponseObjects,
    Responses,
    StopStrings,
    chat_logprobs,
    completion_logprobs,
)
from shared.contracts.engine_paths import CHAT, MESSAGES, RESPONSES
from shared.contracts.inference import LegKind
from shared.contracts.kv_events import block_hash64
from shared.contracts.request_body import text_fault
from shared.third_party import LibraryFailed

THREAD_CHARS_MIN = 16_384
"""Longer text is tokenised on a thread, because it would delay the tokens of all other requests."""
CHOICES_MAX = 1024
"""Completions of one request."""

Logprobs = Callable[[list[int], list[str], int], dict[str, Any]]
"""Arguments: tokens, their texts, and the position of the first token in the completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the client wants in the response."""

    streamed: bool
    usage: bool = False
    usage_each: bool = False
    logprobs: Logprobs | None = None
    echo: bool = False
    prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request, ready to run."""

    responses: Responses
    inbox: Inbox
    choices: list[Choice]
    params: RequestParams
    view: View
    leg: LegInput
    tokens_max: int
    """Tokens that may follow the prompt."""


class JobMaker:
    """Reads bodies as vLLM's server does. The public methods raise ApiError."""

    def __init__(
        self,
        tokenizer: SimulatedTokenizer,
        models: list[str],
        max_model_len: int,
        adapters: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        """``adapters``: by name, those that are loaded, as ``RequestParams.adapter``; it may change."""
        self._tokenizer = tokenizer
        self._models = models
        self._adapters = adapters if adapters is not None else {}
        self._max_model_len = max_model_len

    async def completion(self, raw: bytes, leg: LegInput) -> Job:
        body = read_completion(raw)
        model = self._check_model(body.model)
        prompts = [
            await self._encode(prompt, special=body.add_special_tokens) if isinstance(prompt, str) else list(prompt)
            for prompt in prompts_of(body.prompt or "")
        ]
        logprobs = None
        if body.logprobs is not None:
            also, as_ids = body.logprob_token_ids or (), bool(body.return_tokens_as_token_ids)
            logprobs = partial(completion_logprobs, top=body.logprobs, also=also, as_ids=as_ids)
        view = View(
            echo=bool(body.echo),
            logprobs=logprobs,
            prompt_logprobs=body.prompt_logprobs is not None,
            **_streaming(body),
        )
        return self._job(body, prompts, CompletionResponses(model, leg.request_id), view, leg)

    async def chat(self, raw: bytes, leg: LegInput) -> Job:
        body = read_chat(raw)
        model = self._check_model(body.model)
        variables = {"tools": body.tools, "add_generation_prompt": body.add_generation_prompt}
        text = self._rendered(body.messages, variables | (body.chat_template_kwargs or {}), "messages")
        prompt = await self._encode(text, special=body.add_special_tokens)
        logprobs = partial(chat_logprobs, top=body.top_logprobs or 0) if body.logprobs else None
        view = View(logprobs=logprobs, prompt_logprobs=body.prompt_logprobs is not None, **_streaming(body))
        return self._job(body, [prompt], ChatResponses(model, leg.request_id), view, leg)

    async def response(self, raw: bytes, leg: LegInput) -> Job:
        body = read_response(raw)
        model = self._check_model(body.model)
        variables = {"tools": body.tools, "add_generation_prompt": True}
        prompt = await self._encode(self._rendered(messages_of(body), variables, "input"), special=False)
        # Events have numbers, and the last one has the usage: none is a copy of the one before.
        view = View(streamed=bool(body.stream), usage_each=True)
        return self._job(body, [prompt], ResponseObjects(model, leg.answer_id, body.instructions), view, leg)

    async def message(self, raw: bytes, leg: LegInput) -> Job:
        body = read_message(raw)
        model = self._check_model(body.model)
        variables = {"tools": body.tools, "add_generation_prompt": True}
        prompt = await self._encode(self._rendered(chat_of(body), variables, "messages"), special=False)
        view = View(streamed=bool(body.stream), usage=True)
        return self._job(body, [prompt], MessageObjects(model, leg.answer_id, len(prompt)), view, leg)

    def _rendered(self, messages: list[dict[str, Any]], variables: dict[str, Any], param: str) -> str:
        try:
            return self._tokenizer.render_chat(messages, variables)
        except ChatTemplateFailed as error:
            raise ApiError(str(error), param=param) from error

    def _check_model(self, model: str | None) -> str:
        if model is None:
            return self._models[0]
        if model not in self._models and model not in self._adapters:
            raise ApiError(f"The model `{model}` does not exist.", status=404, kind="NotFoundError", param="model")
        return model

    async def _encode(self, text: str, *, special: bool) -> list[int]:
        if fault := text_fault(text, self._max_model_len):
            raise ApiError(f"The text {fault}.", param="input_text")
        try:
            if len(text) < THREAD_CHARS_MIN:
                return self._tokenizer.encode(text, special=special)
            return await asyncio.to_thread(self._tokenizer.encode, text, special=special)
        except LibraryFailed as failed:
            raise ApiError(f"The tokenizer cannot read this text: {failed}", param="input_text") from failed

    def _job(
        self, body: SamplingBody, prompts: list[list[int]], responses: Responses, view: View, leg: LegInput
    ) -> Job:
        tokens_max = min(self._tokens_max(prompt) for prompt in prompts)
        stops, inbox = stop_strings(body), Inbox()
        params = self._params(body, tokens_max, leg)
        count = body.n or 1
        if count * len(prompts) > CHOICES_MAX:
            raise ApiError(f"n times the number of prompts must be at most {CHOICES_MAX}.", param="n")
        if leg.kind is LegKind.PREFILL:
            # The body is the client's, so that both legs render the same prompt. A prefill leg generates one token,
            # which is discarded; stop strings, several choices and response options do not apply to it.
            stops, count, view = [], 1, View(streamed=False)
        choices = [
            Choice(index=index, prompt=prompts[index // count], inbox=inbox, stops=_scanner(stops, body))
            for index in range(count * len(prompts))
        ]
        return Job(
            responses=responses, inbox=inbox, choices=choices, params=params, view=view, leg=leg, tokens_max=tokens_max
        )

    def _tokens_max(self, prompt: list[int]) -> int:
        """Tokens that may follow the prompt. Raises ApiError for a prompt that cannot be served."""
        if not prompt:
            raise ApiError("The decoder prompt cannot be empty", param="prompt")
        if max(prompt) >= self._tokenizer.model.size or min(prompt) < 0:
            raise ApiError(f"Token id {max(prompt)} is out of vocabulary", param="prompt")
        tokens_max = self._max_model_len - len(prompt)
        if tokens_max < 1:
            raise ApiError(
                f"This model's maximum context length is {self._max_model_len} tokens. However, your request has "
                f"{len(prompt)} input tokens. Please reduce the length of the input messages.",
                param="input_tokens",
            )
        return tokens_max

    def _params(self, body: SamplingBody, tokens_max: int, leg: LegInput) -> RequestParams:
        order = leg.order or NO_ORDER
        salt, adapter = body.cache_salt or "", self._adapters.get(body.model or "")
        if leg.kind is LegKind.PREFILL:
            return RequestParams(
                max_tokens=1,
                min_tokens=body.min_tokens or 0,
                ignore_eos=body.ignore_eos,
                order=order,
                cache_salt=salt,
                adapter=adapter,
                expected_tokens=leg.expected_tokens,
            )
        asked = body.max_tokens
        if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
            asked = body.max_completion_tokens
        if isinstance(body, ResponseBody):
            asked = body.max_output_tokens
        return RequestParams(
            max_tokens=tokens_max if asked is None else min(asked, tokens_max),
            min_tokens=body.min_tokens or 0,
            ignore_eos=body.ignore_eos,
            stop_token_ids=frozenset(body.stop_token_ids or ()),
            order=order,
            cache_salt=salt,
            adapter=adapter,
            expected_tokens=leg.expected_tokens,
        )


def _scanner(stops: list[str], body: SamplingBody) -> StopStrings | None:
    return StopStrings(stops, include=body.include_stop_str_in_output) if stops else None


def _streaming(body: CompletionBody | ChatBody) -> dict[str, bool]:
    options = body.stream_options
    return {
        "streamed": bool(body.stream),
        "usage": bool(options and options.include_usage),
        "usage_each": bool(options and options.include_usage and options.continuous_usage_stats),
    }


class SimulatedRenderer:
    def __init__(self, jobs: JobMaker, tokenizer: SimulatedTokenizer, block_size: int) -> None:
        self._jobs = jobs
        self._tokenizer = tokenizer
        self._block_size = block_size

    async def render(self, path: str, body: bytes, *, cache_salt: str, media_salt: str) -> EnginePrompt:
        """See the port. ``body`` has the salt."""
        del cache_salt, media_salt
        try:
            tokens, hashes = await _read(self._jobs, self._tokenizer, self._block_size, path, body)
        except ApiError as error:
            return EnginePrompt(refusal=str(error))
        return EnginePrompt(tokens=len(tokens), hashes=hashes)


async def engine_tokens(
    jobs: JobMaker, tokenizer: SimulatedTokenizer, block_size: int, path: str, body: bytes
) -> EngineTokens:
    """Tokens and block hashes, computed by the code that serves requests."""
    try:
        tokens, hashes = await _read(jobs, tokenizer, block_size, path, body)
    except ApiError as error:
        return EngineTokens(refusal=str(error))
    return EngineTokens(tokens=tokens, hashes=[block_hash64(full) for full in hashes])


async def _read(
    jobs: JobMaker, tokenizer: SimulatedTokenizer, block_size: int, path: str, body: bytes
) -> tuple[list[int], list[bytes]]:
    """Tokens and full hashes. Raises ApiError."""
    make = {CHAT: jobs.chat, RESPONSES: jobs.response, MESSAGES: jobs.message}.get(path, jobs.completion)
    job = await make(body, LegInput())
    tokens, hashes = job.choices[0].prompt, list[bytes]()
    BlockHasher(block_size, tokenizer.model.size).extend(hashes, tokens, job.params.cache_salt, job.params.adapter)
    return tokens, hashes


def caught_up(job: Job, result: LegResult, tokens: list[int], tokenizer: SimulatedTokenizer) -> Job:
    """The job in its state after ``tokens``: held-back text, offsets, counts, and its end if they contain it. Raises
    ApiError for tokens outside the vocabulary, or for more than fit into the context.
    """
    choice = job.choices[0]
    if any(token >= tokenizer.model.size for token in tokens):
        raise ApiError("The tokens to resume from are out of vocabulary")
    result.caught_up = True
    choice.resumed = len(tokens)
    if job.leg.kind is LegKind.PREFILL:
        if len(tokens) >= job.tokens_max:
            raise ApiError("The completion already fills the model's context")
        choice.token_ids = list(tokens)
        return job
    _replay(job, tokens, tokenizer)
    result.completion_tokens += len(choice.token_ids)
    if choice.has_ended():
        result.prompt_tokens += len(choice.prompt)
        result.finish_reason = choice.finish_reason
        return job
    params = replace(
        job.params,
        max_tokens=job.params.max_tokens - len(tokens),
        min_tokens=max(0, job.params.min_tokens - len(tokens)),
    )
    return replace(job, params=params)


def _replay(job: Job, tokens: list[int], tokenizer: SimulatedTokenizer) -> None:
    """Up to the end of the completion, if the tokens contain it."""
    choice = job.choices[0]
    for token in tokens:
        if choice.has_ended():
            break
        reason = job.params.ending(token, len(choice.token_ids) + 1, tokenizer.model.eos)
        text = choice.add(token, tokenizer.texts.get(token, ""), reason)
        if text or choice.finish_reason or choice.stops is None:
            ending = Ending(finish_reason=choice.finish_reason or None, stop_reason=choice.stop_reason)
            job.responses.chunk(choice.index, text, ending)
