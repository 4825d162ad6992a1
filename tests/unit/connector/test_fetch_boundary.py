"""A fetch of a model with windows and states brings all that a boundary needs, from one holder, or nothing of use."""

from __future__ import annotations

from itertools import count

import pytest
from msgspec.structs import replace

from connector.groups import Blocks, GroupPlan
from connector.messages import ReadPart
from connector.reader.fetch import ANOTHER_END, MISMATCH, NOT_BEYOND, Fetch, FetchLimits, FetchPlan, Outbox, Shortcuts
from connector.reader.lease_request import Source
from shared.contracts.kv_exchange import GroupBlocks, KvGrant, KvGroup, KvGroupKind, KvOffer, NoGrant, pack_block_ids
from tests.unit.connector.fetching import ME, A, B

UNIT, PROMPT = 32, 320
GROUPS = GroupPlan(
    [
        KvGroup(kind=KvGroupKind.STATE, block_size=64),
        KvGroup(kind=KvGroupKind.FULL, block_size=64),
        KvGroup(kind=KvGroupKind.WINDOW, block_size=32, window=50),
    ],
    UNIT,
    UNIT,
)
HASHES = [bytes([at]) * 32 for at in range(PROMPT // UNIT)]
STATE, FULL, WINDOW = 0, 1, 2


def groups_for(have: int, boundary: int, base: int = 0) -> list[GroupBlocks]:
    """What a holder grants; its block ids tell group and index."""
    runs = [GROUPS.needed(number, have, boundary) for number in range(3)]
    return [
        GroupBlocks(first=run.start, block_ids=pack_block_ids(base + 100 * number + index for index in run))
        for number, run in enumerate(runs)
    ]


def chunk_of(have: int, end: int) -> list[GroupBlocks]:
    """What a holder grants of a followed prompt while it is computed."""
    ids = pack_block_ids(100 + index for index in range(have // 64, end // 64))
    return [
        GroupBlocks(first=0, block_ids=b""),
        GroupBlocks(first=have // 64, block_ids=ids),
        GroupBlocks(first=0, block_ids=b""),
    ]


def offer_of(end: int, **wrong) -> KvOffer:
    fields = {"groups": groups_for(0, end), "boundary": end, "last_hash": HASHES[end // UNIT - 1]} | wrong
    return KvOffer(worker_id="a", epoch=1, lease_id="L", until_s=50.0, **fields)


class Bench:
    def __init__(self):
        self.now = 10.0
        self.outbox = Outbox(part_blocks=[1, 1, 1])
        self._numbers = count(1)
        self.ended = 0

    def fetch(self, *peers, start=0, common=None, goal=PROMPT - UNIT, follow=False, take=None, ends=()):
        sources = [
            Source(peer=peer, first=0, end=end, follow=follow and peer == A)
            for peer, end in zip(peers, ends or [PROMPT] * len(peers), strict=True)
        ]
        plan = FetchPlan(
            reader=ME,
            groups=GROUPS,
            hashes=HASHES,
            start=start,
            common=start if common is None else common,
            goal=goal,
            sources=sources,
            take=take,
            limits=FetchLimits(),
            outbox=self.outbox,
            clock_ahead=lambda _peer: 0.0,
            shortcuts=Shortcuts(),
            next_number=lambda: next(self._numbers),
        )
        return Fetch(plan, self.now)

    @property
    def asked(self):
        """The last lease request."""
        return self.outbox.lease_requests[-1]

    def grant(self, fetch, end, *, groups=None, base=0, **fields):
        """The holder that was asked last grants up to a boundary, or with 0 what ``groups`` have."""
        asked, boundary = self.asked, end
        if groups is None:
            groups = groups_for(asked.have, end, base) if end else []
        elif not end:
            end = (groups[FULL].first + len(groups[FULL].block_ids) // 4) * 64
        grant = KvGrant(
            reader_id="me",
            worker_id=asked.worker_id,
            epoch=asked.epoch,
            ask_id=asked.ask_id,
            lease_id=asked.ask_id if groups else "",
            groups=groups,
            boundary=boundary,
            last_hash=HASHES[end // UNIT - 1] if end else b"",
            until_s=self.now + 10.0,
        )
        fetch.on_grant(replace(grant, **fields), self.now)

    def begin(self, fetch, *, here=0):
        """Allocate blocks; the first ``here`` of the window's are cached."""
        start, local = fetch.plan.start, []
        for number in range(3):
            run = GROUPS.needed(number, start, start + fetch.tokens())
            first = run.start + (here if number == WINDOW else 0)
            local.append(Blocks(number, first, [1000 + 100 * number + index for index in range(first, run.stop)]))
        fetch.begin(local, self.now)

    def reads(self):
        """The reads that have not ended."""
        return self.outbox.reads[self.ended :]

    def end_reads(self, fetch, *, failing=()):
        """End all reads; those of the groups in ``failing`` without success."""
        reads, self.ended = self.reads(), len(self.outbox.reads)
        for read in reads:
            assert [local % 1000 for local in read.local_blocks] == [remote % 1000 for remote in read.remote_blocks]
            failure = "gone" if read.group in failing else ""
            fetch.on_part(ReadPart(read.read_id, 0, len(read.local_blocks), 7, 1.0, 2.0, failure), self.now)

    def released(self):
        return [name for release in self.outbox.releases for name in (*release.ask_ids, *release.lease_ids)]


@pytest.fixture
def bench():
    return Bench()


def read_blocks(bench):
    return {read.group: read.remote_blocks for read in bench.reads()}


def test_all_that_the_boundary_needs_is_requested_from_one_source_and_read(bench):
    fetch = bench.fetch(A, B)
    assert [
        (asked.worker_id, asked.first, asked.have, len(asked.hashes) // 32) for asked in bench.outbox.lease_requests
    ] == [("a", 0, 0, 9)]
    assert fetch.tokens() is None

    bench.grant(fetch, 288)
    assert fetch.tokens() == 288
    bench.begin(fetch)
    assert read_blocks(bench) == {STATE: [4], FULL: [100, 101, 102, 103, 104], WINDOW: [207, 208]}
    bench.end_reads(fetch)

    assert (fetch.over, fetch.arrived, fetch.full_end) == (True, 288, 256)
    assert bench.released() == [bench.asked.ask_id]
    assert [read.tokens for read in fetch.reads()] == [288]


def test_only_full_attention_that_is_not_here_is_requested(bench):
    fetch = bench.fetch(A, start=192)

    assert (bench.asked.have, bench.asked.first) == (192, 128 // UNIT), "a window may begin before"
    bench.grant(fetch, 288)
    bench.begin(fetch)
    assert read_blocks(bench) == {STATE: [4], FULL: [103, 104], WINDOW: [207, 208]}


def test_an_earlier_boundary_is_taken_if_it_goes_beyond_what_is_here(bench):
    fetch = bench.fetch(A, start=64)
    bench.grant(fetch, 160)

    assert fetch.tokens() == 96
    bench.begin(fetch)
    assert read_blocks(bench) == {STATE: [2], FULL: [101, 102], WINDOW: [203, 204]}
    bench.end_reads(fetch)
    assert fetch.arrived == 96


def test_a_boundary_within_what_is_here_is_noted_and_the_next_source_is_asked(bench):
    fetch = bench.fetch(A, B, start=192)
    bench.grant(fetch, 160)

    assert (fetch.behind, bench.asked.worker_id) == (160, "b")
    bench.grant(fetch, 0, reason=NoGrant.NOT_HELD)
    assert (fetch.tokens(), fetch.over) == (0, True)
    assert [read.failure for read in fetch.reads()] == [NOT_BEYOND, NoGrant.NOT_HELD]


def test_blocks_of_a_window_that_are_here_are_not_read(bench):
    fetch = bench.fetch(A)
    bench.grant(fetch, 288)

    bench.begin(fetch, here=1)

    assert read_blocks(bench)[WINDOW] == [208]
    bench.end_reads(fetch)
    assert fetch.arrived == 288


def test_a_source_that_holds_nothing_is_followed_by_the_next_one(bench):
    fetch = bench.fetch(A, B)
    bench.grant(fetch, 0, reason=NoGrant.NOT_HELD)

    assert bench.asked.worker_id == "b"
    bench.grant(fetch, 288)
    assert fetch.tokens() == 288


@pytest.mark.parametrize("failing", [{STATE}, {WINDOW}, {FULL}, {STATE, FULL, WINDOW}])
def test_what_a_source_fails_to_deliver_comes_from_the_next_one_at_the_same_boundary(bench, failing):
    fetch = bench.fetch(A, B)
    bench.grant(fetch, 288)
    bench.begin(fetch)
    bench.end_reads(fetch, failing=failing)

    assert not fetch.over
    assert (bench.asked.worker_id, bench.asked.first + len(bench.asked.hashes) // 32) == ("b", 9)
    assert bench.asked.have == (0 if FULL in failing else 288)
    bench.grant(fetch, 288, base=5000)
    assert set(read_blocks(bench)) == failing, "what has arrived is not read again"
    bench.end_reads(fetch)

    assert (fetch.over, fetch.arrived) == (True, 288)


def test_nothing_is_requested_again_while_a_read_of_the_failed_source_may_still_write(bench):
    fetch = bench.fetch(A, B)
    bench.grant(fetch, 288)
    bench.begin(fetch)
    state, full, window = bench.reads()
    fetch.on_part(ReadPart(state.read_id, 0, 1, 0, 1.0, 2.0, "gone"), bench.now)
    fetch.on_part(ReadPart(full.read_id, 0, 5, 0, 1.0, 2.0), bench.now)

    assert bench.asked.worker_id == "a"
    fetch.on_part(ReadPart(window.read_id, 0, 2, 0, 1.0, 2.0), bench.now)
    assert bench.asked.worker_id == "b"


@pytest.mark.parametrize("failing", [STATE, WINDOW])
def test_without_another_source_full_attention_is_all_that_has_arrived(bench, failing):
    fetch = bench.fetch(A)
    bench.grant(fetch, 288)
    bench.begin(fetch)
    bench.end_reads(fetch, failing={failing})

    assert (fetch.over, fetch.arrived, fetch.full_end) == (True, 0, 256)


def test_another_boundary_of_a_second_source_is_of_no_use_once_blocks_are_allocated(bench):
    fetch = bench.fetch(A, B)
    bench.grant(fetch, 288)
    bench.begin(fetch)
    bench.end_reads(fetch, failing={STATE})

    bench.grant(fetch, 256)

    assert (fetch.over, fetch.arrived) == (True, 0)


def test_a_followed_source_sends_full_attention_first_and_the_rest_with_its_last_grant(bench):
    fetch = bench.fetch(B, A, follow=True)
    assert (bench.asked.worker_id, fetch.tokens()) == ("a", 288), "the one that computes the prompt, for all of it"
    bench.begin(fetch)

    bench.grant(fetch, 0, groups=chunk_of(0, 128), final=False)
    assert read_blocks(bench) == {FULL: [100, 101]}
    bench.end_reads(fetch)
    assert (fetch.full_end, fetch.arrived, fetch.over) == (128, 0, False)
    bench.grant(fetch, 0, groups=chunk_of(128, 256), final=False)
    bench.grant(fetch, 288, groups=groups_for(256, 288))
    assert [(read.group, read.remote_blocks) for read in bench.reads()] == [
        (FULL, [102, 103]),
        (STATE, [4]),
        (FULL, [104]),
        (WINDOW, [207, 208]),
    ]
    bench.end_reads(fetch)

    assert (fetch.over, fetch.arrived) == (True, 288)


def test_a_followed_source_that_ends_at_another_boundary_has_failed(bench):
    fetch = bench.fetch(A, follow=True)
    bench.begin(fetch)
    bench.grant(fetch, 0, groups=chunk_of(0, 128), final=False)
    bench.end_reads(fetch)

    bench.grant(fetch, 256, groups=groups_for(128, 256))

    assert (fetch.over, fetch.arrived, fetch.full_end) == (True, 0, 128)
    assert [read.failure for read in fetch.reads()] == [ANOTHER_END]


def test_a_followed_source_that_gives_up_leaves_the_rest_to_the_next_one(bench):
    fetch = bench.fetch(A, B, follow=True)
    bench.begin(fetch)
    bench.grant(fetch, 0, groups=chunk_of(0, 128), final=False)
    bench.end_reads(fetch)
    bench.grant(fetch, 0, reason=NoGrant.FOLLOW_OVER)

    assert (bench.asked.worker_id, bench.asked.have) == ("b", 128)
    bench.grant(fetch, 288, groups=groups_for(128, 288))
    bench.end_reads(fetch)
    assert fetch.arrived == 288


HOSTILE = [
    {"groups": groups_for(0, 288)[:2]},
    {"groups": groups_for(0, 288) * 2},
    {"groups": groups_for(0, 256)},
    {"groups": groups_for(64, 288)},
    {"groups": [*groups_for(0, 288)[:2], GroupBlocks(first=8, block_ids=pack_block_ids([208]))]},
    {"groups": [*groups_for(0, 288)[:2], GroupBlocks(first=6, block_ids=pack_block_ids([206, 207, 208]))]},
    {"groups": [*groups_for(0, 288)[:2], GroupBlocks(first=1 << 24, block_ids=pack_block_ids([207, 208]))]},
    {"groups": [GroupBlocks(first=-1, block_ids=pack_block_ids([4])), *groups_for(0, 288)[1:]]},
    {"groups": [GroupBlocks(first=4, block_ids=b"abcde"), *groups_for(0, 288)[1:]]},
    {"groups": [GroupBlocks(first=3, block_ids=pack_block_ids([3])), *groups_for(0, 288)[1:]]},
    {"groups": [*groups_for(0, 288)[:2], GroupBlocks(first=7, block_ids=pack_block_ids([207]))]},
    {"groups": groups_for(0, 288)[::-1]},
    {"groups": [GroupBlocks(first=4, block_ids=pack_block_ids([4, 5])), *groups_for(0, 288)[1:]]},
    {"boundary": 280},
    {"boundary": -288},
    {"boundary": 1 << 50},
    {"boundary": 0},
    {"last_hash": HASHES[7]},
    {"last_hash": b""},
]


@pytest.mark.parametrize("wrong", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_grant_is_refused_and_the_next_source_is_asked(bench, wrong):
    fetch = bench.fetch(A, B)
    bench.grant(fetch, 288, **wrong)

    assert bench.asked.worker_id == "b"
    assert fetch.reads()[0].failure == MISMATCH
    bench.grant(fetch, 288)
    bench.begin(fetch)
    assert {read.peer for read in bench.reads()} == {B}


def test_a_boundary_beyond_the_goal_is_refused(bench):
    fetch = bench.fetch(A, goal=256)
    bench.grant(fetch, 288)

    assert (fetch.tokens(), fetch.over) == (0, True)


def test_an_offer_is_taken_as_it_is(bench):
    fetch = bench.fetch(take=offer_of(288))

    assert (fetch.tokens(), bench.outbox.lease_requests) == (288, [])
    bench.begin(fetch)
    assert read_blocks(bench) == {STATE: [4], FULL: [100, 101, 102, 103, 104], WINDOW: [207, 208]}
    bench.end_reads(fetch)
    assert (fetch.arrived, bench.released()) == (288, ["L"])


def test_of_an_offer_only_what_is_not_here_is_read(bench):
    fetch = bench.fetch(take=offer_of(288), start=256)
    bench.begin(fetch)

    assert read_blocks(bench) == {STATE: [4], FULL: [104], WINDOW: [207, 208]}


@pytest.mark.parametrize("offer", [offer_of(288, **wrong) for wrong in HOSTILE], ids=range(len(HOSTILE)))
def test_a_hostile_offer_is_ignored_and_its_holder_is_asked_by_hashes(bench, offer):
    fetch = bench.fetch(A, take=offer)

    assert len(bench.outbox.lease_requests) == 1
    assert not fetch.tokens()


def test_an_offer_whose_state_does_not_arrive_is_asked_for_again_by_its_hashes(bench):
    fetch = bench.fetch(A, take=offer_of(288))
    bench.begin(fetch)
    bench.end_reads(fetch, failing={STATE})

    bench.grant(fetch, 288)
    assert read_blocks(bench) == {STATE: [4]}
    bench.end_reads(fetch)
    assert fetch.arrived == 288


def test_a_source_is_asked_for_no_more_than_its_boundary(bench):
    bench.fetch(A, ends=[200])

    assert len(bench.asked.hashes) // 32 == 192 // UNIT
