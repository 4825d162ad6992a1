"""Grants that come over the bus and as notices, of which some are lost, repeated or out of order: each is taken once, in
order, and no block is read without a lease, or twice.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from connector.messages import ReadPart
from shared.contracts.kv_exchange import KvGrant, NoGrant
from tests.support.kv_messages import one_group
from tests.unit.connector.fetching import BLOCKS, HASHES, A, Bench, follow

FIRST_LOCAL = 100
LEASE_S = 5.0


class Prompt:
    """One that a holder computes in chunks, and a reader's fetch of it."""

    def __init__(self, draw) -> None:
        self.draw = draw
        self.bench = Bench()
        self.fetch = self.bench.fetch(sources=[follow(A)], listens=True)
        self.bench.begin(self.fetch, [FIRST_LOCAL + block for block in range(BLOCKS)])
        (self.lease,) = self.bench.lease_requests()
        self.bus: list[KvGrant] = []
        """In order: nothing is lost on it."""
        self.notices: list[KvGrant] = []
        self.granted: dict[int, float] = {}
        """By block: the end of its lease."""
        self.grants = 0
        self.is_over = False
        self.begun = 0
        """Reads that were looked at."""

    def compute(self) -> None:
        if self.is_over:
            return
        first = len(self.granted)
        count = self.draw(st.integers(0, BLOCKS - first))
        until_s = self.bench.now + LEASE_S
        self.granted |= dict.fromkeys(range(first, first + count), until_s)
        self.is_over = len(self.granted) == BLOCKS or self.draw(st.integers(0, 5)) == 0
        grant = KvGrant(
            reader_id=self.lease.reader_id,
            worker_id=self.lease.worker_id,
            epoch=self.lease.epoch,
            ask_id=self.lease.ask_id,
            lease_id=self.lease.ask_id,
            groups=one_group(list(range(first, first + count)), first) if count else [],
            last_hash=HASHES[first + count - 1] if count else b"",
            until_s=until_s,
            final=self.is_over,
            number=self.grants,
            reason=NoGrant.NOT_HELD if self.is_over and len(self.granted) < BLOCKS else None,
        )
        self.grants += 1
        self.bus.append(grant)
        self.notices.append(grant)

    def bus_brings(self) -> None:
        if self.bus:
            self._comes(self.bus.pop(0))

    def notice_comes(self) -> None:
        """Any one, also a second time, late, or forged."""
        if self.notices:
            notice = self.draw(st.sampled_from(self.notices))
            if self.draw(st.integers(0, 4)) == 0:
                notice = replace(notice, number=self.draw(st.integers(0, 9)), ask_id="another")
            self._comes(notice)

    def wait(self) -> None:
        self.bench.later(self.draw(st.floats(0.01, 2.0)))

    def _comes(self, grant: KvGrant) -> None:
        self.fetch.on_grant(grant, self.bench.now)
        for read in self.bench.reads()[self.begun :]:
            self.begun += 1
            for there, here in zip(read.remote_blocks, read.local_blocks, strict=True):
                assert here == FIRST_LOCAL + there
                assert self.bench.now < read.until_s <= self.granted[there]
            self.fetch.on_part(ReadPart(read.read_id, 0, len(read.local_blocks), 1, 0.0, 1.0, ""), self.bench.now)

    def read_blocks(self) -> list[int]:
        return [block for read in self.bench.reads() for block in read.remote_blocks]


@given(st.data())
def test_each_block_is_read_once_and_within_its_lease(data):
    prompt = Prompt(data.draw)
    events = st.sampled_from([prompt.compute, prompt.bus_brings, prompt.notice_comes, prompt.notice_comes])
    for event in data.draw(st.lists(events, max_size=30)):
        event()
    while prompt.bus:
        prompt.bus_brings()

    assert prompt.read_blocks() == list(range(len(prompt.granted)))
    assert prompt.fetch.full_end == len(prompt.granted) * 32


@given(st.data())
def test_what_comes_after_a_lease_is_not_read(data):
    prompt = Prompt(data.draw)
    events = st.sampled_from([prompt.compute, prompt.bus_brings, prompt.notice_comes, prompt.wait])
    for event in data.draw(st.lists(events, max_size=30)):
        event()
    while prompt.bus:
        prompt.bus_brings()

    assert len(prompt.read_blocks()) == len(set(prompt.read_blocks()))
