"""Whom a worker may exchange KV with: who is asked when, and what the engine is told."""

from __future__ import annotations

import math

import msgspec
import pytest

from connector.messages import PeerGone
from services.worker.kv_exchange.peers import (
    ASKS_AT_ONCE_MAX,
    KEEP_ALIVE_S,
    MISSING_S_MAX,
    PEERS_MAX,
    RECONNECT_S,
    RETRY_S,
    PeerTable,
)
from shared.contracts.workers import WorkerPhase
from tests.support.fleet_builders import FINGERPRINT, record
from tests.unit.worker.kv_exchange.fakes import handshake


def book() -> PeerTable:
    return PeerTable("me", FINGERPRINT.key())


def connected(worker_id: str = "w1", epoch: int = 1, now: float = 0.0) -> PeerTable:
    one = book()
    one.record(record(worker_id, epoch=epoch), now)
    one.due(now)
    one.answered(worker_id, handshake(worker_id, epoch), now, now)
    return one


def gone(worker_id: str = "w1", epoch: int = 1) -> list[PeerGone]:
    return [PeerGone(worker_id=worker_id, epoch=epoch)]


def test_a_ready_worker_is_asked_at_once_and_only_once():
    one = book()
    one.record(record("w1"), 0.0)

    assert one.due(0.0) == ["w1"]
    assert one.due(0.0) == []


@pytest.mark.parametrize(
    "other",
    [
        record("me"),
        record("w1", WorkerPhase.STARTING),
        msgspec.structs.replace(record("w1"), fingerprint=msgspec.structs.replace(FINGERPRINT, dtype="bfloat16")),
    ],
    ids=["itself", "starting", "other KV"],
)
def test_whose_kv_cannot_be_read_is_not_asked(other):
    one = book()

    one.record(other, 0.0)

    assert one.due(0.0) == []
    assert one.next_at() == math.inf


def test_the_clock_is_ahead_by_no_more_than_the_answer_can_have_taken():
    one = book()
    one.record(record("w1"), 0.0)
    one.due(10.0)

    (peer,), _gone = one.answered("w1", handshake("w1", clock_s=500.25), asked_at=10.0, now=10.5)

    assert peer.clock_ahead_s == 490.25


def test_a_peer_is_asked_again_to_keep_it_alive():
    one = connected(now=0.0)

    assert one.due(KEEP_ALIVE_S - 0.1) == []
    assert one.next_at() == KEEP_ALIVE_S
    assert one.due(KEEP_ALIVE_S) == ["w1"]


def test_who_does_not_answer_is_asked_again_soon_but_not_at_once_even_when_wanted():
    one = book()
    one.record(record("w1"), 0.0)
    one.due(0.0)
    one.failed("w1", 2.0)

    one.want(["w1"], 2.0)

    assert one.due(2.0) == []
    assert one.due(2.0 + RETRY_S) == ["w1"]


def test_a_wanted_peer_is_asked_at_once():
    one = connected(now=0.0)

    one.want(["w1", "nobody"], 1.0)

    assert one.due(1.0) == ["w1"]


def test_a_peer_that_the_engine_cannot_connect_to_is_left_alone_for_a_while_even_when_wanted():
    one = connected(now=0.0)
    one.refused("w1", 1, 1.0)
    one.want(["w1"], 1.0)

    assert one.connected == 0
    assert one.due(1.0) == []
    assert one.due(1.0 + RECONNECT_S) == ["w1"]


def test_a_new_life_ends_the_old_one_and_is_asked():
    one = connected(epoch=1)

    assert one.record(record("w1", epoch=2), 1.0) == gone(epoch=1)
    assert one.due(1.0) == ["w1"]


def test_a_record_of_an_earlier_life_changes_nothing():
    one = connected(epoch=2)

    assert one.record(record("w1", epoch=1), 1.0) == []
    assert one.connected == 1


def test_an_answer_of_a_later_life_than_the_record_says_ends_the_earlier():
    one = connected(epoch=1)
    one.due(KEEP_ALIVE_S)

    peers, ended = one.answered("w1", handshake("w1", epoch=2), KEEP_ALIVE_S, KEEP_ALIVE_S)

    assert ended == gone(epoch=1)
    assert [peer.handshake.epoch for peer in peers] == [2]


@pytest.mark.parametrize(
    "stale",
    [
        handshake("w1", epoch=1),
        handshake("w2", epoch=2),
        handshake("w1", epoch=2, fingerprint="another"),
        handshake("w1", epoch=2, clock_s=math.nan),
    ],
    ids=["earlier life", "somebody else", "other KV", "no time"],
)
def test_an_answer_that_is_not_the_peers_own_is_none(stale):
    one = book()
    one.record(record("w1", epoch=2), 0.0)
    one.due(0.0)

    assert one.answered("w1", stale, 0.0, 0.0) == ([], [])
    assert one.connected == 0
    assert one.due(RETRY_S) == ["w1"]


def test_an_answer_after_the_peer_was_lost_is_none():
    one = book()
    one.record(record("w1"), 0.0)
    one.due(0.0)
    one.lost("w1", 1)

    assert one.answered("w1", handshake("w1"), 0.0, 0.1) == ([], [])


def test_a_lost_peer_is_gone_at_once_but_not_its_next_life():
    assert connected(epoch=1).lost("w1", 1) == gone()
    assert connected(epoch=2).lost("w1", 1) == []


def test_a_record_that_comes_back_soon_was_never_gone():
    one = connected(now=0.0)
    one.missing("w1", 1.0)

    assert one.next_at() == 1.0 + MISSING_S_MAX
    one.record(record("w1"), 1.0 + MISSING_S_MAX / 2)

    assert one.expired(1.0 + MISSING_S_MAX) == []


def test_a_record_that_stays_away_means_gone_also_when_it_is_kept_alive_meanwhile():
    one = connected(now=0.0)
    one.missing("w1", KEEP_ALIVE_S)
    one.due(KEEP_ALIVE_S)
    one.answered("w1", handshake("w1"), KEEP_ALIVE_S, KEEP_ALIVE_S)

    assert one.expired(KEEP_ALIVE_S + MISSING_S_MAX) == gone()
    assert one.connected == 0


def test_a_draining_peer_still_holds_what_others_want():
    one = connected()

    assert one.record(record("w1", WorkerPhase.DRAINING), 1.0) == []
    assert one.connected == 1
    assert one.record(record("w1", WorkerPhase.GONE), 2.0) == gone()


def test_a_large_fleet_is_asked_a_few_at_a_time_and_nobody_waits_for_time_to_pass():
    one = book()
    for number in range(3 * ASKS_AT_ONCE_MAX):
        one.record(record(f"w{number}"), 0.0)

    first = one.due(0.0)

    assert len(first) == ASKS_AT_ONCE_MAX
    assert one.next_at() == math.inf
    one.answered(first[0], handshake(first[0]), 0.0, 0.0)
    assert len(one.due(0.0)) == 1


def test_there_are_no_more_peers_than_may_be():
    one = book()
    for number in range(PEERS_MAX + 5):
        one.record(record(f"w{number}"), 0.0)

    asked = 0
    while due := one.due(0.0):
        asked += len(due)
        for worker_id in due:
            one.answered(worker_id, handshake(worker_id), 0.0, 0.0)

    assert asked == PEERS_MAX
