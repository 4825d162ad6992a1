"""Grants between machines come over the bus and as notices: a reader takes each once, in order, whichever comes first."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from connector.scheduler.grant_ways import GrantWays
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import KvGrant, LeaseKv
from tests.support.kv_messages import one_group
from tests.unit.connector.fetching import HASHES, A, B, Bench, follow

PATH = "/run/kv-grants-r"
PEER = {"worker_id": WorkerId("h"), "epoch": Epoch(1), "reader_id": WorkerId("r"), "ask_id": "ask"}


def grant(*, final: bool = False) -> KvGrant:
    return KvGrant(**PEER, final=final)


def ask(**fields) -> LeaseKv:
    return LeaseKv(**PEER, hashes=b"", hold_s=1.0, **fields)


class Ways:
    """Those of a holder."""

    def __init__(self, **asked) -> None:
        self.socket_works = True
        self.in_queue: list[KvGrant] = []
        self.ways = GrantWays(self._send)
        self.ways.note(ask(**asked))

    def _send(self, path: str, one: KvGrant) -> bool:
        assert path == PATH
        if self.socket_works:
            self.in_queue.append(one)
        return self.socket_works

    def send(self, one: KvGrant) -> tuple[list[int], list[int]]:
        """Numbers of what takes the bus, and of the notices."""
        over_bus = self.ways.send(one)
        return [over_bus.number] if over_bus is not None else [], [each.number for each in self.ways.take_notices()]


def test_a_reader_that_listens_gets_each_grant_both_ways_with_one_number():
    ways = Ways(listens=True)

    assert [ways.send(grant()), ways.send(grant()), ways.send(grant(final=True))] == [
        ([number], [number]) for number in range(3)
    ]


def test_a_reader_on_this_machine_gets_no_notices():
    ways = Ways(listens=True, reply_to=PATH)

    assert ways.send(grant()) == ([], [])
    assert [one.number for one in ways.in_queue] == [-1]


def test_a_socket_that_fails_is_followed_by_both_other_ways():
    ways = Ways(listens=True, reply_to=PATH)
    ways.send(grant())
    ways.socket_works = False

    assert ways.send(grant()) == ([0], [0])
    ways.socket_works = True
    assert ways.send(grant()) == ([1], [1])
    assert len(ways.in_queue) == 1


@pytest.mark.parametrize("ended", ["final", "released"])
def test_what_has_ended_is_forgotten(ended):
    ways = Ways(listens=True)
    if ended == "final":
        ways.send(grant(final=True))
    else:
        ways.ways.forget(["ask"])

    assert ways.send(grant()) == ([-1], [])


class Following:
    """A fetch that follows a prompt, and its holder's grants of two blocks each."""

    def __init__(self, source=A) -> None:
        self.bench = Bench()
        self.fetch = self.bench.fetch(sources=[follow(source)], listens=True)
        self.bench.begin(self.fetch, list(range(100, 108)))
        (self.lease,) = self.bench.lease_requests()

    def grant(self, number: int, **fields) -> KvGrant:
        return KvGrant(
            reader_id=self.lease.reader_id,
            worker_id=self.lease.worker_id,
            epoch=self.lease.epoch,
            ask_id=self.lease.ask_id,
            lease_id=self.lease.ask_id,
            groups=one_group([2 * number, 2 * number + 1], 2 * number),
            last_hash=HASHES[2 * number + 1],
            until_s=self.bench.now + 10.0,
            final=number == 3,
            number=number,
        )

    def comes(self, one: KvGrant) -> bool:
        return self.fetch.on_grant(one, self.bench.now)

    def read_blocks(self) -> list[int]:
        return [block for read in self.bench.reads() for block in read.remote_blocks]


def test_the_request_says_that_the_reader_listens():
    assert Following().lease.listens


def test_the_second_copy_of_a_grant_is_ignored():
    following = Following()

    assert [following.comes(following.grant(number)) for number in (0, 0, 1, 0, 1)] == [True, False, True, False, False]
    assert following.read_blocks() == [0, 1, 2, 3]
    assert following.fetch.listens


def test_a_notice_ahead_of_a_lost_one_waits_for_the_bus():
    following = Following()

    assert not following.comes(following.grant(1))
    assert [following.comes(following.grant(number)) for number in range(4)] == [True] * 4
    assert following.read_blocks() == list(range(8))
    assert not following.fetch.listens


@pytest.mark.parametrize(
    "forged",
    [{"ask_id": "another"}, {"worker_id": WorkerId("b")}, {"epoch": Epoch(2)}, {"number": 7}, {"number": 1 << 60}],
)
def test_a_notice_that_does_not_fit_changes_nothing(forged):
    following = Following()

    assert not following.comes(replace(following.grant(0), **forged))
    assert [following.comes(following.grant(number)) for number in range(4)] == [True] * 4


def test_what_comes_once_is_not_counted():
    """A store says again and again that it is loading blocks, before it numbers its grants."""
    following = Following()
    loading = replace(following.grant(0), groups=[], lease_id="", last_hash=b"", number=-1)

    assert [following.comes(loading) for _ in range(3)] == [True] * 3
    assert [following.comes(following.grant(number)) for number in range(4)] == [True] * 4


def test_what_the_worker_itself_says_of_a_request_needs_no_number():
    """That the bus is gone, or the holder's epoch over."""
    following = Following(B)
    following.comes(following.grant(0))

    assert following.comes(replace(following.grant(1), groups=[], lease_id="", last_hash=b"", number=-1, final=True))
    assert not following.fetch.listens
