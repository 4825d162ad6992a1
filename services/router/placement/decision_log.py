"""The newest placements of this router, why they were made and what came of them: bounded, and told when asked.

A placement is remembered by references, for a few microseconds; the record that people and programs read is made when
somebody asks for it, which hardly ever happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

import msgspec

from services.router.placement.regret import regret_s
from shared.contracts.decisions import Candidate, Decision, TtftParts
from shared.contracts.ids import DecisionId, RequestId, RouterId, is_subject_token
from shared.contracts.kv_exchange import KvSource

BASE_BYTES = 2500
"""About what one placement holds, apart from its candidates."""
CANDIDATE_BYTES = 350
"""About what it holds for each worker that it shows."""
CANDIDATES_SHOWN_MAX = 24
"""A placement keeps the best few for each part."""
LISTED_MAX = 100
"""Decisions in one list."""
SEPARATOR = "-d"
"""Between the router and the number in the id of a decision."""
UNKNOWN = -1.0


class Considered(Protocol):
    """What a placement weighed, kept as it was then."""

    @property
    def count(self) -> int:
        """Workers that could have been chosen."""

    def candidates(self) -> list[Candidate]:
        """The best of them, the chosen ones included; made when asked for."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided."""

    mode: str
    """Empty: nobody could serve it."""
    reason: str
    prefill_worker: str = ""
    decode_worker: str = ""
    sources: tuple[KvSource, ...] = ()
    predicted: TtftParts = TtftParts()
    predicted_itl_s: float = UNKNOWN
    cached_tokens: int = -1
    considered: Considered | None = None


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    request_id: RequestId
    model: str
    at_unix_s: float
    attempt: int = 1
    prompt_tokens: int = 0
    exact: bool = False
    tenant: str = ""
    priority: int = 0
    ttft_target_s: float = UNKNOWN
    itl_target_s: float = UNKNOWN


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    outcome: str
    """``ok``, or the reason that ended it."""
    measured: TtftParts | None = None
    ttft_s: float = UNKNOWN
    itl_s: float = UNKNOWN
    cached_tokens: int = -1


RUNNING = Outcome(outcome="")


class Entry:
    """One placement in the log."""

    __slots__ = ("asked", "bytes", "choice", "decision_id", "earlier", "outcome")

    def __init__(self, decision_id: DecisionId, asked: Asked, choice: Choice, earlier: DecisionId) -> None:
        self.decision_id = decision_id
        self.earlier = earlier
        self.asked = asked
        self.choice = choice
        self.outcome = RUNNING
        shown = min(choice.considered.count, CANDIDATES_SHOWN_MAX) if choice.considered is not None else 0
        self.bytes = BASE_BYTES + shown * CANDIDATE_BYTES


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which decisions somebody wants to see; empty and negative: all."""

    tenant: str | None = None
    """None: of all."""
    request_id: str = ""
    worker_id: str = ""
    outcome: str = ""
    ttft_s_min: float = UNKNOWN
    """Slower than this, or still running for want of a first token."""
    missed: bool = False
    """Only those that missed a target."""
    limit: int = 20

    def fits(self, entry: Entry) -> bool:
        """Whether that is one of them."""
        asked, choice, outcome = entry.asked, entry.choice, entry.outcome
        return (
            (self.tenant is None or asked.tenant == self.tenant)
            and (not self.request_id or asked.request_id == self.request_id)
            and (not self.worker_id or self.worker_id in (choice.prefill_worker, choice.decode_worker))
            and (not self.outcome or outcome.outcome == self.outcome)
            and outcome.ttft_s >= self.ttft_s_min
            and (not self.missed or missed_target(asked, outcome))
        )


class DecisionLog:
    """At most ``count_max`` decisions of about ``bytes_max`` bytes together; the oldest are forgotten first."""

    def __init__(self, router_id: RouterId, *, count_max: int, bytes_max: int) -> None:
        self._router_id = router_id
        self._prefix = f"{router_id}{SEPARATOR}"
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._entries: deque[Entry] = deque()
        self._made = 0
        self.bytes_held = 0

    def __len__(self) -> int:
        return len(self._entries)

    def made(self, asked: Asked, choice: Choice, earlier: Entry | None = None) -> Entry:
        """A placement, after an ``earlier`` one that failed; what becomes of it is written into the entry."""
        self._made += 1
        before = earlier.decision_id if earlier is not None else DecisionId("")
        entry = Entry(DecisionId(f"{self._prefix}{self._made}"), asked, choice, before)
        self._entries.append(entry)
        self.bytes_held += entry.bytes
        while self.bytes_held > self._bytes_max or len(self._entries) > self._count_max:
            self.bytes_held -= self._entries.popleft().bytes
        return entry

    def find(self, decision_id: str) -> Decision | None:
        """None: never made here, or forgotten since."""
        number = decision_id.removeprefix(self._prefix) if decision_id.startswith(self._prefix) else ""
        if not (number.isascii() and number.isdigit() and len(number) <= len(str(self._made))):
            return None
        place = int(number) - 1 - (self._made - len(self._entries))
        if not 0 <= place < len(self._entries):
            return None
        entry = self._entries[place]
        return self.told(entry) if entry.decision_id == decision_id else None

    def newest(self) -> Decision | None:
        """The last one; None when there is none."""
        return self.told(self._entries[-1]) if self._entries else None

    def listed(self, wanted: Wanted) -> list[Decision]:
        """Newest first, without their candidates."""
        limit = max(0, min(wanted.limit, LISTED_MAX))
        found: list[Decision] = []
        for entry in self._newest_first():
            if len(found) >= limit:
                break
            if wanted.fits(entry):
                found.append(self.told(entry, with_candidates=False))
        return found

    def of_request(self, request_id: str) -> list[Decision]:
        """The request's attempts, the last one first."""
        entries = [entry for entry in self._newest_first() if entry.asked.request_id == request_id]
        return [self.told(entry) for entry in entries[:LISTED_MAX]]

    def told(self, entry: Entry, *, with_candidates: bool = True) -> Decision:
        """The record that others read."""
        asked, choice, outcome = entry.asked, entry.choice, entry.outcome
        considered = choice.considered
        candidates = considered.candidates() if considered is not None else []
        return Decision(
            decision_id=entry.decision_id,
            router_id=self._router_id,
            request_id=asked.request_id,
            at_unix_s=asked.at_unix_s,
            model=asked.model,
            mode=choice.mode,
            reason=choice.reason,
            attempt=asked.attempt,
            earlier=entry.earlier,
            prompt_tokens=asked.prompt_tokens,
            exact=asked.exact,
            tenant=asked.tenant,
            priority=asked.priority,
            ttft_target_s=asked.ttft_target_s,
            itl_target_s=asked.itl_target_s,
            considered=considered.count if considered is not None else 0,
            candidates=candidates if with_candidates else [],
            prefill_worker=choice.prefill_worker,
            decode_worker=choice.decode_worker,
            sources=list(choice.sources),
            predicted=choice.predicted,
            predicted_itl_s=choice.predicted_itl_s,
            measured=outcome.measured,
            ttft_s=outcome.ttft_s,
            itl_s=outcome.itl_s,
            predicted_cached_tokens=choice.cached_tokens if asked.exact else -1,
            cached_tokens=outcome.cached_tokens,
            regret_s=regret_s(choice.predicted, outcome.measured, candidates),
            outcome=outcome.outcome,
        )

    def _newest_first(self) -> Iterator[Entry]:
        return reversed(self._entries)


def missed_target(asked: Asked, outcome: Outcome) -> bool:
    """Whether the client waited longer than it was to wait."""
    late = 0 <= asked.ttft_target_s < outcome.ttft_s
    return late or 0 <= asked.itl_target_s < outcome.itl_s


def router_of(decision_id: str) -> RouterId:
    """Who made it; empty when that is no decision's id."""
    router_id, separator, number = decision_id.rpartition(SEPARATOR)
    is_one = separator and number.isascii() and number.isdigit() and is_subject_token(router_id)
    return RouterId(router_id if is_one else "")
