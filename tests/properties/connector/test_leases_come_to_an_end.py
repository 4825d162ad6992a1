"""For any behaviour of readers: the blocks that the lease table counts as pinned are those touched and not freed."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from connector.holder.leases import ANYONE, FollowedPrompt, LeaseLimits, LeaseTable
from tests.support.examples import examples

BLOCKS = st.lists(st.integers(min_value=1, max_value=30), min_size=1, max_size=12, unique=True)
READERS = st.sampled_from(["d0", "d1"])
IDS = st.sampled_from([f"lease-{number}" for number in range(8)])
SECONDS = st.floats(min_value=0.0, max_value=20.0)
PINNED_MAX, LEASES_MAX, FOLLOWED_MAX = 15, 5, 2


class AnyHistory(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.leases = LeaseTable(LeaseLimits(PINNED_MAX, LEASES_MAX, FOLLOWED_MAX))
        self.now = 0.0
        self.touched: Counter[int] = Counter()
        self.owners: dict[str, str] = {}

    @rule(lease_id=IDS, reader=READERS, blocks=BLOCKS, hold_s=SECONDS)
    def request(self, lease_id, reader, blocks, hold_s):
        if self.leases.find(lease_id) is None and not self.leases.is_full():
            self.owners[lease_id] = reader
            self.grant(lease_id, reader, blocks, hold_s)

    @rule(lease_id=IDS, blocks=BLOCKS, hold_s=SECONDS)
    def offer(self, lease_id, blocks, hold_s):
        self.request(lease_id, ANYONE, blocks, hold_s)

    @rule(lease_id=IDS, reader=READERS, follow_s=SECONDS)
    def follow(self, lease_id, reader, follow_s):
        lease = self.leases.find(lease_id)
        if (lease is None and self.leases.is_full()) or (lease is not None and lease.followed is not None):
            return
        owner = self.owners[lease_id] if lease is not None else reader
        self.owners[lease_id] = owner
        before = len(self.leases.followed)
        followed = self.leases.follow(
            lease_id, owner, FollowedPrompt([b"x"], hold_s=1.0, until_s=self.now + follow_s, full_tokens=0, end=1)
        )
        assert followed == (before < FOLLOWED_MAX)

    @rule(blocks=BLOCKS, hold_s=SECONDS)
    def grant_further(self, blocks, hold_s):
        for lease in list(self.leases.followed.values()):
            self.grant(lease.lease_id, lease.reader_id, blocks, hold_s)

    @rule(lease_id=IDS, reader=READERS)
    def release(self, lease_id, reader):
        known = self.leases.find(lease_id) is not None
        freed = self.leases.release(lease_id, reader)
        self.free(freed)
        if known and self.owners[lease_id] in (ANYONE, reader):
            assert self.leases.find(lease_id) is None
        else:
            assert freed == []
            assert (self.leases.find(lease_id) is not None) == known

    @rule(seconds=SECONDS)
    def time_passes(self, seconds):
        self.now += seconds
        self.free(self.leases.expire(self.now))
        for lease in list(self.leases.followed.values()):
            if lease.followed.until_s <= self.now:
                self.leases.stop_following(lease.lease_id)
        assert self.leases.next_expiry() > self.now

    @rule()
    def everything_is_unpinned(self):
        self.free(self.leases.unpin_all())
        assert not self.touched
        assert len(self.leases) == len(self.leases.followed)

    @invariant()
    def the_leases_pin_what_was_touched(self):
        assert self.leases.pinned_blocks == len(self.touched) <= PINNED_MAX
        assert len(self.leases) <= LEASES_MAX
        assert len(self.leases.followed) <= FOLLOWED_MAX

    @invariant()
    def every_lease_that_was_granted_is_held_or_has_ended(self):
        totals = self.leases.totals
        held = sum(1 for lease_id in self.owners if (lease := self.leases.find(lease_id)) and lease.ever_granted)
        assert totals.granted == totals.released + totals.expired + held

    def teardown(self):
        for _ in range(100):
            next_end = self.leases.next_expiry()
            if next_end == math.inf:
                break
            self.time_passes(max(0.0, next_end - self.now))
        assert not self.touched
        assert len(self.leases) == 0
        assert self.leases.pinned_blocks == 0

    def grant(self, lease_id, reader, blocks, hold_s):
        held = blocks[: self.leases.pinnable(blocks)]
        if len(held) < len(blocks):
            assert len(set(self.touched) | set(blocks[: len(held) + 1])) > PINNED_MAX
        if held:
            self.touched.update(held)
            self.leases.grant(lease_id, reader, held, self.now + hold_s)

    def free(self, blocks):
        for block in blocks:
            assert self.touched[block] > 0
            self.touched[block] -= 1
            if not self.touched[block]:
                del self.touched[block]


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
