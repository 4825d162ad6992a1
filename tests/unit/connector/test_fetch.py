"""A fetch requests leases, reads granted blocks, tries other sources for missing ones, and releases all leases."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from connector.messages import ReadPart
from shared.contracts.kv_exchange import GroupBlocks, KvOffer, NoGrant
from tests.support.kv_messages import one_group
from tests.unit.connector.fetching import BLOCK_TOKENS, HASHES, A, B, Bench, follow, source

OFFER = KvOffer(
    worker_id="a", epoch=1, lease_id="L", groups=one_group([4, 5]), boundary=64, last_hash=HASHES[1], until_s=50.0
)


@pytest.fixture
def bench():
    return Bench()


def test_blocks_after_the_local_prefix_are_requested_by_hash(bench):
    bench.fetch(start=2, sources=[source(A)])

    assert [(request.worker_id, request.hashes) for request in bench.lease_requests()] == [("a", b"".join(HASHES[2:]))]


def test_the_count_is_unknown_until_the_holder_replies(bench):
    fetch = bench.fetch(sources=[source(A)])

    assert fetch.tokens() is None
    bench.grant(fetch, request=0, blocks=[7, 8, 9])
    assert fetch.tokens() == 3 * BLOCK_TOKENS


def test_granted_blocks_are_read_into_the_allocated_blocks(bench):
    fetch = bench.fetch(start=1, sources=[source(A)])
    bench.grant(fetch, request=0, blocks=[7, 8])

    bench.begin(fetch, [101, 102])

    (read,) = bench.reads()
    assert (read.peer, read.remote_blocks, read.local_blocks) == (A, [7, 8], [101, 102])


def test_only_the_failed_part_is_missing(bench):
    fetch = bench.fetch(sources=[source(A)], goal=4)
    bench.grant(fetch, request=0, blocks=[7, 8, 9, 10])
    bench.begin(fetch, [101, 102, 103, 104])
    (read,) = bench.reads()

    bench.part(fetch, read, first=0, count=2)
    bench.part(fetch, read, first=2, count=1, failure="gone")
    bench.part(fetch, read, first=3, count=1)

    assert fetch.over
    assert (fetch.missing(), fetch.arrived) == ([103], 2 * BLOCK_TOKENS)


def test_missing_blocks_are_requested_from_the_next_source(bench):
    fetch = bench.fetch(goal=4, sources=[source(A), source(B)])
    bench.grant(fetch, request=0, blocks=[7], reason=NoGrant.NOT_HELD)

    second = bench.lease_requests()[-1]
    assert (second.worker_id, second.hashes) == ("b", b"".join(HASHES[1:4]))
    assert fetch.tokens() is None


def test_a_store_that_loads_is_waited_for(bench):
    fetch = bench.fetch(goal=2, sources=[source(A)])
    for _time in range(3):
        bench.later(0.4)
        bench.grant(fetch, request=0, blocks=[], final=False)
        fetch.on_time(bench.now)
        assert fetch.tokens() is None
    bench.grant(fetch, request=0, blocks=[7, 8])

    assert bench.lease_requests()[0].load_s == fetch.plan.limits.load_s_max
    assert fetch.tokens() == 2 * BLOCK_TOKENS


@pytest.mark.parametrize(
    ("replies", "worth_s", "s_max"), [(0, 0.0, 0.5), (2, 0.0, 1.3), (20, 0.0, 4.5), (20, 1.0, 1.5)]
)
def test_a_store_that_loads_for_too_long_or_falls_silent_is_given_up(bench, replies, worth_s, s_max):
    fetch = bench.fetch(goal=2, sources=[source(A, worth_s=worth_s), source(B)])
    began = bench.now
    while len(bench.lease_requests()) < 2:
        bench.later(0.4)
        if bench.now - began < (replies + 0.5) * 0.4:
            bench.grant(fetch, request=0, blocks=[], final=False)
        fetch.on_time(bench.now)

    assert bench.lease_requests()[0].load_s == (worth_s or fetch.plan.limits.load_s_max)
    assert s_max <= bench.now - began < s_max + 0.401
    assert fetch.reads()[0].failure == NoGrant.UNREACHABLE


def test_blocks_of_a_failed_read_are_requested_elsewhere(bench):
    fetch = bench.fetch(goal=2, sources=[source(A), source(B)])
    bench.grant(fetch, request=0, blocks=[7, 8])
    bench.begin(fetch, [101, 102])
    (read,) = bench.reads()
    bench.part(fetch, read, first=0, count=2, failure="gone")

    bench.grant(fetch, request=1, blocks=[3, 4])
    again = bench.reads()[-1]
    bench.part(fetch, again, first=0, count=2)

    assert again.peer == B
    assert fetch.over
    assert fetch.missing() == []


def test_two_sources_each_supply_their_part(bench):
    fetch = bench.fetch(goal=4, sources=[source(A, end=2), source(B, first=2)])

    assert [(request.worker_id, request.hashes) for request in bench.lease_requests()] == [
        ("a", b"".join(HASHES[:2])),
        ("b", b"".join(HASHES[2:4])),
    ]
    bench.grant(fetch, request=1, blocks=[5, 6])
    assert fetch.tokens() is None
    bench.grant(fetch, request=0, blocks=[1, 2])
    assert fetch.tokens() == 4 * BLOCK_TOKENS


def test_blocks_of_a_followed_source_are_read_as_they_arrive(bench):
    fetch = bench.fetch(goal=4, sources=[follow(A)])
    assert fetch.tokens() == 4 * BLOCK_TOKENS
    bench.begin(fetch, [101, 102, 103, 104])

    bench.grant(fetch, request=0, blocks=[7, 8], final=False)
    bench.grant(fetch, request=0, blocks=[9, 10], first=2)

    assert [(read.remote_blocks, read.local_blocks) for read in bench.reads()] == [
        ([7, 8], [101, 102]),
        ([9, 10], [103, 104]),
    ]


def test_a_follow_that_ends_early_leaves_the_rest_missing(bench):
    fetch = bench.fetch(goal=3, sources=[follow(A)])
    bench.begin(fetch, [101, 102, 103])
    bench.grant(fetch, request=0, blocks=[7], final=False)
    bench.part(fetch, bench.reads()[0], first=0, count=1)

    bench.later(31.0)
    fetch.on_time(bench.now)

    assert fetch.over
    assert fetch.missing() == [102, 103]


def test_an_unresponsive_holder_is_abandoned_after_its_deadline(bench):
    fetch = bench.fetch(sources=[source(A)])

    bench.later(0.6)
    fetch.on_time(bench.now)

    assert (fetch.tokens(), fetch.over) == (0, True)
    assert bench.released() == [bench.lease_requests()[0].ask_id]


def test_an_offer_of_the_same_prompt_needs_no_lease_request(bench):
    fetch = bench.fetch(goal=2, take=OFFER)
    bench.begin(fetch, [101, 102])

    assert bench.lease_requests() == []
    assert bench.reads()[0].remote_blocks == [4, 5]


@pytest.mark.parametrize(
    "wrong",
    [
        {"last_hash": HASHES[2]},
        {"boundary": 0},
        {"boundary": -32},
        {"groups": []},
        {"groups": one_group([4, 5]) * 2},
        {"groups": [GroupBlocks(first=0, block_ids=b"abcde")]},
    ],
    ids=str,
)
def test_an_offer_of_another_prompt_or_a_malformed_one_is_ignored(bench, wrong):
    fetch = bench.fetch(goal=2, take=replace(OFFER, **wrong))

    assert fetch.tokens() == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"last_hash": b"x" * 32},
        {"first": 1},
        {"epoch": 2},
        {"worker_id": "b"},
        {"blocks": [1, 2, 3, 4, 5, 6, 7, 8, 9]},
        {"ask_id": "another-request"},
    ],
)
def test_a_grant_that_does_not_match_the_request_is_rejected(bench, wrong):
    fetch = bench.fetch(goal=3, sources=[source(A)])

    bench.grant(fetch, request=0, **({"blocks": [7, 8]} | wrong))

    assert not fetch.tokens()


def test_no_read_begins_that_might_end_after_the_lease(bench):
    fetch = bench.fetch(goal=1, sources=[source(A)])
    bench.grant(fetch, request=0, blocks=[7], until_s=bench.now + 0.2)
    bench.begin(fetch, [101])

    assert bench.reads() == []
    assert (fetch.over, fetch.missing()) == (True, [101])


def test_lease_expiry_is_converted_from_the_holders_clock(bench):
    bench.ahead[A] = 5.0
    fetch = bench.fetch(goal=1, sources=[source(A)])
    bench.grant(fetch, request=0, blocks=[7], until_s=bench.now + 9.0)
    bench.begin(fetch, [101])

    assert bench.reads()[0].until_s == pytest.approx(bench.now + 9.0 - 5.0 - 0.25)


def test_an_unconnected_source_is_given_up_at_its_deadline(bench):
    del bench.ahead[A]
    fetch = bench.fetch(goal=1, sources=[source(A)])
    bench.grant(fetch, request=0, blocks=[7])
    bench.begin(fetch, [101])
    assert not fetch.over

    bench.later(3.1)
    fetch.on_time(bench.now)

    assert (fetch.over, bench.reads(), fetch.missing()) == (True, [], [101])


def test_a_stopped_fetch_releases_now_and_ends_with_its_reads(bench):
    fetch = bench.fetch(goal=2, sources=[source(A)])
    bench.grant(fetch, request=0, blocks=[7, 8])
    bench.begin(fetch, [101, 102])

    fetch.stop()

    assert bench.released() == [bench.lease_requests()[0].ask_id]
    assert not fetch.over
    fetch.on_part(ReadPart(bench.reads()[0].read_id, 0, 2, 0, 0.0, 0.0, "cancelled"), bench.now)
    assert fetch.over


def test_a_lost_holder_is_not_asked_to_release(bench):
    fetch = bench.fetch(goal=2, sources=[source(A)])
    bench.grant(fetch, request=0, blocks=[7, 8])

    fetch.on_peer_gone(A, bench.now)

    assert (fetch.tokens(), fetch.over, bench.released()) == (0, True, [])


def test_each_source_is_reported_with_its_result(bench):
    fetch = bench.fetch(goal=2, sources=[source(A)])
    bench.later(0.1)
    bench.grant(fetch, request=0, blocks=[7, 8])
    bench.begin(fetch, [101, 102])
    bench.part(fetch, bench.reads()[0], first=0, count=2, started=5.0, ended=7.0, size=640)

    (report,) = fetch.reads()

    assert (report.worker_id, report.tokens, report.bytes, report.read_s) == ("a", 64, 640, 2.0)
    assert report.granted_at - report.requested_at == pytest.approx(0.1)
