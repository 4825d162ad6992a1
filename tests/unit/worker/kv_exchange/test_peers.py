"""The peers of a worker: when each is asked for its handshake, and what the engine learns."""

from __future__ import annotations

import math

import msgspec
import pytest

from connector.messages import PeerGone
from services.worker.kv_exchange.peers import (
    ASKS_AT_ONCE_MAX,
    CONNECTING_S_MAX,
    KEEP_ALIVE_S,
    MISSING_S_MAX,
    PEERS_MAX,
    RECONNECT_S,
    REFUSED_S,
    RETRY_S,
    PeerTable,
)
from shared.contracts.workers import WorkerPhase
from tests.support.fleet_builders import FINGERPRINT, record
from tests.unit.worker.kv_exchange.fakes import handshake


def book() -> PeerTable:
    return PeerTable("me", FINGERPRINT)


def connected(worker_id: str = "w1", epoch: int = 1, now: float = 0.0) -> PeerTable:
    one = book()
    one.record(record(worker_id, epoch=epoch), now)
    one.due(now)
    one.answered(worker_id, handshake(worker_id, epoch), now, now)
    return one


def gone(worker_id: str = "w1", epoch: int = 1) -> list[PeerGone]:
    return [PeerGone(worker_id=worker_id, epoch=epoch)]


@pytest.mark.parametrize(
    ("other", "is_apart"),
    [
        ({"connector": "baton-2/nixl-1.5.1/LIBFABRIC"}, True),
        ({"connector": "baton-1/nixl-1.5.1"}, False),
        ({"connector": "baton-2/nixl-1.5.1/LIBFABRIC", "model": "another"}, False),
        ({"connector": "baton-2/nixl-1.5.1/LIBFABRIC", "revision": "another"}, False),
    ],
    ids=["another plug-in", "another version", "another model", "another revision"],
)
def test_a_worker_of_the_model_with_another_plug_in_is_told_of(other: dict[str, str], is_apart: bool):
    its = msgspec.structs.replace(record("w1"), fingerprint=msgspec.structs.replace(FINGERPRINT, **other))
    why = book().apart(its)

    assert bool(why) == is_apart
    assert not is_apart or ("WORKER_KV_BACKEND=LIBFABRIC" in why and "UCX" in why)


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
        record("w1", engine_version="another release"),
    ],
    ids=["itself", "starting", "other KV", "other release"],
)
def test_workers_of_another_fingerprint_are_not_asked(other):
    one = book()

    one.record(other, 0.0)

    assert one.due(0.0) == []
    assert one.next_at() == math.inf


def test_the_clock_offset_is_an_upper_bound():
    one = book()
    one.record(record("w1"), 0.0)
    one.due(10.0)

    (peer,), _gone = one.answered("w1", handshake("w1", clock_s=500.25), requested_at=10.0, now=10.5)

    assert peer.clock_ahead_s == 490.25


def test_a_peer_is_asked_again_periodically():
    one = connected(now=0.0)

    assert one.due(KEEP_ALIVE_S - 0.1) == []
    assert one.next_at() == KEEP_ALIVE_S
    assert one.due(KEEP_ALIVE_S) == ["w1"]


def test_an_unresponsive_peer_is_asked_again_after_a_pause():
    one = book()
    one.record(record("w1"), 0.0)
    one.due(0.0)
    one.failed("w1", 2.0)

    one.want(["w1"], 2.0)

    assert one.due(2.0) == []
    assert one.due(2.0 + RETRY_S) == ["w1"]


def test_a_needed_peers_handshake_is_requested_at_once():
    one = connected(now=0.0)

    one.want(["w1", "nobody"], 1.0)

    assert one.due(1.0) == ["w1"]


def test_a_peer_that_cannot_be_connected_is_asked_after_a_pause():
    one = connected(now=0.0)
    one.failed_to_open("w1", 1, 1.0)
    one.want(["w1"], 1.0)

    assert one.connected == 0
    assert one.due(1.0) == []
    assert one.due(1.0 + RECONNECT_S) == ["w1"]


def test_a_refused_peer_is_not_asked_in_any_epoch_until_its_time_is_over():
    one = connected(epoch=1)

    assert one.refuse("w1", 10.0 + REFUSED_S) == gone(epoch=1)
    one.record(record("w1", epoch=2), 11.0)
    one.want(["w1"], 11.0)

    assert one.due(9.9 + REFUSED_S) == []
    assert one.records == []
    assert one.next_at() == 10.0 + REFUSED_S
    one.expired(10.0 + REFUSED_S)
    assert one.due(10.0 + REFUSED_S) == ["w1"]
    assert [record.worker_id for record in one.records] == ["w1"]


def test_a_worker_may_be_refused_before_it_is_known():
    one = book()
    one.refuse("w1", REFUSED_S)

    one.record(record("w1"), 1.0)

    assert one.due(1.0) == []
    assert one.due(REFUSED_S) == ["w1"]


def test_a_peer_counts_as_connecting_until_the_engine_reports():
    one = connected(now=0.0)
    assert one.connecting(1.0) == ["w1"]

    one.due(KEEP_ALIVE_S)
    one.answered("w1", handshake("w1"), KEEP_ALIVE_S, KEEP_ALIVE_S)
    assert one.connecting(KEEP_ALIVE_S) == ["w1"]
    assert one.connecting(CONNECTING_S_MAX) == []

    one.opened("w1", 1)
    assert one.connecting(KEEP_ALIVE_S) == []
    one.due(2 * KEEP_ALIVE_S)
    one.answered("w1", handshake("w1"), 2 * KEEP_ALIVE_S, 2 * KEEP_ALIVE_S)
    assert one.connecting(2 * KEEP_ALIVE_S) == []

    again = connected(now=0.0)
    again.failed_to_open("w1", 1, 1.0)
    assert again.connecting(1.0) == []


def test_a_new_epoch_ends_the_old_one_and_is_asked():
    one = connected(epoch=1)

    assert one.record(record("w1", epoch=2), 1.0) == gone(epoch=1)
    assert one.due(1.0) == ["w1"]


def test_a_record_of_an_earlier_epoch_changes_nothing():
    one = connected(epoch=2)

    assert one.record(record("w1", epoch=1), 1.0) == []
    assert one.connected == 1


def test_a_handshake_of_a_later_epoch_ends_the_earlier_one():
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
def test_a_handshake_of_another_worker_is_a_failure(stale):
    one = book()
    one.record(record("w1", epoch=2), 0.0)
    one.due(0.0)

    assert one.answered("w1", stale, 0.0, 0.0) == ([], [])
    assert one.connected == 0
    assert one.due(RETRY_S) == ["w1"]


def test_a_handshake_after_the_loss_of_the_peer_is_ignored():
    one = book()
    one.record(record("w1"), 0.0)
    one.due(0.0)
    one.lost("w1", 1)

    assert one.answered("w1", handshake("w1"), 0.0, 0.1) == ([], [])


def test_a_lost_peer_is_gone_at_once_its_next_epoch_is_not():
    assert connected(epoch=1).lost("w1", 1) == gone()
    assert connected(epoch=2).lost("w1", 1) == []


def test_a_record_that_returns_in_time_changes_nothing():
    one = connected(now=0.0)
    one.missing("w1", 1.0)

    assert one.next_at() == 1.0 + MISSING_S_MAX
    one.record(record("w1"), 1.0 + MISSING_S_MAX / 2)

    assert one.expired(1.0 + MISSING_S_MAX) == []


def test_a_record_that_stays_away_ends_the_peer():
    one = connected(now=0.0)
    one.missing("w1", KEEP_ALIVE_S)
    one.due(KEEP_ALIVE_S)
    one.answered("w1", handshake("w1"), KEEP_ALIVE_S, KEEP_ALIVE_S)

    assert one.expired(KEEP_ALIVE_S + MISSING_S_MAX) == gone()
    assert one.connected == 0


def test_a_draining_peer_stays_connected():
    one = connected()

    assert one.record(record("w1", WorkerPhase.DRAINING), 1.0) == []
    assert one.connected == 1
    assert one.record(record("w1", WorkerPhase.GONE), 2.0) == gone()


def test_a_large_fleet_is_asked_a_few_at_a_time():
    one = book()
    for number in range(3 * ASKS_AT_ONCE_MAX):
        one.record(record(f"w{number}"), 0.0)

    first = one.due(0.0)

    assert len(first) == ASKS_AT_ONCE_MAX
    assert one.next_at() == math.inf
    one.answered(first[0], handshake(first[0]), 0.0, 0.0)
    assert len(one.due(0.0)) == 1


def test_the_number_of_peers_is_bounded():
    one = book()
    for number in range(PEERS_MAX + 5):
        one.record(record(f"w{number}"), 0.0)

    asked = 0
    while due := one.due(0.0):
        asked += len(due)
        for worker_id in due:
            one.answered(worker_id, handshake(worker_id), 0.0, 0.0)

    assert asked == PEERS_MAX
