"""The failure policy: which answers a kind of failure has, what an operator may say, and what the default does."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.relay.failure_policy import (
    DEFAULT_ACTIONS,
    PLACING,
    FailureKind,
    FailurePolicy,
    RecoveryAction,
    kind_of,
    read_policy,
)
from services.router.settings import Settings, check, failure_policy
from shared.contracts.failures import Reason
from shared.runtime.settings import SettingsError

DOCUMENTED = Path(__file__).parents[4] / "docs" / "failure-policy.toml"


def test_every_kind_of_failure_has_answers_and_ends_with_a_refusal():
    assert DEFAULT_ACTIONS.keys() == set(FailureKind)
    assert {actions[-1] for actions in DEFAULT_ACTIONS.values()} == {RecoveryAction.REFUSE}


@pytest.mark.parametrize("kind", FailureKind)
def test_by_default_every_failure_may_be_survived_before_the_first_byte_and_after_it(kind):
    policy = FailurePolicy()

    assert policy.plan(kind, begun=False).actions
    assert policy.plan(kind, begun=True).actions == (RecoveryAction.RESUME,)


@pytest.mark.parametrize(
    ("reason", "prefill", "answering", "kind"),
    [
        (Reason.WORKER_LOST, True, False, FailureKind.PREFILL_LOST),
        (Reason.WORKER_LOST, False, False, FailureKind.DECODE_LOST),
        (Reason.ENGINE_DEAD, False, True, FailureKind.DECODE_LOST),
        (Reason.DEADLINE, False, False, FailureKind.QUEUE_DEADLINE),
        (Reason.DEADLINE, False, True, FailureKind.DECODE_LOST),
        (Reason.WORKER_BUSY, False, False, FailureKind.WORKER_BUSY),
        (Reason.CACHE_MISSED, False, False, FailureKind.CACHE_MISSED),
        (Reason.BUS_DOWN, False, True, FailureKind.BUS_DOWN),
        (Reason.CANNOT_RESUME, False, False, None),
        (Reason.INTERNAL, False, False, None),
        (Reason.CLIENT_SLOW, False, True, None),
    ],
)
def test_what_a_leg_says_is_a_kind_of_failure_or_another_worker_would_do_no_better(reason, prefill, answering, kind):
    assert kind_of(reason, prefill=prefill, answering=answering, after_prefill=False) is kind


def test_an_operators_list_replaces_the_default_one_and_leaves_the_others():
    policy = read_policy({"actions": {"decode_lost": ["resume", "refuse"]}, "wait_s_max": 1})

    assert policy.actions[FailureKind.DECODE_LOST] == (RecoveryAction.RESUME, RecoveryAction.REFUSE)
    assert policy.actions[FailureKind.PREFILL_LOST] == DEFAULT_ACTIONS[FailureKind.PREFILL_LOST]
    assert policy.plan(FailureKind.DECODE_LOST, begun=False).actions == ()
    assert policy.plan(FailureKind.PREFILL_LOST, begun=False).wait_s == 1.0


def test_nobody_waits_where_the_list_does_not_say_so():
    policy = read_policy({"actions": {"worker_busy": ["another_decode"]}})

    assert policy.plan(FailureKind.WORKER_BUSY, begun=False).wait_s == 0.0


def test_engines_compute_what_they_do_not_get_unless_the_operator_wants_it_otherwise():
    assert not FailurePolicy().guards_handoffs
    assert read_policy({"actions": {"handoff_refused": ["bounce_to_prefill", "refuse"]}}).guards_handoffs


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ({"action": {}}, "`action` is not a setting"),
        ({"actions": []}, "must be a table"),
        ({"actions": {"decode_died": ["resume"]}}, "`actions.decode_died` is not a kind of failure"),
        ({"actions": {"decode_lost": []}}, "must be a list"),
        ({"actions": {"decode_lost": "resume"}}, "must be a list"),
        ({"actions": {"decode_lost": ["retry"]}}, "there are another_prefill"),
        ({"actions": {"decode_lost": ["resume", "resume"]}}, "names an action twice"),
        ({"actions": {"decode_lost": ["refuse", "resume"]}}, "continues after `refuse`"),
        ({"actions": {"decode_lost": ["wait", "refuse"]}}, "without an action to try"),
        ({"actions": {"read_failed": ["bounce_to_prefill"]}}, "must begin with prefill_on_decode"),
        ({"wait_s_max": -1}, "`wait_s_max` is -1"),
        ({"stream_wait_s_max": True}, "`stream_wait_s_max` is True"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words_that_say_what_would(actions, message):
    with pytest.raises(ValueError, match=message):
        read_policy(actions)


@given(
    st.lists(
        st.sampled_from([one for one in RecoveryAction if one not in (RecoveryAction.WAIT, RecoveryAction.REFUSE)]),
        min_size=1,
        unique=True,
    ),
    st.booleans(),
    st.booleans(),
    st.sampled_from([kind for kind in FailureKind if kind is not FailureKind.READ_FAILED]),
)
def test_a_stream_is_only_ever_resumed_and_a_request_only_ever_placed_in_the_operators_order(
    listed, waits, begun, kind
):
    actions = [*listed, *([RecoveryAction.WAIT] if waits else [])]
    plan = read_policy({"actions": {str(kind): [str(one) for one in actions]}}).plan(kind, begun=begun)

    wanted = [RecoveryAction.RESUME] if begun else PLACING
    assert list(plan.actions) == [one for one in listed if one in wanted]
    assert (plan.wait_s > 0) is waits


def test_a_file_is_read_at_the_start_and_what_is_wrong_with_it_is_said_with_its_name(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text('[actions]\ndecode_lost = ["resume", "wait", "refuse"]\n')
    check(Settings(failure_policy=str(path)))
    path.write_text("[actions")

    with pytest.raises(SettingsError, match=r"ROUTER_FAILURE_POLICY .*policy.toml"):
        check(Settings(failure_policy=str(path)))
    with pytest.raises(SettingsError, match="nowhere"):
        check(Settings(failure_policy=str(tmp_path / "nowhere")))
    with pytest.raises(SettingsError, match="ROUTER_RESUMES_MAX is 65"):
        check(Settings(resumes_max=65))


def test_the_file_in_the_documentation_says_what_is_done_without_one():
    assert failure_policy(Settings(failure_policy=str(DOCUMENTED))) == FailurePolicy()
    assert read_policy({}) == FailurePolicy()
    assert set(tomllib.loads(DOCUMENTED.read_text())["actions"]) == set(FailureKind)
