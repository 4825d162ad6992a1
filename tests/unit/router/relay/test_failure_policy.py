"""The failure policy: recovery actions per failure kind, the operator's file, the default."""

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
from services.router.service import check, failure_policy
from services.router.settings import Settings
from shared.contracts.failures import Reason
from shared.runtime.settings import SettingsError

DOCUMENTED = Path(__file__).parents[4] / "docs" / "failure-policy.toml"


def test_every_failure_kind_has_recovery_actions_ending_in_refusal():
    assert DEFAULT_ACTIONS.keys() == set(FailureKind)
    assert {actions[-1] for actions in DEFAULT_ACTIONS.values()} == {RecoveryAction.REFUSE}


@pytest.mark.parametrize("kind", FailureKind)
def test_by_default_every_failure_is_recoverable_before_and_after_first_byte(kind):
    policy = FailurePolicy()

    assert policy.recovery(kind, begun=False).actions
    assert policy.recovery(kind, begun=True).actions == (RecoveryAction.RESUME,)


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
def test_leg_failure_reasons_map_to_failure_kinds(reason, prefill, answering, kind):
    assert kind_of(reason, prefill=prefill, answering=answering, after_prefill=False) is kind


def test_an_operators_list_replaces_only_its_default():
    policy = read_policy({"actions": {"decode_lost": ["resume", "refuse"]}, "wait_s_max": 1})

    assert policy.actions[FailureKind.DECODE_LOST] == (RecoveryAction.RESUME, RecoveryAction.REFUSE)
    assert policy.actions[FailureKind.PREFILL_LOST] == DEFAULT_ACTIONS[FailureKind.PREFILL_LOST]
    assert policy.recovery(FailureKind.DECODE_LOST, begun=False).actions == ()
    assert policy.recovery(FailureKind.PREFILL_LOST, begun=False).wait_s == 1.0


def test_requests_wait_only_if_the_policy_lists_it():
    policy = read_policy({"actions": {"worker_busy": ["another_decode"]}})

    assert policy.recovery(FailureKind.WORKER_BUSY, begun=False).wait_s == 0.0


def test_engines_compute_missing_kv_unless_the_operator_forbids_it():
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
        ({"wait_s_max": -1}, r"Expected `float` >= 0.0 - at `\$.wait_s_max`"),
        ({"stream_wait_s_max": True}, "Expected `float`, got `bool`"),
        ({"attempts_max": 0}, r"Expected `int` >= 1 - at `\$.attempts_max`"),
        ({"resumes_max": 65}, "Expected `int` <= 64"),
    ],
)
def test_invalid_policies_are_rejected_with_the_valid_values(actions, message):
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
def test_plans_resume_streams_or_place_requests_in_the_operators_order(listed, waits, begun, kind):
    actions = [*listed, *([RecoveryAction.WAIT] if waits else [])]
    recovery = read_policy({"actions": {str(kind): [str(one) for one in actions]}}).recovery(kind, begun=begun)

    wanted = [RecoveryAction.RESUME] if begun else PLACING
    assert list(recovery.actions) == [one for one in listed if one in wanted]
    assert (recovery.wait_s > 0) is waits


def test_errors_in_the_policy_file_are_reported_with_its_name(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text('[actions]\ndecode_lost = ["resume", "wait", "refuse"]\n')
    check(Settings(failure_policy=str(path)))
    path.write_text("[actions")

    with pytest.raises(SettingsError, match=r"ROUTER_FAILURE_POLICY .*policy.toml"):
        check(Settings(failure_policy=str(path)))
    with pytest.raises(SettingsError, match="nowhere"):
        check(Settings(failure_policy=str(tmp_path / "nowhere")))


def test_the_documented_policy_file_equals_the_default():
    assert failure_policy(Settings(failure_policy=str(DOCUMENTED))) == FailurePolicy()
    assert read_policy({}) == FailurePolicy()
    assert set(tomllib.loads(DOCUMENTED.read_text())["actions"]) == set(FailureKind)
