"""A request's KV use, from the transfer reports of its legs, as ``RequestFinished`` has it; -1: unknown."""

from __future__ import annotations

from dataclasses import dataclass

from services.router.placement.request_fields import Mode
from shared.contracts.ids import WorkerId
from shared.contracts.inference import KV_MOVES_MAX, KvMoved, LegReport
from shared.contracts.kv_exchange import KvRead, KvTransferReport


@dataclass(frozen=True, slots=True, kw_only=True)
class KvNumbers:
    """See the fields of ``RequestFinished``."""

    recomputed_tokens: int = -1
    reprefilled_tokens: int = -1
    readback_tokens: int = -1
    wait_s: float = -1.0
    read_s: float = -1.0


UNKNOWN = KvNumbers()


def kv_numbers(prefill: LegReport | None, answering: LegReport, mode: Mode) -> KvNumbers:
    """Of the prefill leg, if there was one, and of the leg that answered."""
    first, last = prefill.kv if prefill is not None else None, answering.kv
    if first is None and last is None:
        return UNKNOWN
    apart = mode is Mode.DISAGGREGATED
    computing = first if apart else last
    waits_s = [
        wait_s
        for transfer_report in (first, last)
        if transfer_report is not None
        for wait_s in _waited(transfer_report)
    ]
    reads_s = [
        read.read_s
        for transfer_report in (first, last)
        if transfer_report is not None
        for read in transfer_report.reads
        if read.read_at
    ]
    return KvNumbers(
        recomputed_tokens=last.recomputed_tokens if apart and last is not None else -1,
        reprefilled_tokens=last.reprefilled_tokens if last is not None else -1,
        readback_tokens=computing.fetched_tokens if computing is not None else -1,
        wait_s=sum(waits_s) if waits_s else -1.0,
        read_s=sum(reads_s) if reads_s else -1.0,
    )


def cached_tokens(prefill: LegReport | None, answering: LegReport, mode: Mode) -> int:
    """What the worker that computed the prompt had of it; a decode worker may know it when no prefill leg has told."""
    if prefill is not None:
        return prefill.cached_tokens
    if mode is Mode.DISAGGREGATED and answering.kv is not None:
        return answering.kv.prefill_cached_tokens
    return answering.cached_tokens


def kv_moves(prefill: LegReport | None, prefill_id: str, answering: LegReport, answering_id: str) -> list[KvMoved]:
    """What the legs' workers read from others."""
    transfer_reports = ((prefill.kv if prefill is not None else None, prefill_id), (answering.kv, answering_id))
    moves = [
        KvMoved(source_id=read.worker_id, reader_id=WorkerId(reader_id), tokens=read.tokens, bytes=read.bytes)
        for transfer_report, reader_id in transfer_reports
        if transfer_report is not None
        for read in transfer_report.reads
        if read.tokens
    ]
    return moves[:KV_MOVES_MAX]


def _waited(transfer_report: KvTransferReport) -> list[float]:
    """From the first ask to the first grant: one number, or none where nothing was granted. One worker's clock."""
    granted: list[KvRead] = [read for read in transfer_report.reads if read.granted_at]
    if not granted:
        return []
    asked_at = min(read.asked_at for read in transfer_report.reads)
    return [max(0.0, min(read.granted_at for read in granted) - asked_at)]
