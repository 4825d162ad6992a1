"""The KV self-test: which partners are tried, and what counts as a failure."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.lifecycle.self_test import (
    ANSWER_TOKENS,
    ATTEMPTS_MAX,
    FULL_TOKENS_MAX,
    LOGPROB_DIFFERENCE_MAX,
    PASSED,
    PAUSE_S_MAX,
    TAIL_TOKENS,
    Attempt,
    Computed,
    Outcome,
    PartnerKind,
    Result,
    as_text,
    check_report,
    compare,
    logprobs_of,
    next_partner,
    outcome_of,
    partners,
    pause_s,
    prompt_tokens,
    why_unsound,
    with_missing,
    worst,
)
from shared.contracts.fleet_orders import LIKELY_TOKENS_MAX, SelfTestPrompt
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import DIGEST_BYTES, KV_GROUPS_MAX, KvDigest, KvRead, KvTransferReport
from shared.contracts.workers import HashScheme, Role, WorkerPhase
from tests.support.fleet_builders import record

FAILED = Result(Outcome.FAILED, "other tokens")
INCONCLUSIVE = Result(Outcome.INCONCLUSIVE, "no answer")


def ids(records) -> list[str]:
    return [one.worker_id for one in records]


def tried(*attempts: tuple[str, Result]) -> list[Attempt]:
    return [Attempt(partner, found) for partner, found in attempts]


def test_partners_of_a_kind_are_ready_or_probing():
    fleet = [
        record("p1", role=Role.PREFILL),
        record("d1", role=Role.DECODE),
        record("b1", role=Role.BOTH),
        record("d2", WorkerPhase.DRAINING, role=Role.DECODE),
        record("s1", role=Role.STORE),
    ]

    assert ids(partners("me", fleet, PartnerKind.PREFILL, lends=True)) == ["p1"]
    assert set(ids(partners("me", fleet, PartnerKind.DECODE, lends=False))) == {"d1", "b1"}


def test_partners_that_cannot_lend_come_last_and_only_for_a_lender():
    fleet = [
        msgspec.structs.replace(record("d1", role=Role.DECODE), prefix_caching=False),
        record("d2", WorkerPhase.PROBING, role=Role.DECODE),
    ]

    assert ids(partners("me", fleet, PartnerKind.DECODE, lends=True)) == ["d2", "d1"]
    assert ids(partners("me", fleet, PartnerKind.DECODE, lends=False)) == ["d2"]


def test_ready_partners_come_before_probing_ones():
    fleet = [record("d1", WorkerPhase.PROBING, role=Role.DECODE), record("d2", role=Role.DECODE)]

    assert ids(partners("me", fleet, PartnerKind.DECODE, lends=True)) == ["d2", "d1"]


def test_workers_that_start_together_choose_different_partners():
    fleet = [record(f"d{number}", role=Role.DECODE) for number in range(8)]

    asked = {partners(f"new-{number}", fleet, PartnerKind.DECODE, lends=True)[0].worker_id for number in range(32)}

    assert len(asked) > 4


def test_a_failure_is_followed_by_another_partner_if_there_is_one():
    two, one = [record("d1"), record("d2")], [record("d1")]

    assert next_partner(two, []).worker_id == "d1"
    assert next_partner(two, tried(("d1", FAILED))).worker_id == "d2"
    assert next_partner(one, tried(("d1", FAILED))).worker_id == "d1"
    assert next_partner(one, tried(("d1", INCONCLUSIVE))) is None
    assert next_partner(two, tried(("d1", FAILED), ("d2", PASSED))) is None
    assert next_partner([], []) is None


RESULTS = st.sampled_from([PASSED, FAILED, INCONCLUSIVE])


@given(st.integers(0, 5), st.lists(RESULTS, min_size=ATTEMPTS_MAX + 1, max_size=ATTEMPTS_MAX + 1))
def test_attempts_are_bounded_and_one_pass_is_enough(count, results):
    fleet, attempts = [record(f"d{number}") for number in range(count)], []
    while partner := next_partner(fleet, attempts):
        attempts.append(Attempt(partner.worker_id, results[len(attempts)]))

    outcomes = [attempt.result.outcome for attempt in attempts]
    assert len(attempts) <= ATTEMPTS_MAX
    assert outcomes.count(Outcome.PASSED) == (outcome_of(attempts) is Outcome.PASSED)
    assert (outcome_of(attempts) is Outcome.FAILED) == (Outcome.FAILED in outcomes and Outcome.PASSED not in outcomes)
    assert len(attempts) >= min(count, 1)
    inconclusive = [attempt.partner for attempt in attempts if attempt.result is INCONCLUSIVE]
    assert len(inconclusive) == len(set(inconclusive)), "an inconclusive partner is not tried again"


def test_the_note_names_failures_and_no_passes():
    found = {
        PartnerKind.PREFILL: tried(("p1", PASSED)),
        PartnerKind.DECODE: tried(("d1", INCONCLUSIVE), ("d2", FAILED)),
    }

    assert as_text(found) == "KV self-test with d2: other tokens"
    assert as_text({PartnerKind.PREFILL: tried(("p1", PASSED)), PartnerKind.DECODE: []}) == ""
    assert (
        as_text({PartnerKind.PREFILL: [], PartnerKind.DECODE: tried(("d1", INCONCLUSIVE))})
        == "KV self-test with d1: no answer"
    )
    assert as_text({PartnerKind.PREFILL: [], PartnerKind.DECODE: []}) == "no partner for a KV self-test at its start"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (PASSED, PASSED, PASSED),
        (PASSED, INCONCLUSIVE, INCONCLUSIVE),
        (INCONCLUSIVE, FAILED, FAILED),
        (FAILED, PASSED, FAILED),
    ],
)
def test_the_worst_direction_counts(one, other, expected):
    assert worst([one, other]) is expected


def test_a_read_passes_only_if_every_full_block_came():
    assert check_report(KvTransferReport(fetched_tokens=64), 64) is PASSED
    assert check_report(None, 64).outcome is Outcome.FAILED
    assert check_report(KvTransferReport(fetched_tokens=32), 64).outcome is Outcome.FAILED
    assert "cached here" in check_report(KvTransferReport(local_tokens=64), 64).failure
    assert "not connected" in check_report(KvTransferReport(recomputed_tokens=65), 64).failure


@pytest.mark.parametrize(("failure", "outcome"), [("not_held", Outcome.FAILED), ("unreachable", Outcome.INCONCLUSIVE)])
def test_a_holder_that_grants_too_late_makes_the_test_inconclusive(failure, outcome):
    transfer_report = KvTransferReport(reads=[KvRead(worker_id="d1", epoch=1, failure=failure)])

    found = check_report(transfer_report, 64)

    assert found.outcome is outcome
    assert failure in found.failure


DIGEST = KvDigest(blocks=2, digest=b"d" * DIGEST_BYTES)
OTHER = msgspec.structs.replace(DIGEST, digest=b"e" * DIGEST_BYTES)
HELD = Computed([DIGEST], {7: -1.0, 9: -1.5})
NEAR = {7: -1.0 - 0.9 * LOGPROB_DIFFERENCE_MAX, 9: -1.5 + 0.9 * LOGPROB_DIFFERENCE_MAX, 11: -0.1}
"""The holder's tokens are nearly as likely, and another one is likelier."""


def differing(**fields: object) -> KvDigest:
    return msgspec.structs.replace(DIGEST, **fields)


@pytest.mark.parametrize(
    ("held", "read", "outcome"),
    [
        (HELD, HELD, Outcome.PASSED),
        (HELD, Computed([DIGEST], NEAR), Outcome.PASSED),
        (HELD, Computed([OTHER], {7: -1.0, 9: -1.5}), Outcome.FAILED),
        (HELD, Computed([], {7: -1.0, 9: -1.5}), Outcome.FAILED),
        (HELD, Computed([differing(blocks=1)], {7: -1.0, 9: -1.5}), Outcome.FAILED),
        (HELD, Computed([differing(is_uniform=False)], {7: -1.0, 9: -1.5}), Outcome.FAILED),
        (HELD, Computed([DIGEST], {7: -1.0, 9: -1.5 - 1.1 * LOGPROB_DIFFERENCE_MAX}), Outcome.FAILED),
        (HELD, Computed([DIGEST], {7: -1.0, 9: math.nan}), Outcome.FAILED),
        (HELD, Computed([DIGEST], {7: -1.0}), Outcome.FAILED),
        (Computed([DIGEST], {7: math.nan}), Computed([DIGEST], {7: -1.0}), Outcome.FAILED),
        (Computed([DIGEST], {}), Computed([DIGEST], {}), Outcome.PASSED),
        (Computed([differing(version=2)], {7: -1.0}), Computed([OTHER], {7: -1.0}), Outcome.PASSED),
        (Computed([differing(is_uniform=False)], {7: -1.0}), Computed([OTHER], {7: -9.0}), Outcome.FAILED),
        (Computed([DIGEST, differing(group=1)], {}), HELD, Outcome.FAILED),
        (Computed([], {}), HELD, Outcome.INCONCLUSIVE),
    ],
)
def test_bytes_must_be_equal_and_log_probabilities_nearly(held, read, outcome):
    result = compare(held, read)

    assert result.outcome is outcome
    assert bool(result.failure) == (outcome is not Outcome.PASSED)


@pytest.mark.parametrize(
    ("read", "outcome"),
    [
        ({9: -1.5, 7: -1.0}, Outcome.PASSED),
        ({7: -1.0, 11: -1.5}, Outcome.PASSED),
        ({7: -1.0, 11: -1.5 - 1.1 * LOGPROB_DIFFERENCE_MAX}, Outcome.FAILED),
        ({11: -0.2, 12: -2.0}, Outcome.FAILED),
        ({}, Outcome.PASSED),
    ],
    ids=["the same", "another one is as likely", "another one is less likely", "others", "none"],
)
def test_the_likeliest_tokens_of_an_engine_that_scores_no_named_ones_are_compared(read, outcome):
    assert compare(HELD, Computed([DIGEST], with_missing(read, list(HELD.logprobs)))).outcome is outcome


def test_another_workers_prompt_is_checked_before_use():
    sound = SelfTestPrompt(
        worker_id=WorkerId("p1"), epoch=Epoch(1), tokens=[1], likely=[7], logprobs=[-1.0], digests=[DIGEST]
    )

    assert why_unsound(sound) == ""
    for fields in (
        {"logprobs": []},
        {"likely": [1] * (LIKELY_TOKENS_MAX + 1), "logprobs": [0.0] * (LIKELY_TOKENS_MAX + 1)},
        {"digests": [differing(digest=b"short")]},
        {"digests": [DIGEST] * (KV_GROUPS_MAX + 1)},
    ):
        assert why_unsound(msgspec.structs.replace(sound, **fields))


@pytest.mark.parametrize(
    ("response", "found"),
    [
        (b'{"choices":[{"logprobs":{"top_logprobs":[{"token_id:3":-0.5,"token_id:12":-2.0}]}}]}', {3: -0.5, 12: -2.0}),
        (b'{"choices":[{"logprobs":{"top_logprobs":[{"token_id:x":-0.5,"text":-2.0,"token_id:-1":0.0}]}}]}', {}),
        (b'{"choices":[{"logprobs":{"top_logprobs":[null]}}]}', {}),
        (b'{"choices":[{"logprobs":null}]}', {}),
        (b'{"choices":[]}', {}),
        (b"<html>", {}),
    ],
)
def test_log_probabilities_are_read_from_a_completion(response, found):
    assert logprobs_of(response) == found


@given(st.integers(1, 256), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(1, 4096))
def test_a_prompt_ends_a_token_after_a_boundary_and_fits_the_context(unit, blocks, aligned, boundaries, max_model_len):
    hashing = HashScheme(block_size=unit, index_block=unit * blocks, boundaries=boundaries, alignment=unit * aligned)
    count = prompt_tokens(hashing, max_model_len)

    assert count == 0 or count + ANSWER_TOKENS <= max_model_len
    if count:
        assert hashing.handed_over(count) == count - 1
    assert count or max_model_len < hashing.align + ANSWER_TOKENS + TAIL_TOKENS or hashing.align > FULL_TOKENS_MAX


@pytest.mark.parametrize(
    ("hashing", "count"),
    [
        (HashScheme(block_size=32), 65),
        (HashScheme(block_size=32, index_block=64, boundaries=True, alignment=64), 129),
        (HashScheme(block_size=32, index_block=544, boundaries=True, alignment=32), 1089),
        (HashScheme(block_size=96, index_block=1056, boundaries=True, alignment=96), 1057),
        (HashScheme(block_size=32, index_block=4096, boundaries=True, alignment=32), 33),
        (HashScheme(block_size=32, index_block=0, boundaries=True, alignment=32), 65),
    ],
)
def test_a_prompt_has_two_blocks_of_full_attention_where_they_are_short(hashing, count):
    assert prompt_tokens(hashing, 8192) == count


@given(st.integers(1, 10_000))
def test_pauses_grow_up_to_a_maximum(rounds):
    assert 0.0 < pause_s(rounds) <= pause_s(rounds + 1) <= PAUSE_S_MAX
