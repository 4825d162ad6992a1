"""With whom a worker proves itself, and what speaks against it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.lifecycle.self_test import (
    ANSWER_TOKENS,
    ATTEMPTS_MAX,
    FINE,
    PAUSE_S_MAX,
    Attempt,
    Finding,
    Kind,
    Outcome,
    answered_alike,
    as_text,
    next_partner,
    partners,
    pause_s,
    prompt_tokens,
    read_well,
    severity,
    verdict,
)
from shared.contracts.kv_exchange import KvRead, KvTransferReport
from shared.contracts.workers import Role, WorkerPhase
from tests.support.fleet_builders import record

FAILED = Finding(Outcome.FAILED, "other tokens")
UNANSWERED = Finding(Outcome.UNANSWERED, "no answer")


def ids(records) -> list[str]:
    return [one.worker_id for one in records]


def tried(*attempts: tuple[str, Finding]) -> list[Attempt]:
    return [Attempt(partner, found) for partner, found in attempts]


def test_partners_are_those_of_the_kind_that_serve_or_probe():
    fleet = [
        record("p1", role=Role.PREFILL),
        record("d1", role=Role.DECODE),
        record("b1", role=Role.BOTH),
        record("d2", WorkerPhase.DRAINING, role=Role.DECODE),
        record("s1", role=Role.STORE),
    ]

    assert ids(partners("me", fleet, Kind.PREFILL, lends=True)) == ["p1"]
    assert set(ids(partners("me", fleet, Kind.DECODE, lends=False))) == {"d1", "b1"}


def test_partners_that_cannot_lend_come_last_and_only_for_a_lender():
    fleet = [
        msgspec.structs.replace(record("d1", role=Role.DECODE), prefix_caching=False),
        record("d2", WorkerPhase.PROBING, role=Role.DECODE),
    ]

    assert ids(partners("me", fleet, Kind.DECODE, lends=True)) == ["d2", "d1"]
    assert ids(partners("me", fleet, Kind.DECODE, lends=False)) == ["d2"]


def test_those_that_serve_are_tried_before_those_that_probe_themselves():
    fleet = [record("d1", WorkerPhase.PROBING, role=Role.DECODE), record("d2", role=Role.DECODE)]

    assert ids(partners("me", fleet, Kind.DECODE, lends=True)) == ["d2", "d1"]


def test_many_that_start_together_do_not_all_ask_the_same_one():
    fleet = [record(f"d{number}", role=Role.DECODE) for number in range(8)]

    asked = {partners(f"new-{number}", fleet, Kind.DECODE, lends=True)[0].worker_id for number in range(32)}

    assert len(asked) > 4


def test_another_partner_is_tried_when_one_fails_and_the_same_again_when_it_is_the_only_one():
    two, one = [record("d1"), record("d2")], [record("d1")]

    assert next_partner(two, []).worker_id == "d1"
    assert next_partner(two, tried(("d1", FAILED))).worker_id == "d2"
    assert next_partner(one, tried(("d1", FAILED))).worker_id == "d1"
    assert next_partner(one, tried(("d1", UNANSWERED))) is None
    assert next_partner(two, tried(("d1", FAILED), ("d2", FINE))) is None
    assert next_partner([], []) is None


FINDINGS = st.sampled_from([FINE, FAILED, UNANSWERED])


@given(st.integers(0, 5), st.lists(FINDINGS, min_size=ATTEMPTS_MAX + 1, max_size=ATTEMPTS_MAX + 1))
def test_attempts_end_and_one_that_passes_is_enough(count, findings):
    fleet, attempts = [record(f"d{number}") for number in range(count)], []
    while partner := next_partner(fleet, attempts):
        attempts.append(Attempt(partner.worker_id, findings[len(attempts)]))

    outcomes = [attempt.found.outcome for attempt in attempts]
    assert len(attempts) <= ATTEMPTS_MAX
    assert outcomes.count(Outcome.PASSED) == (verdict(attempts) is Outcome.PASSED)
    assert (verdict(attempts) is Outcome.FAILED) == (Outcome.FAILED in outcomes and Outcome.PASSED not in outcomes)
    assert len(attempts) >= min(count, 1)
    asked_in_vain = [attempt.partner for attempt in attempts if attempt.found is UNANSWERED]
    assert len(asked_in_vain) == len(set(asked_in_vain)), "who did not answer is not asked again"


def test_what_speaks_against_it_is_said_and_what_passed_is_not():
    found = {Kind.PREFILL: tried(("p1", FINE)), Kind.DECODE: tried(("d1", UNANSWERED), ("d2", FAILED))}

    assert as_text(found) == "d2: other tokens"
    assert as_text({Kind.PREFILL: tried(("p1", FINE)), Kind.DECODE: []}) == ""
    assert as_text({Kind.PREFILL: [], Kind.DECODE: tried(("d1", UNANSWERED))}) == "d1: no answer"
    assert as_text({Kind.PREFILL: [], Kind.DECODE: []}) == "nobody was there to prove itself with"


@pytest.mark.parametrize(
    ("one", "other", "worst"),
    [(FINE, FINE, FINE), (FINE, UNANSWERED, UNANSWERED), (UNANSWERED, FAILED, FAILED), (FAILED, FINE, FAILED)],
)
def test_the_worst_direction_counts(one, other, worst):
    assert min(one, other, key=severity) is worst


def test_kv_that_came_whole_is_well_and_less_of_it_is_not():
    assert read_well(KvTransferReport(fetched_tokens=64), 64) is FINE
    assert read_well(None, 64).outcome is Outcome.FAILED
    assert read_well(KvTransferReport(fetched_tokens=32), 64).outcome is Outcome.FAILED
    assert "nothing could be asked for" in read_well(KvTransferReport(local_tokens=64), 64).why


@pytest.mark.parametrize(("failure", "outcome"), [("not_held", Outcome.FAILED), ("unreachable", Outcome.UNANSWERED)])
def test_a_holder_that_answered_too_late_is_no_proof_against_the_reader(failure, outcome):
    transfer_report = KvTransferReport(reads=[KvRead(worker_id="d1", epoch=1, failure=failure)])

    found = read_well(transfer_report, 64)

    assert found.outcome is outcome
    assert failure in found.why


def test_the_same_tokens_are_the_proof():
    assert answered_alike([1, 2, 3], [1, 2, 3]) is FINE
    assert answered_alike([1, 2, 3], [1, 2, 4]).outcome is Outcome.FAILED
    assert answered_alike([1, 2, 3], []).outcome is Outcome.FAILED


@given(st.integers(1, 256), st.integers(1, 4096))
def test_a_canary_has_full_blocks_and_a_tail_and_fits_the_model(block_size, max_model_len):
    count = prompt_tokens(block_size, max_model_len)

    assert count == 0 or count + ANSWER_TOKENS <= max_model_len
    assert count == 0 or count > block_size
    if block_size > 1 and count:
        assert count % block_size
    assert count or max_model_len < 2 * block_size + ANSWER_TOKENS + 1 or block_size == 1


@given(st.integers(1, 10_000))
def test_pauses_grow_and_have_an_end(rounds):
    assert 0.0 < pause_s(rounds) <= pause_s(rounds + 1) <= PAUSE_S_MAX
