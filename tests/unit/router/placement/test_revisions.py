"""Revisions side by side: shares hold, conversations stay together, routers agree without messages."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from services.router.admission.admission import Admission
from services.router.admission.policy import AdmissionPolicy
from services.router.admission.queues import QueueEntry
from services.router.http.api import list_models
from services.router.placement.fleet import Fleet
from services.router.placement.placement import Placement, PlacementPolicy, PlacementRequest, Rejection
from services.router.placement.placer import CostPlacer
from services.router.placement.policy import RequestPolicy
from services.router.placement.revisions import read_shares
from services.router.request.facts import ForcedWorkers, Mode, RequestFacts
from services.router.request.fields import read_request
from services.router.request.model_name import with_primary_name
from services.router.service import check
from services.router.settings import Settings
from services.router.state.cluster_view import ClusterView
from services.router.state.prefix_index import PrefixIndex
from services.router.state.revision_names import ANY, means
from shared.contracts.api_keys import Key
from shared.contracts.engine_paths import CHAT, COMPLETIONS
from shared.contracts.ids import WorkerId
from shared.contracts.workers import Role
from shared.runtime.settings import SettingsError
from tests.support.builders import request_head
from tests.support.fleet_builders import load, record

NOW = 0.0
SHARES = read_shares('{"m": {"v1": 90, "v2": 10}}')
SYSTEM = {"role": "system", "content": "You are as helpful as you can be. " * 20}
PATH = "/v1/completions"


def chat(*texts: str, **fields: object) -> RequestFacts:
    turns = [SYSTEM, *({"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts))]
    return read_request(CHAT, msgspec.json.encode({"model": "m", "messages": turns, **fields}))


def complete(prompt: object, **fields: object) -> RequestFacts:
    return read_request(COMPLETIONS, msgspec.json.encode({"model": "m", "prompt": prompt, **fields}))


def first(facts: RequestFacts, shares=SHARES) -> str:
    return shares.order(facts)[0]


def test_conversations_with_one_system_prompt_follow_the_operators_shares():
    served = Counter(first(chat(f"question {number}")) for number in range(2000))

    assert served["v2"] == pytest.approx(200, abs=60)
    assert served["v1"] + served["v2"] == 2000


@pytest.mark.parametrize("number", range(40))
def test_all_turns_of_a_conversation_use_one_revision(number: int):
    texts = [f"question {number}", "an answer", "and then?", "another", "and so on?"]

    assert len({SHARES.order(chat(*texts[: 2 * turn + 1])) for turn in range(3)}) == 1


def test_a_growing_prompt_stays_on_its_revision():
    prompt = "In the beginning there was a very long story. " * 10

    assert len({first(complete(prompt + "More. " * turn)) for turn in range(20)}) == 1
    assert len({first(complete(list(range(100, 400 + turn)))) for turn in range(20)}) == 1


def test_a_client_can_name_its_conversation():
    assert len({first(complete(f"{number}", prompt_cache_key="mine")) for number in range(50)}) == 1
    assert len({first(complete("the same", prompt_cache_key=f"{number}")) for number in range(50)}) == 2


def test_a_growing_share_gains_conversations_and_loses_none():
    more = read_shares('{"m": {"v1": 50, "v2": 50}}')
    chats = [chat(f"question {number}") for number in range(500)]

    moved = Counter((first(one), first(one, more)) for one in chats)

    assert moved["v2", "v1"] == 0
    assert moved["v1", "v2"] > 100


def test_a_revision_without_a_share_is_the_last_resort():
    shares = read_shares('{"m": {"v1": 1, "v2": 0}}')

    assert shares.order(chat("hello")) == ("v1", ANY)
    assert (shares.share("m", "v1"), shares.share("m", "v2"), shares.share("m", "v3")) == (1.0, 0.0, 0.0)


def test_models_without_shares_are_placed_by_cost():
    facts = msgspec.structs.replace(chat("hello"), model="other")

    assert SHARES.order(facts) == ()
    assert SHARES.share("other", "v1") is None


def test_an_invalid_body_does_not_fail_the_revision_choice():
    for body in (b"", b"{", b'{"messages": 7}', b'{"messages": [[]], "prompt_cache_key": 1}', b'{"messages": null}'):
        for path in (CHAT, COMPLETIONS, "/v1/embeddings"):
            facts = msgspec.structs.replace(read_request(path, body), model="m")
            assert set(SHARES.order(facts)) == {"v1", "v2", ANY}


@pytest.mark.parametrize(
    ("name", "revision", "does"),
    [
        ("v1", "v1", True),
        ("v1", "v10", False),
        ("release-1", "release-10", False),
        ("0a1b2c3", "0a1b2c3d4e5f", True),
        ("0a1b2c", "0a1b2c3d4e5f", False),
        (ANY, "anything", True),
    ],
)
def test_only_commit_hashes_may_be_abbreviated(name: str, revision: str, does: bool):
    assert means(name, revision) is does


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "it is written like"),
        ('{"m": {"v1": -1}}', "must be 0 to"),
        ('{"m": {"v1": 0}}', "no revision of m has a share above 0"),
        ('{"m": {}}', "no revision of m"),
        ('{"m": {"": 1}}', "empty name"),
        ('{"m": {"v1": "most"}}', "it is written like"),
    ],
)
def test_invalid_shares_stop_the_router_with_a_reason(text: str, message: str):
    with pytest.raises(SettingsError, match="ROUTER_REVISION_SHARES") as refused:
        check(Settings(revision_shares=text))
    assert message in str(refused.value)


class Upgrade:
    """Workers of two revisions: pairs p1 and d1 of v1, p2 and d2 of v2."""

    def __init__(self) -> None:
        self.fleet = Fleet(PlacementPolicy())
        for number in (1, 2):
            self.add(f"p{number}", Role.PREFILL, f"v{number}")
            self.add(f"d{number}", Role.DECODE, f"v{number}")

    @property
    def cluster(self) -> ClusterView:
        return self.fleet.cluster

    def add(self, worker_id: str, role: Role, revision: str) -> None:
        self.cluster.record(record(worker_id, role=role, connector="baton-1", revision=revision), NOW)
        self.cluster.report(load(worker_id, role=role), NOW)

    def lose(self, *worker_ids: str) -> None:
        for worker_id in worker_ids:
            self.cluster.lose(WorkerId(worker_id), self.cluster.workers[WorkerId(worker_id)].record.epoch)

    def place(self, *revisions: str, **what: object) -> Placement | Rejection:
        request = PlacementRequest(model="m", prompt_tokens=100, revisions=revisions, **what)
        return CostPlacer(self.cluster, PrefixIndex(), self.fleet.policy).place(request, NOW)

    def served_by(self, *revisions: str, **what: object) -> tuple[str, str]:
        placement = self.place(*revisions, **what)
        assert isinstance(placement, Placement), placement
        return placement.prefill.record.worker_id if placement.prefill else "", placement.decode.record.worker_id


def test_both_legs_go_to_the_chosen_revision():
    upgrade = Upgrade()

    assert upgrade.served_by("v1", ANY) == ("p1", "d1")
    assert upgrade.served_by("v2", ANY) == ("p2", "d2")


def test_conversations_of_a_departed_revision_move_to_the_new_one():
    upgrade = Upgrade()
    upgrade.lose("p1", "d1")

    assert upgrade.served_by("v1", "v2", ANY) == ("p2", "d2")
    assert upgrade.served_by("v1", ANY) == ("p2", "d2")


def test_a_revision_with_one_role_serves_aggregated_requests_only():
    upgrade = Upgrade()
    upgrade.lose("p2")

    assert upgrade.served_by("v2", "v1", ANY) == ("", "d2")
    assert upgrade.served_by("v2", "v1", ANY, mode=Mode.DISAGGREGATED) == ("p1", "d1")


def test_a_migrating_request_stays_in_its_revision():
    upgrade = Upgrade()
    upgrade.lose("p1", "d1")

    assert isinstance(upgrade.place("v1"), Rejection)


def test_forced_workers_of_two_revisions_are_not_paired():
    forced = ForcedWorkers(prefill_worker=WorkerId("p1"), decode_worker=WorkerId("d2"))

    assert isinstance(Upgrade().place(forced=forced), Rejection)


def test_forced_sources_of_another_revision_are_not_used():
    forced = ForcedWorkers(decode_worker=WorkerId("d1"), sources=(WorkerId("p1"), WorkerId("d2")))
    placement = Upgrade().place(forced=forced, mode=Mode.AGGREGATED)

    assert isinstance(placement, Placement)
    assert [source.worker_id for source in placement.sources] == ["p1"]


def test_forcing_workers_chooses_their_revision():
    facts = chat("hello", baton={"decode_worker": "d2"})

    assert RequestPolicy(shares=SHARES).placement_request(facts, request_head(), Mode.AUTO, 1, ()).revisions == ()
    assert RequestPolicy(shares=SHARES).placement_request(chat("hello"), request_head(), Mode.AUTO, 1, ()).revisions


def test_waiting_for_a_full_revision_blocks_no_other_revision():
    upgrade = Upgrade()
    for worker_id in ("p2", "d2"):
        role = upgrade.cluster.workers[WorkerId(worker_id)].record.role
        upgrade.cluster.report(load(worker_id, role=role, legs=16), NOW)
    admission = Admission(AdmissionPolicy(), upgrade.fleet.place)
    wants_new, wants_old = (
        PlacementRequest(model="m", prompt_tokens=100, revisions=(name, ANY)) for name in ("v2", "v1")
    )

    assert admission.offer(QueueEntry(wants_new, NOW), NOW) is None
    assert isinstance(admission.offer(QueueEntry(wants_old, NOW), NOW), Placement)


def test_the_model_list_shows_revisions_and_shares():
    upgrade = Upgrade()

    (listed,) = list_models(upgrade.fleet, SHARES, NOW, created=7)
    assert (listed["id"], listed["created"]) == ("m", 7)
    assert listed["revisions"] == [
        {"revision": "v1", "share": 0.9, "workers": {"prefill": 1, "decode": 1}},
        {"revision": "v2", "share": 0.1, "workers": {"prefill": 1, "decode": 1}},
    ]

    upgrade.lose("p1", "d1")
    (listed,) = list_models(upgrade.fleet, read_shares(""), NOW, created=7)
    assert listed["revisions"] == [{"revision": "v2", "share": None, "workers": {"prefill": 1, "decode": 1}}]


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
        headers = request_head(key=Key(models=frozenset(models)))
        return [name for name, facts in asked.items() if RequestPolicy().fault(facts, headers, ()) is None]

    assert allowed("m") == ["m", "chat"]
    assert allowed("chat") == ["chat"]
    assert allowed("other") == []
