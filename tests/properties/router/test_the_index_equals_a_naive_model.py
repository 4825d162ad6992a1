"""Whatever happens to a worker's events, an EXACT index says what the worker holds, and every loss is noticed."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.router.state.block_table import IS_COMPILED, TIERS, PythonBlockTable, block_table
from services.router.state.prefix_index import IndexState, PrefixIndex
from shared.contracts.kv_events import (
    MEMORIES,
    KvDigest,
    KvEvent,
    KvEventBatch,
    KvEventKind,
    KvSnapshot,
    KvTier,
    digest_xor,
    pack_hashes,
    unpack_hashes,
)
from tests.support.examples import examples

WORKERS = ("w1", "w2", "w3")
BLOCKS = st.lists(st.integers(min_value=1, max_value=12), min_size=1, max_size=5)
WHO = st.sampled_from(WORKERS)


class Truth:
    """A worker as it is."""

    def __init__(self, worker_id: str, epoch: int) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.seq = 0
        self.tiers: dict[KvTier, set[int]] = {tier: set() for tier in TIERS}

    @property
    def held(self) -> set[int]:
        return set[int]().union(*self.tiers.values())

    def batch(self, kind: KvEventKind, hashes: list[int], tier: KvTier) -> KvEventBatch:
        self.seq += 1
        if kind is KvEventKind.STORED:
            self.tiers[tier] |= set(hashes)
        elif kind is KvEventKind.REMOVED:
            self.tiers[tier] -= set(hashes)
        else:
            self.tiers = {tier: set() for tier in TIERS}
        event = KvEvent(kind=kind, hashes=pack_hashes(hashes), tier=tier)
        return KvEventBatch(worker_id=self.worker_id, epoch=self.epoch, seq=self.seq, events=[event])

    def snapshot(self) -> KvSnapshot:
        device, host, disk, objects, boundaries = (pack_hashes(sorted(self.tiers[tier])) for tier in TIERS)
        return KvSnapshot(
            worker_id=self.worker_id,
            epoch=self.epoch,
            seq=self.seq,
            hashes=device,
            host_hashes=host,
            disk_hashes=disk,
            object_hashes=objects,
            boundary_hashes=boundaries,
        )

    def digest(self) -> KvDigest:
        xors = [0] * len(TIERS)
        for number, tier in enumerate(TIERS):
            for block in self.tiers[tier]:
                xors[number] ^= block
        return KvDigest(seq=self.seq, count=sum(map(len, self.tiers.values())), xor=digest_xor(xors))


def longest(held: set[int], hashes: list[int]) -> int:
    depth = 0
    while depth < len(hashes) and hashes[depth] in held:
        depth += 1
    return depth


class IndexAgainstTruth(RuleBasedStateMachine):
    make_table = PythonBlockTable

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(type(self).make_table())
        self.truths = {worker_id: Truth(worker_id, 1) for worker_id in WORKERS}
        self.late: dict[str, list[KvSnapshot]] = {worker_id: [] for worker_id in WORKERS}
        for worker_id in WORKERS:
            self.index.join(worker_id, 1)

    def known(self, who: str) -> dict[KvTier, set[int]]:
        slot = self.index.slot(who)
        return {tier: set(unpack_hashes(self.index.table.blocks(slot, number))) for number, tier in enumerate(TIERS)}

    @rule(
        who=WHO,
        kind=st.sampled_from(list(KvEventKind)),
        hashes=BLOCKS,
        tier=st.sampled_from(TIERS),
        arrives=st.sampled_from([True, True, True, False]),
    )
    def something_changes(self, who, kind, hashes, tier, arrives):
        batch = self.truths[who].batch(kind, hashes, tier)
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
        slot = self.index.slot(who)
        self.truths[who] = Truth(who, self.truths[who].epoch + 1)
        self.index.join(who, self.truths[who].epoch)
        assert self.index.slot(who) == slot

    @rule(who=WHO)
    def a_stale_batch_arrives(self, who):
        truth = self.truths[who]
        old = KvEventBatch(worker_id=who, epoch=truth.epoch - 1, seq=truth.seq + 1, events=[])
        self.index.apply(old)

    @rule(who=WHO)
    def a_worker_is_forgotten_and_comes_back(self, who):
        self.index.drop(who)
        assert (self.index.slot(who), self.index.count(who)) == (-1, 0)
        self.index.join(who, self.truths[who].epoch)

    @rule(who=WHO)
    def nobody_gives_a_snapshot(self, who):
        self.index.give_up(who)

    @rule(who=WHO)
    def digests_notice_what_is_lost(self, who):
        truth = self.truths[who]
        for _ in range(2):
            self.index.check(who, truth.epoch, truth.digest())
        assert self.index.state(who) is not IndexState.EXACT or self.known(who) == truth.tiers

    @rule(who=WHO)
    def a_fresh_snapshot_always_repairs(self, who):
        assert self.index.restore(self.truths[who].snapshot())
        assert self.index.state(who) is IndexState.EXACT
        assert self.known(who) == self.truths[who].tiers

    @rule(hashes=st.lists(st.integers(min_value=1, max_value=12), max_size=8, unique=True))
    def matches_are_the_longest_held_prefixes(self, hashes):
        found, by_slot = self.index.match(hashes), self.index.match_depths(pack_hashes(hashes))
        for who in WORKERS:
            expected = longest(set().union(*(self.known(who)[tier] for tier in MEMORIES)), hashes)
            assert found.get(who, 0) == by_slot[self.index.slot(who)] == expected

    @invariant()
    def an_exact_entry_that_is_up_to_date_is_the_truth(self):
        for who, truth in self.truths.items():
            entry = self.index.entries[who]
            if entry.state is IndexState.EXACT and entry.seq == truth.seq:
                assert self.known(who) == truth.tiers

    @invariant()
    def a_block_is_held_when_somebody_holds_it(self):
        held = set[int]().union(*(blocks for who in WORKERS for blocks in self.known(who).values()))
        assert {block for block in range(13) if self.index.held(block)} == held

    @invariant()
    def every_worker_has_a_slot_of_its_own(self):
        assert [self.index.slots[self.index.slot(who)] for who in WORKERS] == list(WORKERS)


class NativeIndexAgainstTruth(IndexAgainstTruth):
    make_table = block_table


for machine in (IndexAgainstTruth, NativeIndexAgainstTruth):
    machine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestTheIndex = IndexAgainstTruth.TestCase
if IS_COMPILED:
    TestTheIndexOnTheNativeTable = NativeIndexAgainstTruth.TestCase
