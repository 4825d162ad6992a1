"""Where one request's tokens came from, over all its admissions (a preempted request is admitted again)."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.contracts.kv_exchange import KvOffer, KvRead, KvTransferReport


@dataclass(slots=True)
class TokenCounts:
    """Tokens. ``local`` and ``fetched`` are of the admission that is under way."""

    local: int = 0
    fetched: int = 0
    prompt: int = 0
    first_local: int = 0
    first_fetched: int = 0
    recomputed: int = 0
    refetched: int = 0
    reprefilled: int = 0
    preemptions: int = 0
    admitted: bool = False
    """In the admission under way, everything that could be fetched is there."""
    refused: bool = False
    prefill_cached_tokens: int = -1
    reads: list[KvRead] = field(default_factory=list)

    def preempted(self, preemptions: int) -> None:
        """It starts again."""
        self.preemptions = preemptions
        self.admitted = False
        self.local = self.fetched = 0

    def admit(self, tokens: int) -> None:
        """``tokens`` are to be there before the next one is made: what is neither here nor fetched is computed now.

        The last token is always computed, even if its KV is there.
        """
        if self.admitted:
            return
        self.admitted = True
        self.fetched = max(0, min(self.fetched, tokens - 1 - self.local))
        computed = tokens - self.local - self.fetched
        if self.preemptions and self.prompt:
            self.refetched += self.fetched
            self.reprefilled += computed
        else:
            self.prompt, self.first_local, self.first_fetched, self.recomputed = (
                tokens,
                self.local,
                self.fetched,
                computed,
            )

    def transfer_report(self, offer: KvOffer | None) -> KvTransferReport:
        """As it is told."""
        return KvTransferReport(
            prompt_tokens=self.prompt,
            local_tokens=self.first_local,
            fetched_tokens=self.first_fetched,
            recomputed_tokens=self.recomputed,
            refetched_tokens=self.refetched,
            reprefilled_tokens=self.reprefilled,
            preemptions=self.preemptions,
            refused=self.refused,
            prefill_cached_tokens=self.prefill_cached_tokens,
            reads=self.reads,
            offer=offer,
        )
