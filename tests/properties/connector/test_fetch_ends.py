"""A fetch ends by its deadlines with the right bytes and no lease, whatever holders, reads and peers do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from connector.messages import ReadPart
from connector.reader.fetch import Fetch
from connector.reader.lease_request import Source
from shared.contracts.kv_exchange import FULL_HASH_BYTES, KvGrant, NoGrant
from tests.support.kv_messages import one_group
from tests.unit.connector.fetching import BLOCK_TOKENS, HASHES, Bench

PEERS = [("a", 1), ("b", 1), ("c", 1)]
CONTENT = {name: index for index, name in enumerate(HASHES)}


@st.composite
def sources(draw):
    first = draw(st.integers(0, 4))
    end = draw(st.integers(first + 1, 8))
    return Source(
        peer=draw(st.sampled_from(PEERS)),
        first=first * BLOCK_TOKENS,
        end=end * BLOCK_TOKENS,
        follow=draw(st.booleans()),
    )


class World:
    """Holders with arbitrary replies, and a reader's memory."""

    def __init__(self, draw, bench, fetch):
        self.draw, self.bench, self.fetch = draw, bench, fetch
        self.leased = {}
        self.answered = {}
        self.done = {}
        self.gone = set()
        self.memory = {}

    def pending_requests(self):
        return [request for request in self.bench.lease_requests() if self.answered.get(request.ask_id, 0) is not None]

    def answer(self):
        requests = [
            request for request in self.pending_requests() if (request.worker_id, request.epoch) not in self.gone
        ]
        if not requests:
            return
        request = self.draw(st.sampled_from(requests))
        names = [request.hashes[at : at + FULL_HASH_BYTES] for at in range(0, len(request.hashes), FULL_HASH_BYTES)]
        given_before = self.answered.get(request.ask_id, 0)
        more = self.draw(st.integers(0, len(names) - given_before))
        final = not request.follow_s or given_before + more == len(names) or self.draw(st.booleans())
        self.answered[request.ask_id] = None if final else given_before + more
        if given_before + more and request.ask_id not in self.bench.released():
            self.leased[request.ask_id] = request
        granted = names[given_before : given_before + more]
        grant = KvGrant(
            reader_id="me",
            worker_id=request.worker_id,
            epoch=request.epoch,
            ask_id=request.ask_id,
            lease_id=request.ask_id if granted else "",
            groups=one_group([CONTENT[name] for name in granted], request.first + given_before),
            last_hash=granted[-1] if granted else b"",
            until_s=self.bench.now + self.draw(st.floats(0.1, 20)),
            final=final,
            reason=NoGrant.NOT_HELD if final else None,
        )
        self.fetch.on_grant(grant, self.bench.now)

    def read(self):
        reads = [read for read in self.bench.reads() if self.done.get(read.read_id, 0) < len(read.local_blocks)]
        if not reads:
            return
        read = self.draw(st.sampled_from(reads))
        first = self.done.get(read.read_id, 0)
        count = self.draw(st.integers(1, len(read.local_blocks) - first))
        failed = self.draw(st.booleans()) or read.peer in self.gone
        self.done[read.read_id] = first + count
        if not failed:
            self.memory.update(
                zip(read.local_blocks[first : first + count], read.remote_blocks[first : first + count], strict=True)
            )
        why = "broken" if failed else ""
        self.fetch.on_part(ReadPart(read.read_id, first, count, 1, 0.0, 1.0, why), self.bench.now)

    def lose(self):
        peer = self.draw(st.sampled_from(PEERS))
        self.gone.add(peer)
        self.bench.ahead.pop(peer, None)
        self.fetch.on_peer_gone(peer, self.bench.now)

    def wait(self):
        self.bench.later(self.draw(st.floats(0.01, 5)))
        self.fetch.on_time(self.bench.now)


def allocate(bench: Bench, fetch: Fetch) -> None:
    """Allocate blocks once the fetch knows their number, as the reader does; with none, stop the fetch."""
    if fetch.begun or fetch.stopped:
        return
    tokens = fetch.tokens()
    if tokens:
        first = fetch.plan.start // BLOCK_TOKENS
        bench.begin(fetch, [100 + first + at for at in range(tokens // BLOCK_TOKENS)])
    elif tokens == 0:
        fetch.stop()


@given(st.data())
def test_a_fetch_ends_with_the_right_blocks_and_no_leases(data):
    bench = Bench()
    bench.ahead = dict.fromkeys(PEERS, 0.0)
    start = data.draw(st.integers(0, 3))
    fetch = bench.fetch(start=start, goal=8, sources=data.draw(st.lists(sources(), max_size=4)))
    world = World(data.draw, bench, fetch)
    events = st.sampled_from([world.answer, world.answer, world.read, world.read, world.wait, world.lose])
    for event in data.draw(st.lists(events, max_size=25)):
        event()
        allocate(bench, fetch)
    if data.draw(st.booleans()):
        fetch.stop()

    for _ in range(100):  # Holders no longer reply, reads under way end, and time passes.
        world.read()
        bench.later(1.0)
        fetch.on_time(bench.now)
        allocate(bench, fetch)

    assert fetch.over
    assert all(world.memory[100 + start + at] == start + at for at in range(fetch.arrived // BLOCK_TOKENS))
    left = {name for name, request in world.leased.items() if (request.worker_id, request.epoch) not in world.gone}
    assert left <= set(bench.released())
    assert len(bench.released()) == len(set(bench.released()))


@given(st.data())
def test_what_counts_as_arrived_was_written(data):
    bench = Bench()
    bench.ahead = dict.fromkeys(PEERS, 0.0)
    fetch = bench.fetch(start=0, goal=8, sources=data.draw(st.lists(sources(), min_size=1, max_size=3)))
    world = World(data.draw, bench, fetch)
    blocks_allocated = []
    for _ in range(30):
        data.draw(st.sampled_from([world.answer, world.read, world.wait]))()
        if not fetch.begun and (tokens := fetch.tokens()):
            blocks_allocated = [100 + at for at in range(tokens // BLOCK_TOKENS)]
            bench.begin(fetch, blocks_allocated)

    arrived = fetch.arrived // BLOCK_TOKENS
    assert arrived <= len(blocks_allocated)
    assert set(blocks_allocated[:arrived]) <= world.memory.keys()
