"""The answer's first token, handed over with the KV.

vLLM makes a prefill leg sample a token. It goes with the leg's last grant, or with its offer, and the decode engine
begins the answer with it while the last blocks are still on their way. To the decode engine the token is the last one
of a longer prompt, as with a resumed stream.

That is right only if both engines would sample it from the same distribution, and if the decode engine need not count
it as its own output. ``basis_of`` proves the first, ``may_begin`` checks the second; a request that fails either one
samples its first token in the decode engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from vllm.sampling_params import SamplingType
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput

from shared.contracts.kv_exchange import FirstToken, first_token_basis

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.v1.request import Request

BEFORE_STEP = "baton_before_step"
"""Key in ``kv_transfer_params`` of an output that no step of the engine made."""
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "watermarking",
)
"""Parameters on which the choice of the first token depends, and which a prefill leg has as its client sent them."""
STATEFUL = ("structured_outputs", "presence_penalty", "frequency_penalty", "bad_words", "repetition_detection")
"""Parameters for which an engine must know which tokens are its own output."""
UNSUPPORTED = ("logprobs", "prompt_logprobs", "logprob_token_ids", "thinking_token_budget")
"""Parameters that count an engine's own output, as in ``STATEFUL``, or ask for more than the token. 0 has a meaning."""
ORDER_KEY = "kv_transfer_params"

_encode = msgspec.msgpack.Encoder().encode


def first_token_of(request: Request, token: int, hash_block_size: int) -> FirstToken | None:
    """For readers of a prefill leg that sampled this token; None if they cannot know that their prompt is the same."""
    basis = basis_of(request, hash_block_size)
    return None if basis is None or token < 0 else FirstToken(token_id=token, basis=basis)


def basis_of(request: Request, hash_block_size: int) -> bytes | None:
    """Digest of prompt and ``SAMPLING``; None without a full block, or if media are in the tail, which has no hash."""
    params, tokens = request.sampling_params, request.prompt_token_ids
    full = request.num_prompt_tokens // hash_block_size
    tail = full * hash_block_size
    if params is None or tokens is None or request.prompt_embeds is not None or not full:
        return None
    if any(media.mm_position.offset + media.mm_position.length > tail for media in request.mm_features):
        return None
    sampling = _encode([getattr(params, name) for name in SAMPLING])
    return first_token_basis(request.block_hashes[full - 1], tokens[tail:], sampling)


def may_begin(request: Request, token: int, model: ModelConfig) -> bool:
    """Whether the decode engine continues after the token as after one of its own.

    A token that ends the answer is left to the decode engine, which knows how to end it. So is one of a seeded request,
    whose random numbers begin with the first token.
    """
    params = request.sampling_params
    if (
        params is None
        or model.logits_processors
        or request.resumable
        or request.num_preemptions
        or request.num_output_tokens
    ):
        return False
    if params.sampling_type is SamplingType.RANDOM_SEED or any(getattr(params, name) for name in STATEFUL):
        return False
    if any(getattr(params, name) is not None for name in UNSUPPORTED) or set(params.extra_args or ()) - {ORDER_KEY}:
        return False
    is_last = token in params.all_stop_token_ids or token == params.eos_token_id or request.max_tokens <= 1
    return not is_last and 0 <= token < model.get_vocab_size() and request.num_tokens + 1 < model.max_model_len


def begin(request: Request, token: int) -> None:
    """Make the token the last one of the prompt."""
    params = request.sampling_params
    assert params is not None
    assert request.prompt_token_ids is not None
    request.prompt_token_ids.append(token)
    request._all_token_ids.append(token)
    request.num_prompt_tokens += 1
    request.update_block_hashes()
    request.max_tokens = params.max_tokens = request.max_tokens - 1
    params.min_tokens = max(0, params.min_tokens - 1)


def output_of(request: Request, token: int, *, logs_stats: bool) -> EngineCoreOutput:
    """For the front end, which counts from here as from any first token."""
    if logs_stats:
        request.record_event(EngineCoreEventType.SCHEDULED)
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[token],
        events=request.take_events(),
        prefill_stats=request.take_prefill_stats(),
        trace_headers=request.trace_headers,
    )
