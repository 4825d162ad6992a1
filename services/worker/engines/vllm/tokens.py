"""A request's tokens and blocks as vLLM sees them: its own server is asked, its own functions name the blocks."""

from __future__ import annotations

from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from services.worker.engines.port import AsgiApp, EngineTokens
from services.worker.legs.asgi_call import ask_app
from shared.contracts.kv_events import block_hash64

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
"""What of a request's body its tokens depend on."""
FIRST_HASH_KNOWN = ("sha256", "sha256_cbor")
"""With other algorithms each process has a first hash of its own, drawn at random."""
REFUSAL_CHARS_MAX = 500


async def engine_tokens(app: AsgiApp, cache_config: Any, path: str, body: bytes) -> EngineTokens:
    """Renders and tokenizes exactly as a completion would; the engine computes nothing."""
    try:
        given = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return EngineTokens(refusal=f"the body cannot be read: {error}")
    asked = {name: given[name] for name in FIELDS.get(path, ()) if name in given}
    status, answer = await ask_app(app, TOKENIZE, msgspec.json.encode(asked))
    if status != OK:
        return EngineTokens(refusal=answer.decode(errors="replace")[:REFUSAL_CHARS_MAX])
    if cache_config.prefix_caching_hash_algo not in FIRST_HASH_KNOWN:
        return EngineTokens(refusal=f"hashes of {cache_config.prefix_caching_hash_algo} begin with a secret")
    tokens = msgspec.json.decode(answer)["tokens"]
    return EngineTokens(tokens=tokens, hashes=block_names(tokens, given.get("cache_salt"), cache_config))


def block_names(tokens: list[int], salt: str | None, cache_config: Any) -> list[int]:
    """What the scheduler would call the full blocks of a request with this prompt."""
    if not tokens:
        return []
    named_by = get_hash_fn_by_name(cache_config.prefix_caching_hash_algo)
    init_none_hash(named_by)
    hasher = get_request_block_hasher(cache_config.block_size, named_by)
    request = Request("", tokens, SamplingParams(max_tokens=1), None, cache_salt=salt, block_hasher=hasher)
    return [block_hash64(bytes(full)) for full in request.block_hashes]
