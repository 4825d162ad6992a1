"""Runs fetches without an engine: their plan, a manual clock, and the messages they send."""

from __future__ import annotations

from itertools import count

from connector.groups import Blocks, full_attention
from connector.messages import ReadPart
from connector.reader.fetch import Fetch, FetchLimits, FetchPlan, Outbox, Shortcuts
from connector.reader.lease_request import Source
from shared.contracts.kv_exchange import KvGrant
from tests.support.kv_messages import one_group

A, B, ME = ("a", 1), ("b", 1), ("me", 1)
HASHES = [bytes([index]) * 32 for index in range(8)]
BLOCKS = len(HASHES)
BLOCK_TOKENS = 32


def source(peer, first=0, end=BLOCKS, **fields):
    """``first`` and ``end`` in blocks."""
    return Source(peer=peer, first=first * BLOCK_TOKENS, end=end * BLOCK_TOKENS, **fields)


def follow(peer):
    return Source(peer=peer, first=0, end=BLOCKS * BLOCK_TOKENS, follow=True)


class Bench:
    def __init__(self):
        self.now = 10.0
        self.outbox = Outbox()
        self.ahead = {A: 0.0, B: 0.0}
        self._numbers = count(1)

    def fetch(self, *, start=0, goal=BLOCKS, sources=(), take=None, listens=False):
        plan = FetchPlan(
            reader=ME,
            groups=full_attention(BLOCK_TOKENS),
            hashes=HASHES,
            start=start * BLOCK_TOKENS,
            common=start * BLOCK_TOKENS,
            goal=goal * BLOCK_TOKENS,
            sources=list(sources),
            take=take,
            limits=FetchLimits(),
            outbox=self.outbox,
            clock_ahead=self.ahead.get,
            shortcuts=Shortcuts(listens=lambda _peer: listens),
            next_number=lambda: next(self._numbers),
        )
        return Fetch(plan, self.now)

    def begin(self, fetch, block_ids):
        fetch.begin([Blocks(0, fetch.plan.start // BLOCK_TOKENS, block_ids)], self.now)

    def later(self, seconds):
        self.now += seconds

    def lease_requests(self):
        return self.outbox.lease_requests

    def reads(self):
        return self.outbox.reads

    def released(self):
        return [name for release in self.outbox.releases for name in (*release.ask_ids, *release.lease_ids)]

    def grant(self, fetch, *, request, blocks, first=0, final=True, reason=None, until_s=None, **wrong):
        lease = self.outbox.lease_requests[request]
        names = [lease.hashes[at : at + 32] for at in range(0, len(lease.hashes), 32)]
        last = names[min(first + len(blocks), len(names)) - 1] if blocks else b""
        fields = {
            "reader_id": "me",
            "worker_id": lease.worker_id,
            "epoch": lease.epoch,
            "ask_id": lease.ask_id,
            "lease_id": lease.ask_id,
            "last_hash": last,
        }
        fetch.on_grant(
            KvGrant(
                **(fields | wrong),
                groups=one_group(blocks, lease.first + first) if blocks else [],
                until_s=self.now + 10.0 if until_s is None else until_s,
                final=final,
                reason=reason,
            ),
            self.now,
        )

    def part(self, fetch, read, *, first, count, failure="", started=1.0, ended=2.0, size=0):
        fetch.on_part(ReadPart(read.read_id, first, count, size, started, ended, failure), self.now)
