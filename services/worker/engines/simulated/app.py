"""The simulated engine's server, as clients know vLLM's: plain ASGI, to leave the CPU to the router in benchmarks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import reduce
from typing import Any, Protocol

import msgspec

from services.worker.engines.asgi_answers import Receive, Send, part, respond, start
from services.worker.engines.port import CURRENT_LEG, EngineDead, Leg, LegInput, LegResult, Scope
from services.worker.engines.simulated.core.batch import RequestParams, Sequence, SequenceStats
from services.worker.engines.simulated.jobs import Job, JobMaker, caught_up
from services.worker.engines.simulated.model import SimulatedTokenizer
from services.worker.engines.simulated.requests import ApiError
from services.worker.engines.simulated.responses import (
    EVENT_STREAM,
    UNFINISHED,
    Choice,
    Ending,
    encode,
    made_up_logprob,
    split_chunk,
    usage_of,
)
from shared.contracts.engine_paths import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from shared.contracts.inference import LegKind
from shared.contracts.kv_exchange import KvTransferReport

MakeJob = Callable[[bytes, LegInput], Awaitable[Job]]


class Submitter(Protocol):
    def submit(self, choice: Choice, params: RequestParams) -> Sequence:
        """Start a completion; its tokens arrive in ``choice.inbox``. Raises EngineDead."""

    def abort(self, sequence: Sequence) -> None:
        """Stop generating; does nothing for a sequence that has finished."""


class SimulatedApp:
    """POST /v1/completions, /v1/chat/completions, /v1/responses and /v1/messages, GET /v1/models and /health."""

    def __init__(
        self, engine: Submitter, tokenizer: SimulatedTokenizer, jobs: JobMaker, models: Callable[[], bytes]
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._texts = tokenizer.texts
        self._text_json = {token: encode(text) for token, text in tokenizer.texts.items()}
        self._gets = {"/v1/models": models, "/health": bytes, "/ping": bytes}
        self._posts: dict[str, MakeJob] = {
            COMPLETIONS: jobs.completion,
            CHAT: jobs.chat,
            RESPONSES: jobs.response,
            MESSAGES: jobs.message,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        path, method = scope["path"], scope["method"]
        if method == "POST" and path in self._posts:
            await self._serve(path, await _read_body(receive), send)
        elif method == "GET" and path in self._gets:
            await respond(send, 200, self._gets[path]())
        elif path in self._posts or path in self._gets:
            await respond(send, 405, b'{"detail":"Method Not Allowed"}')
        else:
            await respond(send, 404, b'{"detail":"Not Found"}')

    async def _serve(self, path: str, raw: bytes, send: Send) -> None:
        leg = CURRENT_LEG.get() or Leg(LegInput())
        result = leg.result
        try:
            job = await self._posts[path](raw, leg.input)
            if leg.input.resume is not None:
                job = caught_up(job, result, leg.input.resume, self._tokenizer)
        except ApiError as error:
            await respond(send, error.status, error.anthropic_body if path == MESSAGES else error.body)
            return
        streaming = False
        try:
            for choice in job.choices:
                if not choice.has_ended():
                    choice.sequence = self._engine.submit(choice, job.params)
                    result.prompts_computing += 1
            streaming = job.view.streamed
            await (self._stream(job, result, send) if streaming else self._collect(job, result, send))
        except EngineDead as dead:
            failure = ApiError(str(dead), status=500, kind="InternalServerError")
            await (send(part(b"", more=False)) if streaming else respond(send, failure.status, failure.body))
        finally:
            for choice in job.choices:
                if choice.sequence is not None:
                    self._engine.abort(choice.sequence)

    async def _stream(self, job: Job, result: LegResult, send: Send) -> None:
        await send(start(200, EVENT_STREAM))
        # Called for a resumed stream, too: a response counts its events.
        opening = b"".join(job.responses.opening(choice.index) for choice in job.choices)
        opening += b"".join(self._echo_event(job, choice) for choice in job.choices if job.view.echo)
        if opening and job.leg.resume is None:
            await send(part(opening))
        # Most events contain text only. Such an event is the concatenation of three byte strings.
        plain = job.view.logprobs is None and not job.view.usage_each
        pieces = [split_chunk(job.responses, choice.index) for choice in job.choices] if plain else []
        text_json, open_choices = self._text_json, _open(job)
        result.is_over = not open_choices
        while open_choices:
            events = []
            for choice, token, finish_reason in await job.inbox.take():
                if choice.has_ended():
                    continue  # A stop string ended it.
                if choice.is_at_start():
                    _note_first_token(result, choice)
                    result.transfer_report = _transfer_report(job)
                    result.usage_cached_tokens = _cached(job.leg, result)
                _note_token(result, token)
                if plain and token is not None and not finish_reason and choice.stops is None:
                    choice.token_ids.append(token)
                    before, after = pieces[choice.index]
                    events.append(before + text_json[token] + after)
                    continue
                events.append(self._event(job, result, choice, token, finish_reason))
                if choice.has_ended():
                    open_choices -= 1
                    self._note_end(job, result, choice)
            result.is_over = not open_choices
            if events:
                await send(part(b"".join(events) if len(events) > 1 else events[0]))
                if open_choices:
                    await result.shown()
        done = job.responses.done
        end = job.responses.usage(_usage(job, result)) + done if job.view.usage else done
        await send(part(end, more=False))

    def _event(self, job: Job, result: LegResult, choice: Choice, token: int | None, finish_reason: str) -> bytes:
        """An event with more than text, or b"" while text is held back for a stop string."""
        text = self._add(choice, token, finish_reason)
        if not text and not choice.finish_reason and choice.stops is not None:
            return b""
        logprobs = None
        if job.view.logprobs is not None:
            offset = sum(map(len, choice.shown)) - len(text)
            tokens = [] if token is None else [token]
            logprobs = job.view.logprobs(tokens, [self._texts.get(each, "") for each in tokens], offset)
        ending = Ending(
            finish_reason=choice.finish_reason or None,
            stop_reason=choice.stop_reason,
            logprobs=logprobs,
            usage=_usage(job, result) if job.view.usage_each else None,
        )
        return job.responses.chunk(choice.index, text, ending)

    def _add(self, choice: Choice, token: int | None, finish_reason: str) -> str:
        """Add a token, or with None end the choice; returns the text that may be sent now."""
        return (
            choice.refuse(finish_reason)
            if token is None
            else choice.add(token, self._texts.get(token, ""), finish_reason)
        )

    def _echo_event(self, job: Job, choice: Choice) -> bytes:
        return job.responses.chunk(choice.index, self._tokenizer.decode(choice.prompt), UNFINISHED)

    async def _collect(self, job: Job, result: LegResult, send: Send) -> None:
        open_choices = _open(job)
        while open_choices:
            for choice, token, finish_reason in await job.inbox.take():
                if choice.has_ended():
                    continue
                if choice.is_at_start():
                    _note_first_token(result, choice)
                    result.transfer_report = _transfer_report(job)
                _note_token(result, token)
                self._add(choice, token, finish_reason)
                if choice.has_ended():
                    open_choices -= 1
                    self._note_end(job, result, choice)
        await respond(send, 200, encode(self._whole(job, result)))

    def _whole(self, job: Job, result: LegResult) -> dict[str, Any]:
        texts, logprobs = [], []
        for choice in job.choices:
            tokens, pieces = choice.token_ids, [self._texts.get(token, "") for token in choice.token_ids]
            shown = "".join(choice.shown)
            if job.view.echo:
                tokens = choice.prompt + tokens
                pieces = [self._tokenizer.decode([token]) for token in choice.prompt] + pieces
                shown = self._tokenizer.decode(choice.prompt) + shown
            texts.append(shown)
            logprobs.append(job.view.logprobs(tokens, pieces, 0) if job.view.logprobs else None)
        response = job.responses.whole(job.choices, texts, logprobs, _usage(job, result))
        if job.view.prompt_logprobs:
            for choice, made in zip(job.choices, response["choices"], strict=True):
                made["prompt_logprobs"] = self._prompt_logprobs(choice.prompt)
        return response

    def _prompt_logprobs(self, prompt: list[int]) -> list[dict[str, Any] | None]:
        """None for the first token, as nothing precedes it."""
        return [None] + [
            {str(t): {"logprob": made_up_logprob(t), "rank": 1, "decoded_token": self._tokenizer.decode([t])}}
            for t in prompt[1:]
        ]

    def _note_end(self, job: Job, result: LegResult, choice: Choice) -> None:
        result.finish_reason = choice.finish_reason
        sequence = choice.sequence
        if sequence is not None:
            self._engine.abort(sequence)  # After a stop string the engine would continue.
            result.transfer_report = _transfer_report(job)
            result.received_tokens += sequence.stats.received_tokens
            result.received_bytes += sequence.stats.received_bytes


def _open(job: Job) -> int:
    return sum(not choice.has_ended() for choice in job.choices)


def _note_token(result: LegResult, token: int | None) -> None:
    if token is not None:
        result.token_ids.append(token)
        result.completion_tokens += 1


def _transfer_report(job: Job) -> KvTransferReport | None:
    """The report so far; for several choices, the sum of their reports."""
    sequences = [choice.sequence for choice in job.choices if choice.sequence is not None]
    transfer_reports = [
        sequence.stats.transfer_report for sequence in sequences if sequence.stats.transfer_report is not None
    ]
    return reduce(_sum_of, transfer_reports) if transfer_reports else None


def _sum_of(one: KvTransferReport, other: KvTransferReport) -> KvTransferReport:
    sums = {
        name: getattr(one, name) + getattr(other, name)
        for name in ("prompt_tokens", "local_tokens", "fetched_tokens", "recomputed_tokens", "preemptions", "reads")
    }
    sums |= {"refused": one.refused or other.refused, "hit_share": (one if one.refused else other).hit_share}
    return msgspec.structs.replace(one, **sums)


def _note_first_token(result: LegResult, choice: Choice) -> None:
    if choice.sequence is None:
        return
    stats: SequenceStats = choice.sequence.stats
    result.prompts_computing -= 1
    result.prompt_tokens += len(choice.prompt)
    result.cached_tokens += stats.cached_tokens
    if stats.first_token_at is None:
        return  # refused
    first_token_at = stats.first_token_at
    scheduled_at = first_token_at if stats.scheduled_at is None else stats.scheduled_at
    result.first_token_at = result.first_token_at or first_token_at
    result.queue_s = max(result.queue_s, scheduled_at - stats.arrived_at)
    result.prefill_s = max(result.prefill_s, first_token_at - scheduled_at)


def _usage(job: Job, result: LegResult) -> dict[str, Any]:
    prompts = {id(choice.prompt): len(choice.prompt) for choice in job.choices}
    prompt_tokens = sum(prompts.values())
    resumed = job.leg.resume_cached_tokens
    cached = _cached(job.leg, result) if resumed is None else resumed
    return usage_of(prompt_tokens, result.completion_tokens, min(cached, prompt_tokens))


def _cached(leg: LegInput, result: LegResult) -> int:
    # For a decode leg, usage reports the prefill worker's cached tokens, because this engine received the whole prompt.
    return _cached_before(leg, result) if leg.kind is LegKind.DECODE else result.cached_tokens


def _cached_before(leg: LegInput, result: LegResult) -> int:
    """Cached tokens of the prefill worker: from its notification if this leg streamed its KV, else from the router.
    Where neither reports any, this engine's own: it needed nothing of the prefill worker.
    """
    reported = result.transfer_report.prefill_cached_tokens if result.transfer_report is not None else -1
    if reported >= 0:
        return reported
    followed = leg.order is not None and leg.order.take is None
    return result.cached_tokens if followed else leg.prefill_cached_tokens


async def _read_body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _live(receive: Receive, send: Send) -> None:
    while (await receive())["type"] == "lifespan.startup":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})
