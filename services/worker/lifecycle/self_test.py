"""Whether two workers exchange KV as they should: a self_test is a short prompt of one whose KV the other one reads.

A worker proves itself with one partner of each kind, in both directions. Who fails with one partner tries the next: a
partner may be ill itself. Who finds nobody that answers has proved nothing, and nothing speaks against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

from shared.contracts.ids import WorkerId
from shared.contracts.kv_exchange import KvTransferReport, NoGrant
from shared.contracts.workers import Role, WorkerPhase, WorkerRecord

FULL_BLOCKS = 2
TAIL_TOKENS = 5
"""Behind the full blocks: what a reader computes itself."""
ANSWER_TOKENS = 4
ATTEMPTS_MAX = 3
"""For one kind of partner, before the worker waits and begins again."""
NUMBERS_MAX = 1000
"""The prompt's words are numbers below that."""
PAUSE_S = 1.0
"""After all attempts have failed; twice as long each time."""
PAUSE_S_MAX = 30.0


class Kind(StrEnum):
    """What a partner is to others: where prompts are computed, or where answers are."""

    PREFILL = "prefill"
    DECODE = "decode"


KIND_OF: Mapping[Role, Kind] = {Role.PREFILL: Kind.PREFILL, Role.DECODE: Kind.DECODE, Role.BOTH: Kind.DECODE}
"""A store has no engine that could answer."""
NEW_TO: Mapping[Role, frozenset[Kind]] = {
    Role.PREFILL: frozenset({Kind.DECODE}),
    Role.DECODE: frozenset({Kind.PREFILL}),
    Role.BOTH: frozenset(Kind),
}
"""With whom a worker deals that takes on that role. It cannot become a store, nor a store anything else."""


class Outcome(StrEnum):
    """Of one attempt, or of all with one kind of partner."""

    PASSED = "passed"
    FAILED = "failed"
    UNANSWERED = "unanswered"
    """The partner had no time, or is gone: that proves nothing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one look at it has shown."""

    outcome: Outcome
    why: str = ""


FINE = Finding(Outcome.PASSED)
FROM_BAD_TO_GOOD = (Outcome.FAILED, Outcome.UNANSWERED, Outcome.PASSED)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A self_test in both directions with one partner."""

    partner: WorkerId
    found: Finding


def partners(me: WorkerId, records: Iterable[WorkerRecord], kind: Kind, *, lends: bool) -> list[WorkerRecord]:
    """Possible partners of this kind, the preferred ones first: those that lend, then those that are READY. Among
    equals each worker has an order of its own, so that many that start together do not all choose the same partner.

    An engine without prefix caching reads KV and cannot lend it by hash. ``lends`` says whether this worker can: two
    workers that both cannot have nothing to test.
    """
    able = [record for record in records if KIND_OF.get(record.role) is kind and (lends or record.prefix_caching)]
    serving = [record for record in able if record.phase in {WorkerPhase.READY, WorkerPhase.PROBING}]
    return sorted(
        serving,
        key=lambda it: (not it.prefix_caching, it.phase is not WorkerPhase.READY, _liking(me, it.worker_id)),
    )


def _liking(me: WorkerId, other: WorkerId) -> bytes:
    return blake2b(f"{me} {other}".encode(), digest_size=8).digest()


def next_partner(able: Sequence[WorkerRecord], attempts: Sequence[Attempt]) -> WorkerRecord | None:
    """Whom to try now; None: this kind is settled. Who did not answer is not asked again this time."""
    if len(attempts) >= ATTEMPTS_MAX or any(attempt.found.outcome is Outcome.PASSED for attempt in attempts):
        return None
    silent = {attempt.partner for attempt in attempts if attempt.found.outcome is Outcome.UNANSWERED}
    tried = [attempt.partner for attempt in attempts]
    waiting = [record for record in able if record.worker_id not in silent]
    return min(waiting, key=lambda record: tried.count(record.worker_id), default=None)


def verdict(attempts: Sequence[Attempt]) -> Outcome:
    """Of all attempts with one kind of partner; no partner at all proves nothing either."""
    outcomes = {attempt.found.outcome for attempt in attempts}
    return next((it for it in (Outcome.PASSED, Outcome.FAILED) if it in outcomes), Outcome.UNANSWERED)


def as_text(found: Mapping[Kind, Sequence[Attempt]]) -> str:
    """What a person should know of it: why each kind that was tried did not pass. Empty: all is well."""
    if not any(found.values()):
        return "nobody was there to prove itself with"
    parts = []
    for attempts in found.values():
        outcome = verdict(attempts)
        last = next((it for it in reversed(attempts) if it.found.outcome is outcome), None)
        if last is not None and outcome is not Outcome.PASSED:
            parts.append(f"{last.partner}: {last.found.why}")
    return "; ".join(parts)


def severity(found: Finding) -> int:
    """For ``min``: the worst finding of all directions counts."""
    return FROM_BAD_TO_GOOD.index(found.outcome)


def pause_s(rounds: int) -> float:
    """After so many rounds that failed."""
    return float(min(PAUSE_S_MAX, PAUSE_S * 2.0 ** min(rounds - 1, 16)))


def prompt_tokens(block_size: int, max_model_len: int) -> int:
    """How long a self_test is; 0: the model is too small for one."""
    tail = min(TAIL_TOKENS, max(1, block_size - 1))
    for blocks in range(FULL_BLOCKS, 0, -1):
        if blocks * block_size + tail + ANSWER_TOKENS <= max_model_len:
            return blocks * block_size + tail
    return 0


def read_well(transfer_report: KvTransferReport | None, full_tokens: int) -> Finding:
    """What the reader's engine says of the KV that it was to read: whether all came, and only the tail was computed."""
    if transfer_report is None:
        return Finding(Outcome.FAILED, "the engine does not tell where KV comes from")
    if transfer_report.fetched_tokens >= full_tokens:
        return FINE
    why = next((read.failure for read in transfer_report.reads if read.failure), "") or "nothing could be asked for"
    # A holder in a long step answers too late for a prompt that somebody waits for.
    outcome = Outcome.UNANSWERED if why == NoGrant.UNREACHABLE else Outcome.FAILED
    return Finding(outcome, f"{transfer_report.fetched_tokens} of {full_tokens} tokens' KV came: {why}")


def answered_alike(expected: Sequence[int], answered: Sequence[int]) -> Finding:
    """Whether the KV that was read gives the very tokens that its holder gave."""
    if list(expected) == list(answered):
        return FINE
    words = f"with the KV that was read the answer is {list(answered)}, its holder's was {list(expected)}"
    return Finding(Outcome.FAILED, words)
