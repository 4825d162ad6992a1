"""A request as placement sees it: what its body says of it. ``fields`` reads it."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from shared.contracts.engine_paths import PLACED
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId


class Mode(StrEnum):
    """How a request is served, or asks to be served."""

    AUTO = "auto"
    AGGREGATED = "aggregated"
    DISAGGREGATED = "disaggregated"
    DECODE_FIRST = "decode_first"
    """A decode worker alone, if enough of the prompt is cached for it; else disaggregated."""


class ForcedWorkers(msgspec.Struct, frozen=True, kw_only=True):
    """Workers that the client chose; empty where placement chooses."""

    prefill_worker: WorkerId = WorkerId("")
    decode_worker: WorkerId = WorkerId("")
    """Serves the whole request when it is aggregated."""
    sources: tuple[WorkerId, ...] | None = None
    """The only workers to fetch the prompt's KV from; None: placement chooses."""


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The body's ``baton`` object; None for fields that it leaves out."""

    mode: Mode | None = None
    forced: ForcedWorkers | None = None
    class_name: str | None = None
    priority: int | None = None
    ttft_s: float | None = None
    itl_s: float | None = None
    resumes_max: int | None = None
    prefetch: bool = False
    """Nothing is answered: a worker reads what others have of the prompt's KV, for a request that is to come."""


NO_OPTIONS = RequestOptions()


class Body(msgspec.Struct, kw_only=True):
    """The fields of an OpenAI body that placement depends on. Every field takes any type: the engine validates the body
    and its error message reaches the client. Prompts, and fields of which only the presence matters, stay JSON: as
    objects they would take up to 24 times the memory.
    """

    model: Any = None
    stream: Any = None
    prompt: msgspec.Raw = msgspec.Raw(b"")
    token_ids: msgspec.Raw = msgspec.Raw(b"")
    sampling_params: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    background: Any = None
    previous_response_id: Any = None
    n: Any = None
    best_of: Any = None
    echo: Any = None
    prompt_logprobs: Any = None
    use_beam_search: Any = None
    prompt_embeds: msgspec.Raw = msgspec.Raw(b"")
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"")
    ec_transfer_params: msgspec.Raw = msgspec.Raw(b"")
    features: msgspec.Raw = msgspec.Raw(b"")
    content_parts: msgspec.Raw = msgspec.Raw(b"")
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
    priority: Any = None
    cache_hit_threshold: Any = None
    kv_fetch_min_tokens: Any = None
    baton: msgspec.Raw = msgspec.Raw(b"")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """An invalid or forbidden value of one of Baton's own fields, which engines do not validate."""

    param: str
    message: str
    reason: Reason | None = None
    """None: the value is invalid."""


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A request as placement sees it."""

    path: str
    model: str
    """The primary name of the model, where that is known. Empty: any model."""
    alias: str = ""
    """The name in the request, if it is another one."""
    stream: bool = False
    unsplittable: str = ""
    """Why the request cannot be split into legs; empty when it can."""
    tokens_out: int = 0
    """The limit that the client set on the completion; 0 when none."""
    sequences: int = 1
    """Completions or inputs that an engine computes for it."""
    body: Body | None = None
    """None when the body could not be read."""
    cache_hit_threshold: float | None = None
    kv_fetch_min_tokens: int | None = None
    options: RequestOptions = NO_OPTIONS
    fault: Fault | None = None
    salt: str = ""
    """Written into the body for the engine, so that other tenants cannot use the cached KV; empty: nothing."""
    media_salt: str = ""
    """In the place of ``salt`` where that is empty, for the names that the client gives to its media."""

    def why_not_resumable(self) -> str:
        """Why another worker cannot continue the request's stream, as far as the router can tell; empty when one can.
        The engine may have further reasons, which its worker reports.
        """
        if self.path not in PLACED:
            return f"streams of {self.path} cannot be resumed"
        return self.unsplittable


class Sampling(msgspec.Struct, kw_only=True):
    """The fields of ``sampling_params`` that placement depends on."""

    n: Any = None
    max_tokens: Any = None
    prompt_logprobs: Any = None
    prompt_logprob_token_ids: msgspec.Raw = msgspec.Raw(b"")
    skip_reading_prefix_cache: Any = None
    trace_decode_token_ids: msgspec.Raw = msgspec.Raw(b"")
    extra_args: msgspec.Raw = msgspec.Raw(b"")


class Tool(msgspec.Struct):
    """What is read of a tool."""

    type: Any = None


RawBody = msgspec.defstruct("RawBody", [(name, msgspec.Raw, None) for name in Body.__struct_fields__])
"""All fields of ``Body`` as JSON."""


class Inputs(msgspec.Struct):
    """The fields of the batch endpoints' bodies that may be lists of inputs."""

    input: msgspec.Raw = msgspec.Raw(b"")
    """Embeddings, pooling, classify."""
    data: msgspec.Raw = msgspec.Raw(b"")
    documents: msgspec.Raw = msgspec.Raw(b"")
    """Rerank, score."""
    items: msgspec.Raw = msgspec.Raw(b"")
    queries: msgspec.Raw = msgspec.Raw(b"")
    texts: msgspec.Raw = msgspec.Raw(b"")
    """Cohere's embed, and the next two."""
    images: msgspec.Raw = msgspec.Raw(b"")
    inputs: msgspec.Raw = msgspec.Raw(b"")
    data_1: msgspec.Raw = msgspec.Raw(b"")
    data_2: msgspec.Raw = msgspec.Raw(b"")
    text_1: msgspec.Raw = msgspec.Raw(b"")
    text_2: msgspec.Raw = msgspec.Raw(b"")
