"""Orders about KV beside a request's body, and transfer reports beside its response."""

from __future__ import annotations

from functools import reduce
from typing import Any

import msgspec
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from services.worker.engines.port import LegRecord
from shared.contracts.inference import LegKind
from shared.contracts.kv_exchange import KvTransferReport, LegOrder

TRANSFER = "kv_transfer_params"
PARAMS = "baton"
"""Key of Baton's connector in ``kv_transfer_params``: a packed LegOrder in, a packed KvTransferReport out."""
CACHE_THRESHOLD = "cache_threshold"
"""``stop_reason`` of Baton's scheduler for a refused request, and the ``finish_reason`` that its client sees."""
SUMMED = (
    "prompt_tokens",
    "local_tokens",
    "fetched_tokens",
    "recomputed_tokens",
    "refetched_tokens",
    "reprefilled_tokens",
    "preemptions",
)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(KvTransferReport).decode


class NoTokens(list[int]):
    """An empty list that is true: vLLM's server drops a stream's chunk without text and tokens, and with it the finish
    reason.
    """

    def __bool__(self) -> bool:
        return True


def give_order(params: SamplingParams, order: LegOrder) -> None:
    """Send the order with the request to Baton's connector. Replaces whatever a client put there."""
    params.extra_args = {**(params.extra_args or {}), TRANSFER: {PARAMS: _encode(order)}}


def take_transfer_report(record: LegRecord, name: str, output: RequestOutput) -> None:
    """Move the report from the output, so that no client sees it, to the record. One comes with the first token and a
    more complete one at the end.
    """
    packed = (output.kv_transfer_params or {}).get(PARAMS)
    output.kv_transfer_params = None
    if not isinstance(packed, bytes):
        return
    record.transfer_reports[name] = _decode(packed)
    record.transfer_report = reduce(added, record.transfer_reports.values())
    record.cached_tokens = record.transfer_report.local_tokens
    record.received_tokens = record.transfer_report.fetched_tokens
    record.received_bytes = sum(read.bytes for read in record.transfer_report.reads)


def added(one: KvTransferReport, other: KvTransferReport) -> KvTransferReport:
    """The sum of two prompts' reports."""
    sums: dict[str, Any] = {name: getattr(one, name) + getattr(other, name) for name in SUMMED}
    return msgspec.structs.replace(one, **sums, refused=one.refused or other.refused, reads=one.reads + other.reads)


def correct_output(record: LegRecord, output: RequestOutput, block_size: int) -> None:
    """What the client sees: the finish reason of a refused request, and what the prefill worker read from its cache and
    wrote to it.
    """
    for completion in output.outputs:
        if completion.stop_reason == CACHE_THRESHOLD:
            completion.finish_reason, completion.stop_reason = CACHE_THRESHOLD, None
            completion.token_ids = completion.token_ids or NoTokens()
    if record.kind is not LegKind.DECODE or record.order is None:
        return
    if record.transfer_report is not None and record.transfer_report.prefill_cached_tokens >= 0:
        cached = record.transfer_report.prefill_cached_tokens
    elif record.order.take is not None:
        cached = record.prefill_cached_tokens
    else:
        return
    output.num_cached_tokens = cached
    output.num_cache_creation_tokens = max(0, in_full_blocks(output, block_size) - cached)


def without_resumed(record: LegRecord, output: RequestOutput, block_size: int) -> None:
    """Count as cached what the first engine had cached, if that is known; and limit cached and written tokens to the
    client's prompt: resumed tokens are prompt to the engine only.
    """
    found = output.num_cached_tokens or 0 if record.resume_cached_tokens is None else record.resume_cached_tokens
    cached = output.num_cached_tokens = min(found, len(output.prompt_token_ids or ()))
    left = max(0, in_full_blocks(output, block_size) - cached)
    output.num_cache_creation_tokens = min(output.num_cache_creation_tokens or 0, left)


def in_full_blocks(output: RequestOutput, block_size: int) -> int:
    """Tokens of the client's prompt that fill blocks, which is what caches keep."""
    prompt_tokens = len(output.prompt_token_ids or ())
    return prompt_tokens - prompt_tokens % block_size
