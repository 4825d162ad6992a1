"""Reads the fields of a request body that placement needs, in one lenient pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from services.router.request.facts import (
    NO_OPTIONS,
    Body,
    Fault,
    ForcedWorkers,
    Mode,
    RawBody,
    RequestFacts,
    RequestOptions,
    Sampling,
    Tool,
)
from services.router.request.sequences import GENERATING, batch_size, completions, elements, is_one_input, lax_count
from shared.contracts.engine_paths import (
    CHAT,
    CHAT_BATCH,
    COMPLETIONS,
    GENERATE,
    INVOCATIONS,
    PLACED,
    RESPONSES,
    SERVER_TOOLS,
)
from shared.contracts.ids import WorkerId, is_subject_token
from shared.contracts.request_body import (
    WITHHELD,
    body_fault,
    field_at,
    first_reserved,
    lone_surrogate,
    reserved_in,
    reserved_message,
    withheld_message,
)

TARGET_S_MIN: Final = 0.001
TARGET_S_MAX: Final = 86_400.0
PRIORITY_MIN: Final = -1000
"""The most urgent priority."""
PRIORITY_MAX: Final = 1000
UNSPLITTABLE_PATH: Final = "requests of this path cannot be split"
FETCH_MIN_TOKENS_MAX: Final = 1 << 31
SOURCES_MAX: Final = 16
"""Workers that a request may name to fetch its KV from."""
MODEL_CHARS_MAX: Final = 512
"""Longer names are cut: the name is logged and reported, and a client can make it up."""
VALUE_BYTES_MAX: Final = 4096
"""Size of a field that placement reads, as JSON. A longer value is ``TOO_LONG``."""
VARIABLES_BYTES_MAX: Final = 64 * 1024
"""Size of ``chat_template_kwargs``; a request with more is placed by load alone."""
TOO_LONG: Final = object()
MAY_BE_LONG: Final = frozenset(("cache_salt", "chat_template", "chat_template_kwargs", "prompt_cache_key"))
"""Fields that may be too long. In another one that is a fault: placement cannot know what an engine makes of it."""


_body = msgspec.json.Decoder(Body)
_sampling = msgspec.json.Decoder(Sampling)
_any_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_tools = msgspec.json.Decoder(list[Tool])
_raw_body = msgspec.json.Decoder(RawBody)
RAW_FIELDS: Final = frozenset(field.name for field in msgspec.structs.fields(Body) if field.type is msgspec.Raw)


def read_request(path: str, body: bytes) -> RequestFacts:
    """Never raises: a body that cannot be read goes unsplit to an engine, whose error message reaches the client."""
    if too_costly := body_fault(body):
        refused = Fault(param="", message=f"The body {too_costly}.")
        return RequestFacts(path=path, model="", unsplittable="the body is not read", fault=refused)
    if (at := lone_surrogate(body)) >= 0:
        return RequestFacts(path=path, model="", unsplittable="the body is not read", fault=surrogate_fault(body, at))
    try:
        parsed, long_value = (_body.decode(body), None) if len(body) <= VALUE_BYTES_MAX else _decoded(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # Python's parser accepts more than the standard: an engine could find a priority there.
        hidden = b"priority" in body or b"\\u00" in body
        fault = Fault(param="", message=f"The body is not valid JSON: {error}.") if hidden else None
        return RequestFacts(path=path, model="", unsplittable="the body cannot be read", fault=fault)
    model = parsed.model
    if path == GENERATE:
        parsed, withheld = as_completion(parsed)
        long_value = withheld or long_value
    ours = path in PLACED
    options = read_options(parsed.baton) if ours and given(parsed.baton) else NO_OPTIONS
    unsplittable = unsplittable_reason(path, parsed)
    fault = options if isinstance(options, Fault) else find_fault(parsed) if ours else None
    fault = fault or long_value or priority_fault(parsed.priority)
    if not isinstance(options, Fault) and options.prefetch:
        fault = fault or prefetch_fault(parsed, unsplittable)
    if parsed.chat_template_kwargs is not None and (name := _reserved(parsed.chat_template_kwargs, body)):
        fault = Fault(param="chat_template_kwargs", message=reserved_message(name))
    ours = ours and fault is None
    return RequestFacts(
        path=path,
        model=model[:MODEL_CHARS_MAX] if isinstance(model, str) else "",
        stream=parsed.stream is True,
        unsplittable=unsplittable,
        tokens_out=_limit(parsed),
        sequences=_sequences(path, parsed, body),
        body=parsed,
        cache_hit_threshold=float(parsed.cache_hit_threshold)
        if ours and parsed.cache_hit_threshold is not None
        else None,
        kv_fetch_min_tokens=parsed.kv_fetch_min_tokens if ours else None,
        options=NO_OPTIONS if isinstance(options, Fault) else options,
        fault=fault,
    )


def as_completion(body: Body) -> tuple[Body, Fault | None]:
    """The body of ``GENERATE`` as the completion of one list of token ids, without fields that its engine does not
    know, and a fault if it has one of ``WITHHELD``.
    """
    fault = withheld_fault({name: getattr(body, name) for name in WITHHELD})
    sampling = Sampling()
    reads_itself = False
    if given(body.sampling_params):
        try:
            sampling = _sampling.decode(body.sampling_params)
            if given(sampling.extra_args):
                fault = fault or withheld_fault(_any_fields.decode(sampling.extra_args))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            reads_itself = True  # The engine reports what is wrong.
    # No other engine could do as these ask.
    alone = sampling.skip_reading_prefix_cache or given(sampling.trace_decode_token_ids)
    alone = alone or given(sampling.prompt_logprob_token_ids) or reads_itself
    read = Body(
        model=body.model,
        stream=body.stream,
        prompt=body.token_ids,
        max_tokens=sampling.max_tokens,
        n=sampling.n,
        prompt_logprobs=True if alone else sampling.prompt_logprobs,
        cache_salt=body.cache_salt,
        prompt_cache_key=body.prompt_cache_key,
        priority=body.priority,
        cache_hit_threshold=body.cache_hit_threshold,
        kv_fetch_min_tokens=body.kv_fetch_min_tokens,
        baton=body.baton,
    )
    return read, fault


def withheld_fault(fields: dict[str, msgspec.Raw]) -> Fault | None:
    """The fault of the first of these fields that no client may set."""
    for name, value in fields.items():
        if name in WITHHELD and given(value):
            return Fault(param=name, message=withheld_message(name))
    return None


def surrogate_fault(body: bytes, at: int) -> Fault:
    """The fault of a body with half of a surrogate pair."""
    name = field_at(body, at)[:64]
    where = f"`{name}`" if name else "The body"
    return Fault(
        param=name, message=f"{where} has half of a surrogate pair, which is no character (byte {at} of the body)."
    )


def priority_fault(value: Any) -> Fault | None:
    """The fault of the body's own ``priority``, which engines with a priority scheduler follow."""
    if value is None or type(value) is int:
        return None
    return Fault(param="priority", message="`priority` must be an integer; leave it out for the default.")


def _decoded(body: bytes) -> tuple[Body, Fault | None]:
    """The body without its long values, and a fault when one of them counts. Raises what msgspec raises."""
    raws = msgspec.structs.astuple(_raw_body.decode(body))
    values: dict[str, Any] = {}
    fault = None
    for name, raw in zip(Body.__struct_fields__, raws, strict=True):
        if raw is not None:
            values[name] = value = raw if name in RAW_FIELDS else _value(name, raw)
            if value is TOO_LONG and name not in MAY_BE_LONG:
                fault = Fault(param=name, message=f"`{name}` must be a value of at most {VALUE_BYTES_MAX} bytes.")
    return Body(**values), fault


def _reserved(variables: Any, body: bytes) -> str:
    return reserved_in(body) if variables is TOO_LONG else first_reserved(variables)


def _value(name: str, raw: msgspec.Raw) -> Any:
    if len(memoryview(raw)) > (VARIABLES_BYTES_MAX if name == "chat_template_kwargs" else VALUE_BYTES_MAX):
        return TOO_LONG if name != "model" else _beginning_of_text(raw)
    return msgspec.json.decode(raw)


def _beginning_of_text(raw: msgspec.Raw) -> str:
    cut = bytes(memoryview(raw)[: MODEL_CHARS_MAX + 1])
    return cut[1:].decode(errors="replace") if cut.startswith(b'"') else ""


def find_fault(body: Body) -> Fault | None:
    """The first invalid value of Baton's fields outside ``baton``; None when all are valid."""
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


def read_options(raw: msgspec.Raw) -> RequestOptions | Fault:
    """The body's ``baton`` object, or a fault."""
    try:
        values = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Fault(param="baton", message="`baton` must be an object; leave it out for the defaults.")
    for name, value in values.items():
        rule = OPTION_RULES.get(name)
        if rule is None:
            return Fault(param=f"baton.{name}"[:64], message=f"`baton` has only the fields {', '.join(OPTION_RULES)}.")
        if value is not None and not rule[0](value):
            return Fault(param=f"baton.{name}", message=f"`baton.{name}` must be {rule[1]}.")
    prefill, decode, sources = values.get("prefill_worker"), values.get("decode_worker"), values.get("sources")
    forced = ForcedWorkers(
        prefill_worker=WorkerId(prefill or ""),
        decode_worker=WorkerId(decode or ""),
        sources=tuple(sources) if sources is not None else None,
    )
    mode = values.get("mode")
    return RequestOptions(
        mode=Mode(mode) if mode is not None else None,
        forced=forced if prefill or decode or sources is not None else None,
        class_name=values.get("class"),
        priority=values.get("priority"),
        ttft_s=values.get("ttft_s"),
        itl_s=values.get("itl_s"),
        resumes_max=values.get("resumes_max"),
        prefetch=values.get("prefetch") is True,
    )


def prefetch_fault(body: Body, unsplittable: str) -> Fault | None:
    """The fault of a prefetch that asks for what only an answer has."""
    if body.stream is True:
        return Fault(param="stream", message="A prefetch has no stream: leave out `stream`.")
    if unsplittable:
        return Fault(param="baton.prefetch", message=f"This request cannot be prefetched: {unsplittable}.")
    return None


def unsplittable_reason(path: str, body: Body) -> str:
    """Why one engine must serve both legs; empty when two may."""
    if path not in PLACED:
        return UNSPLITTABLE_PATH
    return unsplittable_response(body) if path == RESPONSES else unsplittable_completion(path, body)


def unsplittable_completion(path: str, body: Body) -> str:
    """As ``unsplittable_reason``, of a completion, a chat or a message."""
    if body.n not in (None, 1) or body.best_of not in (None, 1) or body.use_beam_search not in (None, False):
        return "several completions share one prompt"
    if body.prompt_logprobs is not None:
        return "prompt logprobs need the whole prompt on one engine"
    if body.echo not in (None, False):
        return "echo needs the prompt on the engine that generates"
    if given(body.prompt_embeds):
        return "the prompt is embeddings"
    if given(body.kv_transfer_params):
        return "the client brings its own KV transfer"
    if path in (COMPLETIONS, GENERATE):
        return "" if is_one_input(body.prompt) else "the body holds several prompts"
    return "" if given(body.messages) else "there are no messages"


def unsplittable_response(body: Body) -> str:
    """As ``unsplittable_reason``."""
    if body.background not in (None, False):
        return "the server keeps a response that is made in the background"
    if body.previous_response_id is not None:
        return "the previous response is kept by a server"
    if given(body.tools):
        try:
            tools = _tools.decode(body.tools)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return "its tools cannot be read"
        if any(tool.type in SERVER_TOOLS for tool in tools):
            return "the server runs its tools"
    return "" if given(body.input) else "there is no input"


def given(raw: msgspec.Raw) -> bool:
    """Whether the field is there and not null."""
    return len(raw) > 0 and bytes(memoryview(raw)[:5]) != b"null"


def _sequences(path: str, parsed: Body, body: bytes) -> int:
    if path == CHAT:
        return lax_count(parsed.n)
    if path in (COMPLETIONS, GENERATE):
        return completions(parsed.prompt, parsed.prompt_embeds, parsed.n, parsed.best_of)
    if path == CHAT_BATCH:
        return lax_count(parsed.n) * elements(parsed.messages)
    if path == INVOCATIONS:
        return max(completions(parsed.prompt, parsed.prompt_embeds, parsed.n, parsed.best_of), batch_size(body))
    return 1 if path in GENERATING else batch_size(body)


def _limit(body: Body) -> int:
    for value in (body.max_completion_tokens, body.max_tokens, body.max_output_tokens):
        if type(value) is int and value > 0:
            return value
    return 0


def _is_worker(value: Any) -> bool:
    return isinstance(value, str) and is_subject_token(value)


def _is_sources(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= SOURCES_MAX and all(map(_is_worker, value))


def is_target(value: Any) -> bool:
    """Whether the value is a valid latency target in seconds."""
    return type(value) in (int, float) and TARGET_S_MIN <= value <= TARGET_S_MAX


def is_priority(value: Any) -> bool:
    return type(value) is int and PRIORITY_MIN <= value <= PRIORITY_MAX


_SECONDS: Final = f"a number of seconds from {TARGET_S_MIN:g} to {TARGET_S_MAX:g}"
OPTION_RULES: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "mode": (lambda value: isinstance(value, str) and value in list(Mode), f"one of {', '.join(Mode)}"),
    "prefill_worker": (_is_worker, "the id of a worker"),
    "decode_worker": (_is_worker, "the id of a worker"),
    "sources": (_is_sources, f"a list of up to {SOURCES_MAX} ids of workers"),
    "class": (lambda value: isinstance(value, str), "the name of a class"),
    "priority": (is_priority, f"an integer from {PRIORITY_MIN}, the most urgent, to {PRIORITY_MAX}"),
    "ttft_s": (is_target, _SECONDS),
    "itl_s": (is_target, _SECONDS),
    "resumes_max": (lambda value: type(value) is int and value >= 0, "an integer, 0 or more"),
    "prefetch": (lambda value: type(value) is bool, "true or false"),
}
"""The fields of a ``baton`` object: whether a value is valid, and a description of valid values."""
