"""The key file's format and the permissions of a key."""

from __future__ import annotations

import tomllib

import pytest

from services.launcher.cluster.api_keys import entry_text, salt_text
from services.router.auth.api_keys import may_see, read_keys
from services.router.placement.policy import RequestPolicy
from services.router.placement.slo import SloRule, Slos
from services.router.request.facts import ForcedWorkers, Mode, RequestFacts, RequestOptions
from services.router.request.head import Head
from services.router.service import check
from services.router.settings import Settings
from shared.contracts.api_keys import NO_KEY, Key, Permission, digest_of, new_key
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId
from shared.runtime.settings import SettingsError
from tests.support.builders import request_head

DIGEST = digest_of("a key")
SALT = "s" * 32
MODEL = "m"


def test_routers_read_the_keys_that_the_command_writes():
    entry = Key(
        tenant="acme", sha256=DIGEST, note='a "quoted" note', permissions=frozenset(Permission), priority=-5,
        requests_per_minute=60, tokens_per_minute=9, sequences_max=8, models=frozenset({"m", "n"}), public_cache=True,
    )  # fmt: skip

    keyring = read_keys(tomllib.loads(salt_text(SALT) + entry_text(entry)))

    assert keyring.salt == SALT
    assert keyring.keys[DIGEST] == entry


def test_a_key_without_permissions_may_only_infer():
    key = read_keys({"key": [{"tenant": "acme", "sha256": DIGEST}]}).keys[DIGEST]

    assert key.permissions == {Permission.INFER}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({}, "baton keys new"),
        ({"key": [{"tenant": "acme", "sha256": "abc"}]}, "64 hexadecimal"),
        ({"key": [{"tenant": "", "sha256": DIGEST}]}, "tenant must be"),
        ({"key": [{"tenant": "a b", "sha256": DIGEST}]}, "tenant must be"),
        ({"key": [{"tenant": "a", "sha256": DIGEST}] * 2}, "number 2 (tenant 'a'): it is listed twice"),
        ({"key": [{"tenant": "a", "sha256": DIGEST, "permissions": ["root"]}]}, "root"),
        ({"key": [{"tenant": "a", "sha256": DIGEST, "permissions": []}]}, "permissions must be"),
        ({"key": [{"tenant": "a", "sha256": DIGEST, "priority": 5000}]}, "priority must be"),
        ({"key": [{"tenant": "a", "sha256": DIGEST, "tokens_per_minute": -1}]}, "tokens_per_minute must be"),
        ({"key": [{"tenant": "a", "sha256": DIGEST, "token_per_minute": 1}]}, "token_per_minute"),
        ({"key": [{"tenant": "a", "sha256": DIGEST}], "salt": "short"}, "salt has 5 characters"),
    ],
)
def test_invalid_key_files_get_an_explanation(text, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        read_keys(text)


def test_only_operator_keys_read_protected_metrics():
    clerk, operator = Key(tenant="a"), Key(tenant="a", permissions=frozenset({Permission.ADMIN}))

    assert [may_see(key, "/metrics", metrics_open=False) for key in (clerk, operator)] == [False, True]
    assert may_see(clerk, "/metrics", metrics_open=True)
    assert may_see(clerk, "/v1/models", metrics_open=False)


def head_of(**of_key: object) -> Head:
    return request_head(tenant="acme", key=Key(tenant="acme", **of_key))


def facts(**options: object) -> RequestFacts:
    return RequestFacts(path="/v1/completions", model=MODEL, options=RequestOptions(**options))


def test_a_key_restricted_to_models_allows_no_other():
    policy = RequestPolicy()

    assert policy.fault(facts(), head_of(models=frozenset({MODEL})), ()) is None
    fault = policy.fault(facts(), head_of(models=frozenset({"n"})), ())
    assert (fault.reason, fault.param) == (Reason.FORBIDDEN, "model")


@pytest.mark.parametrize("forcing", ["auto", "anyone", "nobody"])
@pytest.mark.parametrize("local", [True, False])
def test_forcing_workers_requires_a_key_that_allows_it(forcing, local):
    policy = RequestPolicy.from_settings(Settings(host="127.0.0.1" if local else "0.0.0.0", force_placement=forcing))
    forced = facts(forced=ForcedWorkers(decode_worker=WorkerId("w1")))
    may = head_of(permissions=frozenset({Permission.INFER, Permission.FORCE_PLACEMENT}))

    assert policy.fault(forced, head_of(), {"w1"}).reason is Reason.FORBIDDEN
    assert (policy.fault(forced, may, {"w1"}) is None) == (forcing != "nobody")
    assert (policy.fault(forced, request_head(key=NO_KEY), {"w1"}) is None) == policy.may_force


def priority(policy: RequestPolicy, key: Head, **options: object) -> int:
    return policy.placement_request(facts(**options), key, Mode.AUTO, 1, ()).priority


def test_a_keys_priority_is_the_default_and_the_most_urgent():
    policy = RequestPolicy(slos=Slos(classes={"quick": SloRule(priority=-7), "batch": SloRule(priority=9)}))
    slow, quick = head_of(priority=5), head_of(priority=-5)

    assert (priority(policy, slow), priority(policy, quick)) == (5, -5)
    assert (priority(policy, slow, class_name="quick"), priority(policy, slow, class_name="batch")) == (5, 9)
    assert priority(policy, quick, priority=3) == 3
    assert policy.fault(facts(priority=-4), quick, ()) is None
    assert policy.fault(facts(priority=4), slow, ()).reason is Reason.FORBIDDEN


def test_a_reachable_router_requires_keys_or_the_insecure_option(tmp_path):
    keys = f'salt = "{SALT}"\n[[key]]\ntenant = "a"\nsha256 = "{DIGEST}"'
    (tmp_path / "keys.toml").write_text(keys)

    for fine in (
        Settings(), Settings(host="::1"), Settings(host="0.0.0.0", insecure=True), Settings(host="0.0.0.0", keys=keys),
        Settings(host="0.0.0.0", keys_file=str(tmp_path / "keys.toml")),
        Settings(host="0.0.0.0", published_host="127.0.0.1"),
    ):  # fmt: skip
        check(fine)
    for reachable in (Settings(host="0.0.0.0"), Settings(host="gpu-1"), Settings(published_host="192.0.2.1")):
        with pytest.raises(SettingsError, match=r"baton keys new .*ROUTER_INSECURE"):
            check(reachable)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keys_file": "/nowhere/keys.toml"}, "ROUTER_KEYS_FILE .*No such file"),
        ({"keys": "[[key"}, "ROUTER_KEYS: "),
        ({"keys": f'[[key]]\ntenant = "a"\nsha256 = "{DIGEST}"'}, "caches cannot be separated"),
        ({"keys": "x = 1", "keys_file": "keys.toml"}, "both set"),
    ],
)
def test_unusable_keys_stop_the_router_at_start(settings, message):
    with pytest.raises(SettingsError, match=message):
        check(Settings(**settings))


def test_keys_are_unique_and_not_derivable_from_their_digest():
    keys = {new_key() for _ in range(100)}

    assert len({digest_of(key) for key in keys}) == 100
    assert all(len(key) >= 43 and key not in digest_of(key) for key in keys)
