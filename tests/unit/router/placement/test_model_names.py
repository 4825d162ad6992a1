"""Aliases of models: requests by them count for the model, and never go to a worker that does not know them."""

from __future__ import annotations

from services.router.auth.api_keys import Key
from services.router.placement.model_names import with_primary_name
from services.router.placement.policy import RequestHeaders, RequestPolicy
from services.router.placement.request_fields import Mode, read_request
from services.router.state.cluster_view import ClusterView
from tests.support.fleet_builders import record

PATH = "/v1/completions"


def cluster(*workers: tuple[str, ...]) -> ClusterView:
    """One worker for each list of names."""
    view = ClusterView()
    for number, names in enumerate(workers):
        view.record(record(f"w{number}", models=names), 0.0)
    return view


def named(view: ClusterView, body: bytes = b'{"model": "chat", "prompt": "x"}') -> tuple[str, str]:
    facts = with_primary_name(read_request(PATH, body), view)
    return facts.model, facts.alias


def test_an_alias_stands_for_its_model():
    assert named(cluster(("m", "chat"), ("m", "chat"), ("n",))) == ("m", "chat")


def test_the_alias_stays_while_a_worker_of_the_model_does_not_know_it():
    view = cluster(("m", "chat"), ("m",))
    assert named(view) == ("chat", "")

    view.record(record("w1", epoch=2, models=("m", "chat")), 1.0)
    assert named(view) == ("m", "chat")


def test_an_alias_of_two_models_stands_for_neither():
    assert named(cluster(("m", "chat"), ("n", "chat"))) == ("chat", "")


def test_unknown_names_stay_as_they_are():
    assert named(cluster(("m",))) == ("chat", "")


def test_without_a_name_the_only_model_is_meant():
    unnamed = read_request(PATH, b'{"prompt": "x"}')

    assert with_primary_name(unnamed, cluster(("m", "chat"), ("m", "chat"))).fault is None
    fault = with_primary_name(unnamed, cluster(("m",), ("n",))).fault
    assert fault is not None
    assert fault.param == "model"


def test_a_key_for_a_model_is_one_for_its_aliases_and_not_the_other_way_round():
    view = cluster(("m", "chat"))
    asked = {
        name: with_primary_name(read_request(PATH, b'{"model": "%s"}' % name.encode()), view) for name in ("m", "chat")
    }

    def allowed(*models: str) -> list[str]:
        headers = RequestHeaders(mode=Mode.AUTO, key=Key(models=frozenset(models)))
        return [name for name, facts in asked.items() if RequestPolicy().fault(facts, headers, ()) is None]

    assert allowed("m") == ["m", "chat"]
    assert allowed("chat") == ["chat"]
    assert allowed("other") == []
