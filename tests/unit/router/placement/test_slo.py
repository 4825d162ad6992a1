"""The operator's SLO targets, classes and priorities, and the options that a request may set."""

from __future__ import annotations

import json
import math

import pytest

from services.router.admission.policy import AdmissionPolicy, read_weights
from services.router.placement.policy import RequestPolicy
from services.router.placement.slo import Targets, read_slos
from services.router.request.facts import Fault, Mode, RequestFacts
from services.router.request.fields import PRIORITY_MAX, read_request
from services.router.settings import Settings
from shared.contracts.engine_paths import CHAT
from shared.contracts.failures import Reason
from shared.contracts.ids import WorkerId
from tests.support.builders import request_head

SLOS = read_slos(
    json.dumps(
        {
            "default": {"ttft_s": 2, "itl_s": 0.1},
            "models": {"m": {"ttft_s": 3, "priority": 1}},
            "classes": {"batch": {"ttft_s": None, "priority": 10}, "chat": {"itl_s": 0.05}},
        }
    )
)

WORKERS = {WorkerId(name) for name in ("p1", "d1", "a", "b")}


def request(baton: object = None, model: str = "m") -> RequestFacts:
    body = {"model": model, "messages": [{"role": "user", "content": "x"}], "baton": baton}
    return read_request(CHAT, json.dumps(body).encode())


def targets(model: str, name: str) -> tuple[float, float]:
    found = SLOS.targets(model, name, ttft_s=None, itl_s=None)
    return found.ttft_s, found.itl_s


def test_class_overrides_model_and_model_overrides_default():
    assert targets("other", "") == (2, 0.1)
    assert targets("m", "") == (3, 0.1)
    assert targets("m", "chat") == (3, 0.05)


def test_null_means_no_target():
    assert targets("m", "batch") == (math.inf, 0.1)


def test_the_request_overrides_its_class():
    assert SLOS.targets("m", "batch", ttft_s=1.0, itl_s=None) == Targets(ttft_s=1.0, itl_s=0.1)


def test_a_class_or_model_sets_the_priority():
    assert [SLOS.priority(*one) for one in (("m", "batch"), ("m", "chat"), ("other", ""))] == [10, 1, 0]


def test_without_settings_there_are_no_targets():
    assert read_slos(" ").targets("m", "", ttft_s=None, itl_s=None) == Targets()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "truncated"),
        ('{"defaults": {}}', "defaults"),
        ('{"default": {"ttft": 1}}', "ttft"),
        ('{"default": {"ttft_s": -1}}', "default.ttft_s is -1"),
        ('{"classes": {"batch": {"itl_s": 1e9}}}', "classes.batch.itl_s"),
        ('{"models": {"m": {"priority": 5000}}}', "models.m.priority is 5000"),
        ('{"classes": {"": {}}}', "empty name"),
        (json.dumps({"classes": {f"c{number}": {} for number in range(65)}}), "65 classes"),
    ],
)
def test_invalid_slo_settings_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        read_slos(text)


@pytest.mark.parametrize("text", ["[]", '{"a": 0}', '{"a": "much"}', '{"a b": 1}', '{"a": 1e9}', "{"])
def test_invalid_weights_are_rejected(text):
    with pytest.raises(ValueError, match=r".+"):
        read_weights(text)


def test_late_requests_are_served_unless_the_targets_say_otherwise():
    assert AdmissionPolicy.from_settings(Settings()).serve_late
    assert not AdmissionPolicy.from_settings(Settings(slos='{"serve_late": false}')).serve_late


def test_weights_are_read():
    assert read_weights("") == {}
    assert read_weights('{"paying": 4, "": 0.5}') == {"paying": 4.0, "": 0.5}


@pytest.mark.parametrize(
    ("forcing", "local", "may"),
    [("auto", True, True), ("auto", False, False), ("anyone", False, True), ("nobody", True, False)],
)
def test_forcing_workers_is_allowed_locally_or_by_the_operator(forcing, local, may):
    settings = Settings(host="127.0.0.1" if local else "0.0.0.0", force_placement=forcing)
    assert RequestPolicy.from_settings(settings).may_force is may


def fault(policy: RequestPolicy, baton: object = None, **request_headers: str) -> Fault:
    found = policy.fault(request(baton), request_head(**request_headers), WORKERS)
    assert found is not None
    return found


def test_the_error_for_an_unknown_class_lists_the_classes():
    policy = RequestPolicy(slos=SLOS)

    assert (fault(policy, {"class": "bach"}).param, fault(policy, class_name="x").param) == (
        "baton.class",
        "x-baton-class",
    )
    assert "batch, chat" in fault(policy, {"class": "bach"}).message


def test_the_bodys_class_overrides_the_header():
    policy = RequestPolicy(slos=SLOS)
    facts, head = request({"class": "batch"}), request_head(class_name="nonsense", tenant="t-1")

    placement_request = policy.placement_request(facts, head, Mode.AUTO, 7, (1, 2))

    assert policy.fault(facts, head, WORKERS) is None
    assert (
        placement_request.priority,
        placement_request.targets.ttft_s,
        placement_request.tenant,
        placement_request.prompt_tokens,
    ) == (10, math.inf, "t-1", 7)


@pytest.mark.parametrize("wish", [{"prefill_worker": "p1"}, {"decode_worker": "d1"}, {"sources": []}])
def test_forcing_workers_needs_permission(wish):
    assert fault(RequestPolicy(), wish).reason is Reason.FORBIDDEN
    assert RequestPolicy(may_force=True).fault(request(wish), request_head(), WORKERS) is None


@pytest.mark.parametrize("wish", [{"prefill_worker": "x"}, {"decode_worker": "x"}, {"sources": ["a", "x"]}])
def test_an_unknown_forced_worker_is_named(wish):
    found = fault(RequestPolicy(may_force=True), {"prefill_worker": "p1", **wish})

    assert (found.reason, found.param) == (None, f"baton.{next(iter(wish))}")
    assert "`x`" in found.message


def test_a_body_cannot_exceed_the_allowed_priority():
    assert fault(RequestPolicy(), {"priority": -1}).reason is Reason.FORBIDDEN
    assert (
        RequestPolicy(slos=read_slos('{"priority_min": -5}')).fault(request({"priority": -5}), request_head(), WORKERS)
        is None
    )
    assert RequestPolicy().placement_request(request({"priority": 7}), request_head(), Mode.AUTO, 1, ()).priority == 7


@pytest.mark.parametrize("tenant", ["a b", "a.b", "ü", "x" * 129])
def test_invalid_tenant_names_are_rejected(tenant):
    assert fault(RequestPolicy(), tenant=tenant).param == "x-baton-tenant"


def test_the_bodys_mode_overrides_the_header():
    placement_request = RequestPolicy().placement_request(
        request({"mode": "decode_first"}), request_head(), Mode.AGGREGATED, 1, ()
    )

    assert placement_request.mode is Mode.DECODE_FIRST
    assert RequestPolicy().placement_request(request(), request_head(), Mode.AGGREGATED, 1, ()).mode is Mode.AGGREGATED


def test_forced_workers_are_passed_on_unchanged():
    wish = {"prefill_worker": "p1", "decode_worker": "d1", "sources": ["a", "b"]}
    forced = RequestPolicy(may_force=True).placement_request(request(wish), request_head(), Mode.AUTO, 1, ()).forced

    assert forced is not None
    assert (forced.prefill_worker, forced.decode_worker, forced.sources) == ("p1", "d1", ("a", "b"))


@pytest.mark.parametrize(
    ("baton", "param"),
    [
        ([], "baton"),
        ("x", "baton"),
        ({"mod": "auto"}, "baton.mod"),
        ({"mode": "fast"}, "baton.mode"),
        ({"mode": 1}, "baton.mode"),
        ({"prefill_worker": "a.b"}, "baton.prefill_worker"),
        ({"decode_worker": ""}, "baton.decode_worker"),
        ({"sources": "a"}, "baton.sources"),
        ({"sources": ["a"] * 17}, "baton.sources"),
        ({"class": 1}, "baton.class"),
        ({"priority": True}, "baton.priority"),
        ({"priority": 1001}, "baton.priority"),
        ({"ttft_s": 0}, "baton.ttft_s"),
        ({"itl_s": "1"}, "baton.itl_s"),
        ({"itl_s": 10**400}, "baton.itl_s"),
    ],
    ids=str,
)
def test_invalid_options_are_named(baton, param):
    facts = request(baton)

    assert facts.fault is not None
    assert facts.fault.param == param
    assert facts.options.forced is None


@pytest.mark.parametrize("baton", [None, {}, {"mode": None, "sources": None, "priority": None}])
def test_options_may_be_omitted(baton):
    facts = request(baton)

    assert facts.fault is None
    assert RequestPolicy().fault(facts, request_head(), WORKERS) is None


def test_other_endpoints_have_no_options():
    assert read_request("/v1/embeddings", b'{"input":"x","baton":"theirs"}').fault is None


def test_a_line_of_a_batch_has_no_targets_and_the_least_urgent_priority():
    policy = RequestPolicy(slos=read_slos('{"default": {"ttft_s": 1}}'))
    for baton in ({}, {"priority": 0, "ttft_s": 0.5}):
        line = policy.placement_request(request(baton), request_head(is_batch=True), Mode.AUTO, 1, ())
        assert (line.priority, line.targets.ttft_s, line.targets.itl_s) == (PRIORITY_MAX, math.inf, math.inf)
