"""Reports of Baton's connector about a request, on their way from the engine to the leg's record."""

from __future__ import annotations

from functools import reduce
from typing import Any

import msgspec

from services.worker.engines.port import LegRecord
from shared.contracts.kv_exchange import KvTransferReport

PARAMS = "baton"
"""Key of Baton's connector in ``kv_transfer_params``: a packed LegOrder in, a packed KvTransferReport out."""
SUMMED = (
    "prompt_tokens",
    "local_tokens",
    "fetched_tokens",
    "recomputed_tokens",
    "refetched_tokens",
    "reprefilled_tokens",
    "preemptions",
)

_decode = msgspec.msgpack.Decoder(KvTransferReport).decode


def take_transfer_report(record: LegRecord, request_id: str, output: Any) -> None:
    """Move the report from the engine's output, so that no client sees it, to the record. One comes with the first
    token and a more complete one at the end. Parameters of other connectors stay.
    """
    packed = (output.kv_transfer_params or {}).get(PARAMS)
    if not isinstance(packed, bytes):
        return
    output.kv_transfer_params = None
    record.transfer_reports[request_id] = _decode(packed)
    record.transfer_report = reduce(added, record.transfer_reports.values())
    record.cached_tokens = record.transfer_report.local_tokens
    record.received_tokens = record.transfer_report.fetched_tokens
    record.received_bytes = sum(read.bytes for read in record.transfer_report.reads)


def added(one: KvTransferReport, other: KvTransferReport) -> KvTransferReport:
    """The sum of two prompts' reports."""
    sums: dict[str, Any] = {name: getattr(one, name) + getattr(other, name) for name in SUMMED}
    return msgspec.structs.replace(one, **sums, refused=one.refused or other.refused, reads=one.reads + other.reads)
