"""What each request fetches before it is computed, and the account of it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from connector.messages import Peer, ReadPart
from connector.reader.fetch import FetchLimits
from connector.reader.peers import Peers
from connector.reader.reader import Reader
from shared.contracts.kv_exchange import KvGrant, KvOffer, KvSource, LegOrder, pack_block_ids
from shared.contracts.kv_handshake import KvHandshake

HASHES = [bytes([at]) * 32 for at in range(8)]
OFFER = KvOffer(
    worker_id="p", epoch=1, lease_id="L", block_ids=pack_block_ids([4, 5, 6]), last_hash=HASHES[2], until_s=50.0
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


class Desk:
    """A reader whose time stands still, connected to a worker named p."""

    def __init__(self):
        self.peers = Peers()
        self.reader = Reader(("me", 1), 32, self.peers, FetchLimits(), lambda: 10.0)
        self.connect()

    def connect(self):
        handshake = KvHandshake(
            worker_id="p",
            epoch=1,
            version=1,
            fingerprint="f",
            clock_s=0.0,
            block_size=32,
            blocks=9,
            kv_heads=1,
            ranks=[],
        )
        self.peers.know(Peer(handshake=handshake, clock_ahead_s=0.0))

    def grant(self, blocks, reason=None):
        ask = self.reader.outbox.lease_requests[-1]
        names = [ask.hashes[at : at + 32] for at in range(0, len(ask.hashes), 32)]
        self.reader.on_grant(
            KvGrant(
                reader_id="me",
                worker_id="p",
                epoch=1,
                ask_id=ask.ask_id,
                lease_id=ask.ask_id,
                block_ids=pack_block_ids(blocks),
                last_hash=names[len(blocks) - 1] if blocks else b"",
                until_s=50.0,
                reason=reason,
            )
        )

    def read_all(self, failure=""):
        for read in self.reader.outbox.reads:
            self.reader.on_part(ReadPart(read.read_id, 0, len(read.local_blocks), 96, 1.0, 2.0, failure))
        self.reader.outbox.reads.clear()

    def released(self):
        return [name for one in self.reader.outbox.releases for name in (*one.ask_ids, *one.lease_ids)]


@pytest.fixture
def desk():
    return Desk()


def test_an_offered_prompt_is_fetched_but_for_its_tail(desk):
    request = Request()

    assert desk.reader.matched(request, HAND_OVER, 0) == 96
    desk.reader.allocated(request, [101, 102, 103, 104], 96)
    desk.read_all()

    assert desk.reader.settle() == ({"r"}, set())
    desk.reader.allocated(request, (), 0)
    transfer_report = desk.reader.finished("r", HAND_OVER, None)
    assert (transfer_report.local_tokens, transfer_report.fetched_tokens, transfer_report.recomputed_tokens) == (
        0,
        96,
        4,
    )
    assert desk.released() == ["L"]


def test_the_last_token_of_a_fetched_prompt_is_computed(desk):
    request = Request(tokens=96)

    desk.reader.matched(request, HAND_OVER, 0)
    desk.reader.allocated(request, [101, 102, 103], 96)
    desk.read_all()
    desk.reader.settle()
    desk.reader.allocated(request, (), 0)

    transfer_report = desk.reader.finished("r", HAND_OVER, None)
    assert (transfer_report.fetched_tokens, transfer_report.recomputed_tokens) == (95, 1)


def test_missing_blocks_are_named_and_the_request_continues(desk):
    request = Request()
    desk.reader.matched(request, HAND_OVER, 0)
    desk.reader.allocated(request, [101, 102, 103, 104], 96)

    desk.read_all(failure="gone")

    assert desk.reader.settle() == ({"r"}, {101, 102, 103})


def test_a_failed_read_is_not_retried_at_the_same_source(desk):
    request = Request()
    desk.reader.matched(request, HAND_OVER, 0)
    desk.reader.allocated(request, [101, 102, 103, 104], 96)
    desk.read_all(failure="gone")
    desk.reader.settle()

    assert desk.reader.outbox.lease_requests == []


def test_a_preempted_request_asks_again_by_content(desk):
    request = Request()
    desk.reader.matched(request, HAND_OVER, 0)
    desk.reader.allocated(request, [101, 102, 103, 104], 96)
    desk.read_all()
    desk.reader.settle()
    desk.reader.allocated(request, (), 0)

    request.num_preemptions, request.tokens = 1, 130
    assert desk.reader.matched(request, HAND_OVER, 0) is None
    desk.grant([7, 8, 9])
    assert desk.reader.matched(request, HAND_OVER, 0) == 96
    desk.reader.allocated(request, [1, 2, 3, 4, 5], 96)
    desk.read_all()
    desk.reader.settle()
    desk.reader.allocated(request, (), 0)

    transfer_report = desk.reader.finished("r", HAND_OVER, None)
    assert (transfer_report.prompt_tokens, transfer_report.refetched_tokens, transfer_report.reprefilled_tokens) == (
        100,
        96,
        34,
    )


def test_too_little_is_not_worth_a_fetch(desk):
    assert desk.reader.matched(Request(tokens=40), READ_BACK, 0) == 0
    assert desk.reader.outbox.lease_requests == []


@pytest.mark.parametrize(("granted", "refused"), [([7, 8, 9], False), ([7], True)])
def test_a_request_below_its_cache_threshold_is_refused(desk, granted, refused):
    order = LegOrder(sources=READ_BACK.sources, cache_hit_threshold=0.5)
    request = Request()
    desk.reader.matched(request, order, 0)
    desk.grant(granted)

    matched = desk.reader.matched(request, order, 0)

    assert (matched is None, desk.reader.refused) == (refused, ["r"] if refused else [])


def test_the_own_cache_counts_for_the_threshold(desk):
    assert desk.reader.matched(Request(), LegOrder(cache_hit_threshold=0.9), 96) == 0
    assert desk.reader.refused == []


def test_an_empty_prompt_is_never_refused(desk):
    assert desk.reader.matched(Request(tokens=0), LegOrder(cache_hit_threshold=1.0), 0) == 0
    assert desk.reader.refused == []


def test_nobody_waits_for_a_worker_that_cannot_be_connected(desk):
    desk.peers.forget(("p", 1))
    desk.peers.shun(("p", 1))

    assert desk.reader.matched(Request(), HAND_OVER, 0) == 0


def test_a_worker_that_is_known_anew_is_asked_again(desk):
    desk.peers.shun(("p", 1))
    desk.connect()

    assert desk.reader.matched(Request(), HAND_OVER, 0) == 96


def test_an_aborted_request_keeps_its_blocks_until_reads_end(desk):
    request = Request()
    desk.reader.matched(request, HAND_OVER, 0)
    desk.reader.allocated(request, [101, 102, 103, 104], 96)

    desk.reader.finished("r", HAND_OVER, None)
    assert desk.reader.settle() == (set(), set())
    assert desk.reader.outbox.cancel

    desk.read_all(failure="cancelled")
    assert desk.reader.settle() == ({"r"}, set())
    assert desk.reader.idle


def test_an_offer_that_is_not_needed_is_given_back(desk):
    desk.reader.matched(Request(), HAND_OVER, 96)

    desk.reader.finished("r", HAND_OVER, None)

    assert desk.released() == ["L"]
