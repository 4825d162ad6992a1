"""Where the tokens of one request came from. A preempted request is admitted, and counted, again."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.contracts.kv_exchange import KvOffer, KvRead, KvTransferReport


@dataclass(slots=True)
class TokenCounts:
    """``local`` and ``fetched`` are of the current admission."""

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
    """The current admission is past fetching: its tokens are counted."""
    refused: bool = False
    prefill_cached_tokens: int = -1
    reads: list[KvRead] = field(default_factory=list)

    def preempted(self, preemptions: int) -> None:
        """Begin the next admission."""
        self.preemptions = preemptions
        self.admitted = False
        self.local = self.fetched = 0

    def admit(self, tokens: int) -> None:
        """Count ``tokens``, all that precede the next one: those neither local nor fetched are computed.

        The last token is always computed, even if its KV is cached, because its logits are needed.
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
