"""What the router must know of a request to place it, and nothing more: one lenient pass over the body."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec

from services.router.placement.slo import PRIORITY_MAX, PRIORITY_MIN, TARGET_S_MAX, TARGET_S_MIN, is_priority, is_target
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId, is_subject_token
from shared.contracts.routing import DEFAULT_MODES, DefaultMode

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
FETCH_MIN_TOKENS_MAX = 1 << 31
SOURCES_MAX = 16
"""Workers that a request may name to fetch its KV from."""
MODEL_CHARS_MAX = 512
"""A longer name is no model's; of what a client makes up, no more is logged, told and counted."""


class Mode(StrEnum):
    """How a request is served, or wants to be."""

    AUTO = "auto"
    AGGREGATED = "aggregated"
    DISAGGREGATED = "disaggregated"
    DECODE_FIRST = "decode_first"
    """A decode worker alone, if enough of the prompt is cached for it; else disaggregated."""


class Forced(msgspec.Struct, frozen=True, kw_only=True):
    """What the client wants and placement would have chosen itself; empty where it has a free hand."""

    prefill_worker: WorkerId = WorkerId("")
    decode_worker: WorkerId = WorkerId("")
    """Serves the whole request when it is aggregated."""
    sources: tuple[WorkerId, ...] | None = None
    """Whom to fetch the prompt's KV from, and nobody else; None: whoever placement finds best."""


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What a body's ``baton`` object says; None where it says nothing."""

    mode: Mode | None = None
    forced: Forced | None = None
    class_name: str | None = None
    priority: int | None = None
    ttft_s: float | None = None
    itl_s: float | None = None
    resumes_max: int | None = None


NO_WISHES = Wishes()


class Body(msgspec.Struct, kw_only=True):
    """The fields of an OpenAI body that placement depends on; all others are skipped, none is judged.

    Whether values are valid is for the engine to say, in its own words; so every field takes any type.
    """

    model: Any = None
    stream: Any = None
    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    max_tokens: Any = None
    max_completion_tokens: Any = None
    n: Any = None
    best_of: Any = None
    echo: Any = None
    prompt_logprobs: Any = None
    use_beam_search: Any = None
    prompt_embeds: msgspec.Raw = msgspec.Raw(b"")
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"")
    cache_salt: Any = None
    prompt_cache_key: Any = None
    add_special_tokens: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    documents: msgspec.Raw = msgspec.Raw(b"")
    reasoning_effort: Any = None
    truncate_prompt_tokens: Any = None
    cache_hit_threshold: Any = None
    kv_fetch_min_tokens: Any = None
    baton: msgspec.Raw = msgspec.Raw(b"")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A field of Baton's own that has no meaning as it was given; no engine would say so."""

    param: str
    message: str
    reason: Reason | None = None
    """Why, when it is not that it has no meaning."""


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A request as placement sees it."""

    path: str
    model: str
    """Empty: whatever is served."""
    stream: bool = False
    whole: str = ""
    """Why the request cannot be split into legs; empty when it can."""
    tokens_out: int = 0
    """The limit that the client set on the completion; 0 when none."""
    body: Body | None = None
    """None when the body could not be read."""
    cache_hit_threshold: float | None = None
    kv_fetch_min_tokens: int | None = None
    wishes: Wishes = NO_WISHES
    fault: Fault | None = None
    salt: str = ""
    """What goes into the body before an engine has it, and keeps its cached KV from others; empty: nothing."""


BODY_DECODER = msgspec.json.Decoder(Body)


def read_request(path: str, body: bytes) -> RequestFacts:
    """Read ``body`` as far as placement needs. Never raises.

    What cannot be read goes whole to an engine, which refuses it in its own words.
    """
    try:
        parsed = BODY_DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return RequestFacts(path=path, model="", whole="the body cannot be read")
    model = parsed.model
    ours = path in (COMPLETIONS, CHAT)
    wishes = read_wishes(parsed.baton) if ours and given(parsed.baton) else NO_WISHES
    fault = wishes if isinstance(wishes, Fault) else find_fault(parsed) if ours else None
    ours = ours and fault is None
    return RequestFacts(
        path=path,
        model=model[:MODEL_CHARS_MAX] if isinstance(model, str) else "",
        stream=parsed.stream is True,
        whole=why_whole(path, parsed),
        tokens_out=_limit(parsed),
        body=parsed,
        cache_hit_threshold=float(parsed.cache_hit_threshold)
        if ours and parsed.cache_hit_threshold is not None
        else None,
        kv_fetch_min_tokens=parsed.kv_fetch_min_tokens if ours else None,
        wishes=NO_WISHES if isinstance(wishes, Fault) else wishes,
        fault=fault,
    )


def mode_of(facts: RequestFacts, request_headers: Mode) -> Mode:
    """How it wants to be served: as the body says, or else the header. Who would rather be refused than have the
    prompt computed gets no prefill leg, which computes it: the worker that answers decides by what it has and can
    fetch.
    """
    asked = facts.wishes.mode or request_headers
    return Mode.AGGREGATED if asked is Mode.AUTO and facts.cache_hit_threshold else asked


def default_or_requested(facts: RequestFacts, request_headers: Mode, usual: Mode) -> Mode:
    """What the header asks for, or else what is usual here. What the body asks for by other means is left to placement:
    workers of its choice, or an answer only if enough is cached.
    """
    free = request_headers is Mode.AUTO and facts.wishes.forced is None and not facts.cache_hit_threshold
    return usual if free else request_headers


def default_mode_of(told: DefaultMode | None) -> Mode:
    """What an operator wants of requests that ask for no mode; AUTO when nobody has said anything that makes sense."""
    return Mode(told.mode) if told is not None and told.mode in DEFAULT_MODES else Mode.AUTO


def find_fault(body: Body) -> Fault | None:
    """What is wrong with the fields that are Baton's own; None when nothing is."""
    share, tokens = body.cache_hit_threshold, body.kv_fetch_min_tokens
    if share is not None and not (type(share) in (int, float) and 0.0 <= share <= 1.0):
        message = "`cache_hit_threshold` must be a number from 0.0 (never refuse) to 1.0; leave it out for the default."
        return Fault(param="cache_hit_threshold", message=message)
    if tokens is not None and not (type(tokens) is int and 0 <= tokens <= FETCH_MIN_TOKENS_MAX):
        message = (
            f"`kv_fetch_min_tokens` must be an integer from 0 to {FETCH_MIN_TOKENS_MAX}; leave it out for the default."
        )
        return Fault(param="kv_fetch_min_tokens", message=message)
    return None


def read_wishes(raw: msgspec.Raw) -> Wishes | Fault:
    """The body's ``baton`` object, or what is wrong with it."""
    try:
        said = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Fault(param="baton", message="`baton` must be an object; leave it out for the defaults.")
    for name, value in said.items():
        rule = WISHES.get(name)
        if rule is None:
            return Fault(param=f"baton.{name}"[:64], message=f"`baton` has only the fields {', '.join(WISHES)}.")
        if value is not None and not rule[0](value):
            return Fault(param=f"baton.{name}", message=f"`baton.{name}` must be {rule[1]}.")
    prefill, decode, sources = said.get("prefill_worker"), said.get("decode_worker"), said.get("sources")
    forced = Forced(
        prefill_worker=WorkerId(prefill or ""),
        decode_worker=WorkerId(decode or ""),
        sources=tuple(sources) if sources is not None else None,
    )
    mode = said.get("mode")
    return Wishes(
        mode=Mode(mode) if mode is not None else None,
        forced=forced if prefill or decode or sources is not None else None,
        class_name=said.get("class"),
        priority=said.get("priority"),
        ttft_s=said.get("ttft_s"),
        itl_s=said.get("itl_s"),
        resumes_max=said.get("resumes_max"),
    )


def why_whole(path: str, body: Body) -> str:
    """Why one engine must serve this request alone; empty when prefill and decode may be on two."""
    if path not in (COMPLETIONS, CHAT):
        return "only completions can be split"
    if body.n not in (None, 1) or body.best_of not in (None, 1) or body.use_beam_search not in (None, False):
        return "several completions share one prompt"
    if body.prompt_logprobs is not None:
        return "prompt logprobs need the whole prompt on one engine"
    if body.echo not in (None, False):
        return "echo needs the prompt on the engine that answers"
    if given(body.prompt_embeds):
        return "the prompt is embeddings"
    if given(body.kv_transfer_params):
        return "the client brings its own KV transfer"
    if path == COMPLETIONS:
        return "" if _is_one_prompt(body.prompt) else "the body holds several prompts"
    return "" if given(body.messages) else "there are no messages"


def given(raw: msgspec.Raw) -> bool:
    """Whether the field is there and not null."""
    return bytes(memoryview(raw)[:5]) not in (b"", b"null")


def _is_one_prompt(raw: msgspec.Raw) -> bool:
    start = bytes(memoryview(raw)[:64]).lstrip()
    if start[:1] == b'"':
        return True
    inside = start[1:].lstrip()[:1]
    return start[:1] == b"[" and inside.isdigit()


def _limit(body: Body) -> int:
    for value in (body.max_completion_tokens, body.max_tokens):
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _is_worker(value: Any) -> bool:
    return isinstance(value, str) and is_subject_token(value)


def _is_sources(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= SOURCES_MAX and all(map(_is_worker, value))


_SECONDS = f"a number of seconds from {TARGET_S_MIN:g} to {TARGET_S_MAX:g}"
WISHES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "mode": (lambda value: isinstance(value, str) and value in list(Mode), f"one of {', '.join(Mode)}"),
    "prefill_worker": (_is_worker, "the id of a worker"),
    "decode_worker": (_is_worker, "the id of a worker"),
    "sources": (_is_sources, f"a list of up to {SOURCES_MAX} ids of workers"),
    "class": (lambda value: isinstance(value, str), "the name of a class"),
    "priority": (is_priority, f"an integer from {PRIORITY_MIN}, the most urgent, to {PRIORITY_MAX}"),
    "ttft_s": (is_target, _SECONDS),
    "itl_s": (is_target, _SECONDS),
    "resumes_max": (lambda value: type(value) is int and value >= 0, "an integer, 0 or more"),
}
"""The fields of a ``baton`` object: whether a value makes sense, and what would."""
