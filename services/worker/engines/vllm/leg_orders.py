"""Orders about KV beside the request's body, and what comes back beside its answer."""

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
"""Our connector's key in ``kv_transfer_params``: a packed LegOrder in, a packed KvTransferReport out."""
CACHE_THRESHOLD = "cache_threshold"
"""Our scheduler's ``stop_reason`` for a request that it refused, and the ``finish_reason`` that its client sees."""
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
    """No tokens, which are something all the same: vLLM's server drops a stream's chunk with neither text nor tokens,
    and with it the reason why there are none.
    """

    def __bool__(self) -> bool:
        return True


def give_order(params: SamplingParams, order: LegOrder) -> None:
    """With the request to our connector; whatever a client put there is gone."""
    params.extra_args = {**(params.extra_args or {}), TRANSFER: {PARAMS: _encode(order)}}


def take_transfer_report(record: LegRecord, name: str, output: RequestOutput) -> None:
    """From the output that carries it, so that no client sees it. One comes with the prompt's first token and one at
    the end, which knows more.
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
    """Of two prompts together."""
    sums: dict[str, Any] = {name: getattr(one, name) + getattr(other, name) for name in SUMMED}
    return msgspec.structs.replace(one, **sums, refused=one.refused or other.refused, reads=one.reads + other.reads)


def tell_truth(record: LegRecord, output: RequestOutput) -> None:
    """What the client sees of it: why a request was refused, and whose cache its prompt was found in."""
    for completion in output.outputs:
        if completion.stop_reason == CACHE_THRESHOLD:
            completion.finish_reason, completion.stop_reason = CACHE_THRESHOLD, None
            completion.token_ids = completion.token_ids or NoTokens()
    if record.kind is not LegKind.DECODE or record.order is None:
        return
    if record.transfer_report is not None and record.transfer_report.prefill_cached_tokens >= 0:
        output.num_cached_tokens = record.transfer_report.prefill_cached_tokens
    elif record.order.take is not None:
        output.num_cached_tokens = record.prefill_cached_tokens
