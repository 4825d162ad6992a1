"""The KV self-test: one worker computes a short prompt, another reads its KV and must generate the same tokens.

A worker tests itself with one partner of each kind, in both directions. If the test fails with one partner, the worker
tries another, because the partner may be the faulty one. An unresponsive partner does not fail the test.
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
"""After the full blocks: the reader computes these itself."""
ANSWER_TOKENS = 4
ATTEMPTS_MAX = 3
"""With one kind of partner in one round."""
NUMBERS_MAX = 1000
"""The prompt is made of numbers below this."""
PAUSE_S = 1.0
"""After the first failed round; doubled after each further one."""
PAUSE_S_MAX = 30.0


class PartnerKind(StrEnum):
    """Whether a partner computes prompts or generates answers."""

    PREFILL = "prefill"
    DECODE = "decode"


KIND_OF: Mapping[Role, PartnerKind] = {
    Role.PREFILL: PartnerKind.PREFILL,
    Role.DECODE: PartnerKind.DECODE,
    Role.BOTH: PartnerKind.DECODE,
}
"""A store is no partner: it has no engine that could generate."""
NEW_PARTNERS: Mapping[Role, frozenset[PartnerKind]] = {
    Role.PREFILL: frozenset({PartnerKind.DECODE}),
    Role.DECODE: frozenset({PartnerKind.PREFILL}),
    Role.BOTH: frozenset(PartnerKind),
}
"""Kinds of partner that a worker exchanges KV with after a change to this role. A store never changes its role."""


class Outcome(StrEnum):
    """Of one attempt, or of all attempts with one kind of partner. From worst to best."""

    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"
    """The partner was busy or has ended."""
    PASSED = "passed"


@dataclass(frozen=True, slots=True)
class Result:
    """Of a self-test in one direction, or of the worst direction."""

    outcome: Outcome
    failure: str = ""


PASSED = Result(Outcome.PASSED)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A self-test with one partner."""

    partner: WorkerId
    result: Result


def partners(me: WorkerId, records: Iterable[WorkerRecord], kind: PartnerKind, *, lends: bool) -> list[WorkerRecord]:
    """Possible partners of this kind, the preferred ones first: those that lend, then those that are READY. Among
    equals each worker has an order of its own, so that many that start together do not all choose the same partner.

    An engine without prefix caching reads KV and cannot lend it by hash. ``lends`` says whether this worker can: two
    workers that both cannot have nothing to test.
    """
    able = [record for record in records if KIND_OF.get(record.role) is kind and (lends or record.prefix_caching)]
    serving = [record for record in able if record.phase in {WorkerPhase.READY, WorkerPhase.PROBING}]
    return sorted(
        serving, key=lambda it: (not it.prefix_caching, it.phase is not WorkerPhase.READY, _affinity(me, it.worker_id))
    )


def _affinity(me: WorkerId, other: WorkerId) -> bytes:
    return blake2b(f"{me} {other}".encode(), digest_size=8).digest()


def next_partner(able: Sequence[WorkerRecord], attempts: Sequence[Attempt]) -> WorkerRecord | None:
    """The partner to try now; None: this kind is settled. An inconclusive partner is not tried again in this round."""
    if len(attempts) >= ATTEMPTS_MAX or any(attempt.result.outcome is Outcome.PASSED for attempt in attempts):
        return None
    silent = {attempt.partner for attempt in attempts if attempt.result.outcome is Outcome.INCONCLUSIVE}
    tried = [attempt.partner for attempt in attempts]
    waiting = [record for record in able if record.worker_id not in silent]
    return min(waiting, key=lambda record: tried.count(record.worker_id), default=None)


def outcome_of(attempts: Sequence[Attempt]) -> Outcome:
    """Of all attempts with one kind of partner: one pass is enough, and no attempt at all is inconclusive."""
    outcomes = {attempt.result.outcome for attempt in attempts}
    return next((it for it in (Outcome.PASSED, Outcome.FAILED) if it in outcomes), Outcome.INCONCLUSIVE)


def as_text(results: Mapping[PartnerKind, Sequence[Attempt]]) -> str:
    """For the worker's note: why each kind of partner that was tried did not pass. Empty if all passed."""
    if not any(results.values()):
        return "no partner for a KV self-test at its start"
    parts = []
    for attempts in results.values():
        outcome = outcome_of(attempts)
        last = next((it for it in reversed(attempts) if it.result.outcome is outcome), None)
        if last is not None and outcome is not Outcome.PASSED:
            parts.append(f"KV self-test with {last.partner}: {last.result.failure}")
    return "; ".join(parts)


def worst(results: Iterable[Result]) -> Result:
    """Of all directions; without any direction there is nothing that could fail."""
    return min(results, key=lambda result: list(Outcome).index(result.outcome), default=PASSED)


def pause_s(rounds: int) -> float:
    """After so many failed rounds."""
    return float(min(PAUSE_S_MAX, PAUSE_S * 2.0 ** min(rounds - 1, 16)))


def prompt_tokens(block_size: int, max_model_len: int) -> int:
    """Length of the prompt; 0: the model's context is too small for a self-test."""
    tail = min(TAIL_TOKENS, max(1, block_size - 1))
    for blocks in range(FULL_BLOCKS, 0, -1):
        if blocks * block_size + tail + ANSWER_TOKENS <= max_model_len:
            return blocks * block_size + tail
    return 0


def check_report(report: KvTransferReport | None, full_tokens: int) -> Result:
    """Whether the reader's engine fetched all full blocks."""
    if report is None:
        return Result(Outcome.FAILED, "the engine makes no KV transfer report")
    if report.fetched_tokens >= full_tokens:
        return PASSED
    why = next((read.failure for read in report.reads if read.failure), "") or "nothing could be asked for"
    # A holder in a long step grants too late for a request that waits: that does not mean that reading is broken.
    outcome = Outcome.INCONCLUSIVE if why == NoGrant.UNREACHABLE else Outcome.FAILED
    return Result(outcome, f"{report.fetched_tokens} of {full_tokens} tokens' KV came: {why}")


def check_tokens(expected: Sequence[int], generated: Sequence[int]) -> Result:
    """Whether the KV that was read gives the same tokens as at its holder."""
    if list(expected) == list(generated):
        return PASSED
    text = f"with the KV that was read the engine generated {list(generated)}, its holder {list(expected)}"
    return Result(Outcome.FAILED, text)
