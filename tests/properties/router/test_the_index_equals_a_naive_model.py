"""Whatever happens to a worker's events, an EXACT index says what the worker holds, and every loss is noticed."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.router.core.prefix_index import IndexState, PrefixIndex
from shared.contracts.kv_events import KvDigest, KvEvent, KvEventBatch, KvEventKind, KvSnapshot, pack_hashes

WORKERS = ("w1", "w2", "w3")
BLOCKS = st.lists(st.integers(min_value=1, max_value=12), min_size=1, max_size=5)
WHO = st.sampled_from(WORKERS)


class Truth:
    """A worker as it is."""

    def __init__(self, worker_id: str, epoch: int) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.seq = 0
        self.held: set[int] = set()

    def batch(self, kind: KvEventKind, hashes: list[int]) -> KvEventBatch:
        self.seq += 1
        if kind is KvEventKind.STORED:
            self.held |= set(hashes)
        elif kind is KvEventKind.REMOVED:
            self.held -= set(hashes)
        else:
            self.held.clear()
        event = KvEvent(kind=kind, hashes=pack_hashes(hashes))
        return KvEventBatch(worker_id=self.worker_id, epoch=self.epoch, seq=self.seq, events=[event])

    def snapshot(self) -> KvSnapshot:
        held = pack_hashes(sorted(self.held))
        return KvSnapshot(worker_id=self.worker_id, epoch=self.epoch, seq=self.seq, hashes=held)

    def digest(self) -> KvDigest:
        xor = 0
        for block in self.held:
            xor ^= block
        return KvDigest(seq=self.seq, count=len(self.held), xor=xor)


def longest(held: set[int], hashes: list[int]) -> int:
    depth = 0
    while depth < len(hashes) and hashes[depth] in held:
        depth += 1
    return depth


class IndexAgainstTruth(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.truths = {worker_id: Truth(worker_id, 1) for worker_id in WORKERS}
        self.late: dict[str, list[KvSnapshot]] = {worker_id: [] for worker_id in WORKERS}
        for worker_id in WORKERS:
            self.index.join(worker_id, 1)

    @rule(
        who=WHO,
        kind=st.sampled_from(list(KvEventKind)),
        hashes=BLOCKS,
        arrives=st.sampled_from([True, True, True, False]),
    )
    def something_changes(self, who, kind, hashes, arrives):
        batch = self.truths[who].batch(kind, hashes)
        if arrives:
            self.index.apply(batch)

    @rule(who=WHO)
    def a_snapshot_is_made(self, who):
        self.late[who].append(self.truths[who].snapshot())

    @precondition(lambda self: any(self.late.values()))
    @rule(data=st.data())
    def a_snapshot_arrives_perhaps_late(self, data):
        who = data.draw(st.sampled_from([one for one in WORKERS if self.late[one]]))
        self.index.restore(self.late[who].pop(0))

    @rule(who=WHO)
    def a_worker_begins_a_new_life(self, who):
        self.truths[who] = Truth(who, self.truths[who].epoch + 1)
        self.index.join(who, self.truths[who].epoch)

    @rule(who=WHO)
    def a_stale_batch_arrives(self, who):
        truth = self.truths[who]
        old = KvEventBatch(worker_id=who, epoch=truth.epoch - 1, seq=truth.seq + 1, events=[])
        self.index.apply(old)

    @rule(who=WHO)
    def a_worker_is_forgotten_and_comes_back(self, who):
        self.index.drop(who)
        self.index.join(who, self.truths[who].epoch)

    @rule(who=WHO)
    def nobody_gives_a_snapshot(self, who):
        self.index.give_up(who)

    @rule(who=WHO)
    def digests_notice_what_is_lost(self, who):
        truth = self.truths[who]
        for _ in range(2):
            self.index.check(who, truth.epoch, truth.digest())
        assert self.index.state(who) is not IndexState.EXACT or self.index.entries[who].held == truth.held

    @rule(who=WHO)
    def a_fresh_snapshot_always_repairs(self, who):
        assert self.index.restore(self.truths[who].snapshot())
        assert self.index.state(who) is IndexState.EXACT
        assert self.index.entries[who].held == self.truths[who].held

    @rule(hashes=st.lists(st.integers(min_value=1, max_value=12), max_size=8, unique=True))
    def matches_are_the_longest_held_prefixes(self, hashes):
        found = self.index.match(hashes)
        for who, entry in self.index.entries.items():
            assert found.get(who, 0) == longest(entry.held, hashes)

    @invariant()
    def an_exact_entry_that_is_up_to_date_is_the_truth(self):
        for who, truth in self.truths.items():
            entry = self.index.entries[who]
            if entry.state is IndexState.EXACT and entry.seq == truth.seq:
                assert entry.held == truth.held

    @invariant()
    def the_holders_are_the_entries_turned_around(self):
        bits = {}
        for entry in self.index.entries.values():
            for block in entry.held:
                bits[block] = bits.get(block, 0) | entry.bit
        assert self.index.holders == bits
        assert len({entry.bit for entry in self.index.entries.values()}) == len(self.index.entries)


IndexAgainstTruth.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTheIndex = IndexAgainstTruth.TestCase
