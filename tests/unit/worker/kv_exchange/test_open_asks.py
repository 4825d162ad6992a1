"""Which grants a reader accepts, and how unanswered asks end."""

from __future__ import annotations

import math

import pytest

from connector.messages import EngineCall, Peer, PeerGone
from services.worker.kv_exchange.engine_calls import merge_calls
from services.worker.kv_exchange.message_handler import ASKS_MAX, OpenAsks, is_sound_lease, unclaimed
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import (
    CHAIN_BLOCKS_MAX,
    KV_GROUPS_MAX,
    LEASE_BLOCKS_MAX,
    PROMPT_TOKENS_MAX,
    GroupBlocks,
    KvGrant,
    NoGrant,
    ReleaseKv,
)
from tests.support.kv_messages import one_group
from tests.unit.worker.kv_exchange.fakes import HASH, grant, handshake, lease


def asked(*asks) -> OpenAsks:
    book = OpenAsks()
    for ask in asks or (lease(),):
        book.asked(ask)
    return book


def still_open(book: OpenAsks) -> int:
    """Asks that a lost connection would end; it ends them."""
    return len(book.all_unreachable())


def test_grants_of_an_open_ask_are_accepted_until_the_final_one():
    book = asked()
    first, last = grant(lease(), final=False), grant(lease(), groups=one_group([2], first=1))

    assert book.answered(first) is first
    assert book.answered(last) is last
    assert still_open(book) == 0


def test_a_grant_after_the_final_one_is_released():
    book = asked()
    book.answered(grant(lease()))

    assert book.answered(grant(lease(), groups=one_group([2], first=1))) == unclaimed(grant(lease()))


def test_an_ask_that_the_holders_engine_answered_directly_is_over():
    book = asked(lease(), lease(ask_id="open"))

    book.answered_directly([lease().ask_id, "unknown"])

    assert still_open(book) == 1


def test_a_grant_for_an_earlier_epoch_of_this_worker_is_released():
    stray = grant(lease(ask_id="of-an-earlier-life"))

    assert asked().answered(stray) == ReleaseKv(
        worker_id=WorkerId("h1"), epoch=Epoch(1), reader_id=WorkerId("r1"), ask_ids=["of-an-earlier-life"]
    )


def test_an_unasked_refusal_is_ignored():
    assert OpenAsks().answered(grant(lease(), lease_id="", groups=[], reason=NoGrant.NOT_HELD)) is None


def test_a_grant_of_another_holder_is_released_and_the_ask_stays_open():
    book = asked()

    assert isinstance(book.answered(grant(lease(), worker_id=WorkerId("h2"))), ReleaseKv)
    assert still_open(book) == 1


@pytest.mark.parametrize("answer", [{"epoch": Epoch(2)}, {"reason": NoGrant.EPOCH}], ids=["its epoch", "its reason"])
def test_a_grant_of_another_epoch_of_the_holder_is_a_refusal(answer):
    book = asked()

    told = book.answered(grant(lease(), **answer))

    assert isinstance(told, KvGrant)
    assert (told.reason, told.groups, told.epoch, told.final) == (NoGrant.EPOCH, [], 1, True)
    assert still_open(book) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"groups": [GroupBlocks(first=0, block_ids=b"\1\0\0")]},
        {"last_hash": b"short"},
        {"lease_id": ""},
        {"groups": one_group([1], first=-1)},
        {"groups": one_group([1], first=1 << 60)},
        {"groups": one_group([1]) * (KV_GROUPS_MAX + 1)},
        {"until_s": math.nan},
        {"clock_s": math.inf},
        {"groups": one_group(range(LEASE_BLOCKS_MAX + 1))},
        {"boundary": -1},
        {"boundary": PROMPT_TOKENS_MAX + 1},
        {"groups": [], "boundary": 32},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_malformed_grant_ends_its_ask_as_unreachable(wrong):
    book = asked()

    told = book.answered(grant(lease(), final=False, **wrong))

    assert isinstance(told, KvGrant)
    assert (told.reason, told.groups, told.final) == (NoGrant.UNREACHABLE, [], True)
    assert still_open(book) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"hashes": b""},
        {"hashes": HASH + b"x"},
        {"first": -1},
        {"first": CHAIN_BLOCKS_MAX + 1},
        {"have": -1},
        {"have": PROMPT_TOKENS_MAX + 1},
        {"hashes": HASH * (LEASE_BLOCKS_MAX + 1)},
        {"reader": "a.b"},
        {"reader": ">"},
        {"ask_id": ""},
        {"hold_s": math.inf},
        {"hold_s": -1.0},
        {"follow_s": math.nan},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_malformed_ask_never_reaches_the_engine(wrong):
    assert is_sound_lease(lease())
    assert not is_sound_lease(lease(**wrong))


def test_an_undelivered_ask_ends_as_unreachable():
    nothing = asked().unreachable("a1")

    assert nothing is not None
    assert (nothing.ask_id, nothing.reason, nothing.final) == ("a1", NoGrant.UNREACHABLE, True)
    assert OpenAsks().unreachable("a1") is None


def test_a_lost_connection_ends_every_ask():
    book = asked(lease(ask_id="a1"), lease(ask_id="a2"))

    assert [(one.ask_id, one.reason) for one in book.all_unreachable()] == [
        ("a1", NoGrant.UNREACHABLE),
        ("a2", NoGrant.UNREACHABLE),
    ]
    assert still_open(book) == 0


def test_asks_beyond_the_maximum_end_the_oldest():
    book = asked(*(lease(ask_id=f"a{number}") for number in range(ASKS_MAX)))

    (ended,) = book.asked(lease(ask_id="one-more"))

    assert ended.ask_id == "a0"
    assert still_open(book) == ASKS_MAX


def test_asks_to_an_ended_epoch_are_dropped():
    book = asked(lease(ask_id="a1", epoch=1), lease(ask_id="a2", epoch=2), lease("h2", ask_id="a3"))

    book.gone(WorkerId("h1"), Epoch(1))

    assert [one.ask_id for one in book.all_unreachable()] == ["a2", "a3"]


def test_released_asks_are_not_open():
    book = asked()

    book.released(ReleaseKv(worker_id=WorkerId("h1"), epoch=Epoch(1), reader_id=WorkerId("r1"), ask_ids=["a1"]))

    assert still_open(book) == 0


def test_a_lease_released_in_the_same_call_is_left_out():
    calls = [
        EngineCall(leases=[lease(ask_id="a1"), lease(ask_id="a2")]),
        EngineCall(releases=[unclaimed(grant(lease()))]),
    ]

    both = merge_calls(calls)

    assert [ask.ask_id for ask in both.leases] == ["a2"]
    assert len(both.releases) == 1
    assert [ask.ask_id for ask in merge_calls(calls[::-1]).leases] == ["a1", "a2"]


def test_a_peer_that_returns_in_the_same_call_is_not_forgotten():
    back = EngineCall(peers=[Peer(handshake=handshake("w1", epoch=2), clock_ahead_s=0.0)])
    lost = EngineCall(gone=[PeerGone(worker_id=WorkerId("w1"), epoch=Epoch(epoch)) for epoch in (1, 2)])

    assert [gone.epoch for gone in merge_calls([lost, back]).gone] == [1]
    assert [gone.epoch for gone in merge_calls([back, lost]).gone] == [1, 2]
