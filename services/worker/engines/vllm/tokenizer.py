"""The engine's tokenizer, and prompts as the engine gets them: rendered and tokenized by vLLM's own server and
processor, their blocks hashed by vLLM.

The text that its server renders from one chat is bounded. vLLM checks the length of a prompt after its template has
been rendered, and its time limit abandons the thread that renders, which continues. A variable that a template repeats
for each message becomes gigabytes before either helps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextvars import copy_context
from functools import partial
from typing import Any

import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from services.worker.engines.port import CURRENT_LEG, AsgiApp, EnginePrompt, EngineTokens, Leg, LegInput, TokenizerFiles
from services.worker.legs.asgi_call import ask_app
from shared.contracts.kv_events import block_hash64
from shared.contracts.request_body import joined, prompt_chars_max
from shared.contracts.workers import HashScheme


def tokenizer_files(tokenizer: Any, chat_template: str) -> TokenizerFiles:
    """From the engine's tokenizer; ``chat_template`` is the operator's, if there is one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return TokenizerFiles(
            tokenizer_json=b"",
            chat_template="",
            special_tokens={},
            adds_special_tokens=True,
            note=f"{type(tokenizer).__name__} has no tokenizer.json: routers cannot compute its tokens",
        )
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return TokenizerFiles(
        tokenizer_json=backend.to_str().encode(),
        chat_template=chat_template or _own_template(tokenizer.chat_template),
        special_tokens=special,
        adds_special_tokens=True,
    )


def _own_template(template: Any) -> str:
    """A model may have several templates by name."""
    if isinstance(template, dict):
        return str(template.get("default", ""))
    return template or ""


TOKENIZE = "/tokenize"
OK = 200
FIELDS = {
    "/v1/completions": ("model", "prompt", "add_special_tokens"),
    "/v1/chat/completions": (
        "model",
        "messages",
        "add_special_tokens",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "tools",
    ),
}
"""Fields of a request's body that its tokens depend on."""
FIRST_HASH_KNOWN = ("sha256", "sha256_cbor")
"""Algorithms with a known parent of the first block. With others each process draws a random hash for it."""
REFUSAL_CHARS_MAX = 500


async def engine_tokens(
    app: AsgiApp, scheme: HashScheme, path: str, body: bytes, adapters: Mapping[str, LoRARequest]
) -> EngineTokens:
    """Renders and tokenizes exactly like a completion; the engine computes nothing. ``adapters``: by name."""
    try:
        given = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return EngineTokens(refusal=f"the body cannot be read: {error}")
    asked = {name: given[name] for name in FIELDS.get(path, ()) if name in given}
    status, answer = await ask_app(app, TOKENIZE, msgspec.json.encode(asked))
    if status != OK:
        return EngineTokens(refusal=answer.decode(errors="replace")[:REFUSAL_CHARS_MAX])
    if scheme.algorithm not in FIRST_HASH_KNOWN:
        return EngineTokens(refusal=f"hashes of {scheme.algorithm} depend on a random first hash")
    tokens = msgspec.json.decode(answer)["tokens"]
    adapter = adapters.get(str(given.get("model")))
    return EngineTokens(tokens=tokens, hashes=block_hashes(tokens, given.get("cache_salt"), scheme, adapter))


def block_hashes(
    tokens: list[int], salt: str | None, scheme: HashScheme, adapter: LoRARequest | None = None
) -> list[int]:
    """The hashes that the scheduler gives the full blocks of a request with this prompt."""
    if not tokens:
        return []
    hasher = _hasher(scheme)
    request = Request(
        "", tokens, SamplingParams(max_tokens=1), None, cache_salt=salt, lora_request=adapter, block_hasher=hasher
    )
    return [block_hash64(bytes(full)) for full in request.block_hashes]


def hashes_of(request: EngineCoreRequest, scheme: HashScheme) -> list[bytes]:
    """The full hashes that the scheduler gives the full blocks of this request's prompt."""
    scheduled = Request.from_engine_core_request(request, _hasher(scheme))
    return [bytes(full) for full in scheduled.block_hashes]


def _hasher(scheme: HashScheme) -> Callable[[Request], list[Any]]:
    named_by = get_hash_fn_by_name(scheme.algorithm)
    init_none_hash(named_by)
    hasher: Callable[[Request], list[Any]] = get_request_block_hasher(scheme.block_size, named_by)
    return hasher


REQUEST_ID = "render"


def bound_rendering(max_model_len: int) -> None:
    """From now on no template of this process makes more than ``prompt_chars_max``. Call before the first request.

    ``concat`` is how an environment of jinja2 joins the pieces of a template or macro (its ``NativeEnvironment``
    replaces it, too). Transformers makes the environments itself, so it is set for their class.
    """
    bounded = partial(joined, chars_max=prompt_chars_max(max_model_len))
    ImmutableSandboxedEnvironment.concat = staticmethod(bounded)


class VllmRenderer:
    """See ``engines.port.EngineRenderer``. Media are read and processed in vLLM's threads, like those of legs."""

    def __init__(self, app: AsgiApp, scheme: HashScheme) -> None:
        self._app = app
        self._scheme = scheme

    async def render(self, path: str, body: bytes, *, cache_salt: str, media_salt: str) -> EnginePrompt:
        """See the port. The server is called as for a leg, up to the point where it would ask its engine."""
        request: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        given = LegInput(
            request_id=REQUEST_ID, path=path, cache_salt=cache_salt, media_salt=media_salt, rendered=request
        )
        context = copy_context()
        context.run(CURRENT_LEG.set, Leg(given))
        answering = asyncio.create_task(ask_app(self._app, path, body), name="render-prompt", context=context)
        try:
            await asyncio.wait([request, answering], return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                status, answer = answering.result()
                return EnginePrompt(refusal=f"{status}: {answer[:REFUSAL_CHARS_MAX].decode(errors='replace')}")
            return await asyncio.to_thread(prompt_of, request.result(), self._scheme)
        finally:
            request.cancel()
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)


def prompt_of(request: Any, scheme: HashScheme) -> EnginePrompt:
    """``request``: an EngineCoreRequest."""
    if scheme.algorithm not in FIRST_HASH_KNOWN:
        return EnginePrompt(refusal=f"hashes of {scheme.algorithm} depend on a random first hash")
    if request.prompt_token_ids is None:
        return EnginePrompt(refusal="the prompt is not made of tokens")
    positions = [feature.mm_position for feature in request.mm_features or ()]
    return EnginePrompt(
        tokens=len(request.prompt_token_ids),
        hashes=hashes_of(request, scheme),
        media_end=max((one.offset + one.length for one in positions), default=0),
    )
