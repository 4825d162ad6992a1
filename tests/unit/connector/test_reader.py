"""What each request fetches before it is computed, and its transfer report."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest

from connector.groups import full_attention
from connector.messages import Peer, ReadPart
from connector.reader.fetch import FetchLimits
from connector.reader.peers import Peers
from connector.reader.reader import Reader, Settled
from shared.contracts.kv_exchange import (
    FirstToken,
    KvGrant,
    KvGroup,
    KvGroupKind,
    KvHandshake,
    KvOffer,
    KvSource,
    LegOrder,
)
from tests.support.kv_messages import one_group

HASHES = [bytes([at]) * 32 for at in range(8)]
OFFER = KvOffer(
    worker_id="p", epoch=1, lease_id="L", groups=one_group([4, 5, 6]), boundary=96, last_hash=HASHES[2], until_s=50.0
)
HAND_OVER = LegOrder(take=OFFER, sources=[KvSource(worker_id="p", epoch=1)])
READ_BACK = LegOrder(sources=[KvSource(worker_id="p", epoch=1)], fetch_min_tokens=64)


@dataclass
class Request:
    tokens: int = 100
    request_id: str = "r"
    num_preemptions: int = 0

    @property
    def num_tokens(self):
        return self.tokens

    @property
    def block_hashes(self):
        return HASHES[: self.tokens // 32]


class Bench:
    """A reader with a fixed clock, connected to a worker named p."""

    def __init__(self):
        self.peers = Peers()
        self.reader = Reader(("me", 1), full_attention(32), self.peers, FetchLimits(), lambda: 10.0)
        self.connect()

    def connect(self):
        handshake = KvHandshake(
            worker_id="p",
            epoch=1,
            version=1,
            fingerprint="f",
            clock_s=0.0,
            hash_block_size=32,
            alignment=32,
            groups=[KvGroup(kind=KvGroupKind.FULL, block_size=32)],
            blocks=9,
            ranks=[],
        )
        self.peers.know(Peer(handshake=handshake, clock_ahead_s=0.0))

    def grant(self, blocks, reason=None, **fields):
        request = self.reader.outbox.lease_requests[-1]
        names = [request.hashes[at : at + 32] for at in range(0, len(request.hashes), 32)]
        self.reader.on_grant(
            KvGrant(
                reader_id="me",
                worker_id="p",
                epoch=1,
                ask_id=request.ask_id,
                lease_id=request.ask_id,
                groups=one_group(blocks, request.first),
                last_hash=names[len(blocks) - 1] if blocks else b"",
                until_s=50.0,
                reason=reason,
                **fields,
            )
        )

    def read_all(self, failure=""):
        for read in self.reader.outbox.reads:
            self.reader.on_part(ReadPart(read.read_id, 0, len(read.local_blocks), 96, 1.0, 2.0, failure))
        self.reader.outbox.reads.clear()

    def released(self):
        return [name for one in self.reader.outbox.releases for name in (*one.ask_ids, *one.lease_ids)]


@pytest.fixture
def bench():
    return Bench()


def test_an_offered_prompt_is_fetched_except_its_partial_block(bench):
    request = Request()

    assert bench.reader.matched(request, HAND_OVER, 0) == 96
    bench.reader.allocated(request, [[101, 102, 103, 104]], 96)
    bench.read_all()

    assert bench.reader.settle() == Settled({"r"})
    bench.reader.allocated(request, (), 0)
    transfer_report = bench.reader.finished("r", HAND_OVER, None)
    assert (transfer_report.local_tokens, transfer_report.fetched_tokens, transfer_report.recomputed_tokens) == (
        0,
        96,
        4,
    )
    assert bench.released() == ["L"]


def test_the_last_token_of_a_fetched_prompt_is_computed(bench):
    request = Request(tokens=96)

    bench.reader.matched(request, HAND_OVER, 0)
    bench.reader.allocated(request, [[101, 102, 103]], 96)
    bench.read_all()
    bench.reader.settle()
    bench.reader.allocated(request, (), 0)

    transfer_report = bench.reader.finished("r", HAND_OVER, None)
    assert (transfer_report.fetched_tokens, transfer_report.recomputed_tokens) == (95, 1)


def test_missing_blocks_are_reported_and_the_request_continues(bench):
    request = Request()
    bench.reader.matched(request, HAND_OVER, 0)
    bench.reader.allocated(request, [[101, 102, 103, 104]], 96)

    bench.read_all(failure="gone")

    assert bench.reader.settle() == Settled({"r"}, {101, 102, 103})


def test_a_failed_read_is_not_retried_at_the_same_source(bench):
    request = Request()
    bench.reader.matched(request, HAND_OVER, 0)
    bench.reader.allocated(request, [[101, 102, 103, 104]], 96)
    bench.read_all(failure="gone")
    bench.reader.settle()

    assert bench.reader.outbox.lease_requests == []


def test_a_preempted_request_requests_its_blocks_by_hash(bench):
    request = Request()
    bench.reader.matched(request, HAND_OVER, 0)
    bench.reader.allocated(request, [[101, 102, 103, 104]], 96)
    bench.read_all()
    bench.reader.settle()
    bench.reader.allocated(request, (), 0)

    request.num_preemptions, request.tokens = 1, 130
    assert bench.reader.matched(request, HAND_OVER, 0) is None
    bench.grant([7, 8, 9])
    assert bench.reader.matched(request, HAND_OVER, 0) == 96
    bench.reader.allocated(request, [[1, 2, 3, 4, 5]], 96)
    bench.read_all()
    bench.reader.settle()
    bench.reader.allocated(request, (), 0)

    transfer_report = bench.reader.finished("r", HAND_OVER, None)
    assert (transfer_report.prompt_tokens, transfer_report.refetched_tokens, transfer_report.reprefilled_tokens) == (
        100,
        96,
        34,
    )


def test_fewer_tokens_than_the_minimum_are_not_fetched(bench):
    assert bench.reader.matched(Request(tokens=40), READ_BACK, 0) == 0
    assert bench.reader.outbox.lease_requests == []


@pytest.mark.parametrize(
    ("named", "reported"), [(-1, 3 * 32), (0, 0), (32, 32)], ids=["before it was computed", "computed", "partly cached"]
)
def test_the_prefill_workers_cached_tokens_are_those_of_the_whole_prompt(bench, named, reported):
    follows = LegOrder(sources=[KvSource(worker_id="p", epoch=1, follow=True, leg_id="leg")])
    request = Request()

    assert bench.reader.matched(request, follows, 2 * 32) == 32  # It asks for the third block only.
    bench.grant([7], prefill_cached_tokens=named)

    assert bench.reader.transfer_report("r").prefill_cached_tokens == reported


@pytest.mark.parametrize(("granted", "refused"), [([7, 8, 9], False), ([7], True)])
def test_a_request_below_its_cache_threshold_is_refused(bench, granted, refused):
    order = LegOrder(sources=READ_BACK.sources, cache_hit_threshold=0.5)
    request = Request()
    bench.reader.matched(request, order, 0)
    bench.grant(granted)

    matched = bench.reader.matched(request, order, 0)

    assert (matched is None, bench.reader.refused) == (refused, ["r"] if refused else [])


def test_locally_cached_tokens_count_for_the_threshold(bench):
    assert bench.reader.matched(Request(), LegOrder(cache_hit_threshold=0.9), 96) == 0
    assert bench.reader.refused == []


def test_an_empty_prompt_is_never_refused(bench):
    assert bench.reader.matched(Request(tokens=0), LegOrder(cache_hit_threshold=1.0), 0) == 0
    assert bench.reader.refused == []


def test_a_request_does_not_wait_for_an_unreachable_worker(bench):
    bench.peers.forget(("p", 1))
    bench.peers.shun(("p", 1))

    assert bench.reader.matched(Request(), HAND_OVER, 0) == 0


def test_a_reconnected_worker_is_used_again(bench):
    bench.peers.shun(("p", 1))
    bench.connect()

    assert bench.reader.matched(Request(), HAND_OVER, 0) == 96


def test_an_aborted_request_keeps_its_blocks_until_reads_end(bench):
    request = Request()
    bench.reader.matched(request, HAND_OVER, 0)
    bench.reader.allocated(request, [[101, 102, 103, 104]], 96)

    bench.reader.finished("r", HAND_OVER, None)
    assert bench.reader.settle() == Settled()
    assert bench.reader.outbox.cancel

    bench.read_all(failure="cancelled")
    assert bench.reader.settle() == Settled({"r"})
    assert bench.reader.idle


def test_an_unneeded_offer_is_released(bench):
    bench.reader.matched(Request(), HAND_OVER, 96)

    bench.reader.finished("r", HAND_OVER, None)

    assert bench.released() == ["L"]


def test_equal_prompts_are_fetched_once(bench):
    first, second = Request(), Request(request_id="second")
    other_offer = LegOrder(
        take=msgspec.structs.replace(OFFER, lease_id="M"), sources=[KvSource(worker_id="p", epoch=1)]
    )
    assert bench.reader.matched(first, HAND_OVER, 0) == 96
    bench.reader.allocated(first, [[101, 102, 103, 104]], 96)

    assert bench.reader.matched(second, other_offer, 0) is None
    bench.read_all()
    assert bench.reader.matched(second, other_offer, 0) is None, "not cached before the first is scheduled again"
    assert bench.reader.settle() == Settled({"r"})

    assert bench.reader.matched(second, other_offer, 96) == 0
    bench.reader.allocated(second, (), 0)
    assert bench.reader.outbox.reads == []
    assert sorted(bench.released()) == ["L", "M"], "the second offer is not needed"
    assert bench.reader.finished("second", None, other_offer).local_tokens == 96


@pytest.mark.parametrize("cut", ["aborted", "aborted while it is read", "failed"])
def test_a_prompt_is_fetched_again_when_the_equal_fetch_breaks_off(bench, cut):
    first, second = Request(), Request(request_id="second")
    assert bench.reader.matched(first, HAND_OVER, 0) == 96
    if cut != "aborted":
        bench.reader.allocated(first, [[101, 102, 103, 104]], 96)
    assert bench.reader.matched(second, READ_BACK, 0) is None

    if cut == "failed":
        bench.read_all(failure="broken")
        bench.reader.on_peer_gone(("p", 1))
        bench.reader.settle()
    else:
        bench.reader.finished("r", None, HAND_OVER)

    assert bench.reader.matched(second, READ_BACK, 0) is None
    assert bench.reader.outbox.lease_requests, "it asks by itself"


def test_a_prompt_of_which_more_is_cached_waits_for_the_fetch_that_began_before(bench):
    assert bench.reader.matched(Request(), HAND_OVER, 0) == 96
    bench.reader.allocated(Request(), [[101, 102, 103, 104]], 96)

    assert bench.reader.matched(Request(request_id="second"), HAND_OVER, 32) is None


def test_other_prompts_do_not_wait_for_a_fetch(bench):
    longer, less_cached = Request(tokens=140, request_id="longer"), Request(request_id="less cached")
    assert bench.reader.matched(Request(), HAND_OVER, 32) == 64

    assert bench.reader.matched(longer, HAND_OVER, 0) is None
    assert bench.reader.matched(less_cached, HAND_OVER, 0) == 96
    assert len(bench.reader.outbox.lease_requests) == 1, "the longer prompt's last block"


def test_nothing_of_ended_requests_is_kept(bench):
    for number in range(3):
        request = Request(request_id=f"r{number}")
        assert bench.reader.matched(request, HAND_OVER, 0) == 96
        bench.reader.allocated(request, [[101, 102, 103, 104]], 96)
        if number == 1:
            bench.reader.finished(request.request_id, None, HAND_OVER)
        bench.read_all()
        bench.reader.settle()
        bench.reader.finished(request.request_id, None, HAND_OVER)

    assert not bench.reader._by_goal
    assert bench.reader.idle


def test_the_second_copy_of_a_last_grant_begins_no_second_answer(bench):
    """It comes over the bus, after a notice has brought the first one."""
    request = Request(tokens=96)
    follows = LegOrder(sources=[KvSource(worker_id="p", epoch=1, follow=True, leg_id="leg")])
    assert bench.reader.matched(request, follows, 0) == 96
    bench.reader.allocated(request, [[1, 2, 3]], 96)
    first_token = FirstToken(token_id=5, basis=bytes(16))

    bench.grant([4, 5, 6], number=0, first_token=first_token)
    assert bench.reader.take_first_tokens() == {"r": first_token}
    bench.grant([4, 5, 6], number=0, first_token=first_token)
    assert bench.reader.take_first_tokens() == {}
