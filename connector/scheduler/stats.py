"""Counters of an engine's KV exchange, as reported in ``KvLedgerState``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from connector.messages import ReadPart
from shared.contracts.kv_exchange import KvLedgerState, KvTransferReport

if TYPE_CHECKING:
    from connector.holder.holder import Holder


class ExchangeStats:
    """Counts reads and tokens; the holder counts leases."""

    def __init__(self) -> None:
        self._reads = 0
        self._reads_failed = 0
        self._read_bytes = 0
        self._read_seconds = 0.0
        self._refused = 0
        self._recomputed_tokens = 0
        self._reported: KvLedgerState | None = None

    def part(self, part: ReadPart) -> None:
        """Count a part of a read that has ended."""
        self._reads += 1
        if part.failure:
            self._reads_failed += 1
        else:
            self._read_bytes += part.bytes
            self._read_seconds += max(0.0, part.ended_s - part.started_s)

    def request(self, transfer_report: KvTransferReport, block_tokens: int, *, handed_over: bool) -> None:
        """Count an ended request. Tokens that a decode leg computes, beyond a tail of less than a block, were computed
        twice.
        """
        self._refused += transfer_report.refused
        if handed_over:
            tail = transfer_report.prompt_tokens % block_tokens or 1
            self._recomputed_tokens += (
                max(0, transfer_report.recomputed_tokens - tail) + transfer_report.reprefilled_tokens
            )

    def state(self, holder: Holder, *, reads: int) -> KvLedgerState:
        """The counters now; remembered for ``changed``."""
        counts = holder.counts
        self._reported = KvLedgerState(
            leases=counts.leases,
            pinned_blocks=counts.pinned_blocks,
            next_expiry_s=counts.next_expiry_s,
            reads=reads,
            leases_granted_total=counts.granted_total,
            leases_released_total=counts.released_total,
            leases_expired_total=counts.expired_total,
            leases_refused_total=counts.refused_total,
            reads_total=self._reads,
            reads_failed_total=self._reads_failed,
            read_bytes_total=self._read_bytes,
            read_seconds_total=self._read_seconds,
            refused_requests_total=self._refused,
            recomputed_tokens_total=self._recomputed_tokens,
        )
        return self._reported

    def changed(self, holder: Holder, *, reads: int) -> bool:
        """Whether leases changed since the last report, or all reads ended.

        The worker wakes an idle engine when its next lease expires, so it must know that instant.
        """
        reported, now = self._reported, holder.counts
        if reported is None:
            return bool(now.leases)
        return bool(reported.reads and not reads) or (
            (reported.leases, reported.pinned_blocks, reported.next_expiry_s)
            != (now.leases, now.pinned_blocks, now.next_expiry_s)
        )
