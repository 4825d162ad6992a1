"""Whatever arrives, is asked for, forgotten, killed in the middle, torn on the disk or meant for another model: a block
that a store names holds the bytes that were put there under that name, and routers are told the truth about it.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from connector.groups import Blocks, full_attention
from services.worker.engines.simulated.core.block_cache import BlockCache
from services.worker.engines.store.files import StoreFiles, content_at
from services.worker.engines.store.slots import FileTier
from services.worker.engines.store.tiers import SAVE_AGAIN_S, Job, JobKind, Tiers
from services.worker.kv_events import HeldBlocks
from shared.contracts.kv_events import KvTier, block_hash64, unpack_hashes
from tests.support.examples import examples

BLOCKS, SLOTS, BLOCK_BYTES, JOB_BLOCKS = 12, 16, 64, 3
CHAINS = 5
chains = st.tuples(st.integers(0, CHAINS - 1), st.integers(1, 6))
IDENTITIES = (b"a" * 32, b"b" * 32)


def names_of(chain: tuple[int, int]) -> list[bytes]:
    number, length = chain
    return [hashlib.sha256(bytes([number, at])).digest() for at in range(length)]


def content_of(identity: bytes, name: bytes) -> bytes:
    return hashlib.blake2b(identity + name, digest_size=BLOCK_BYTES).digest()


def nothing(_folder: Path, _first: int) -> None:
    """All is well."""


def bytes_lost(folder: Path, first: int) -> None:
    """One of each place from ``first`` on, and of its record if ``first`` is odd."""
    path = folder / ("index" if first % 2 else "blocks")
    data = bytearray(path.read_bytes())
    for at in range(first * BLOCK_BYTES, len(data), BLOCK_BYTES):
        data[at] ^= 0x5A
    path.write_bytes(data)


def places_mixed_up(folder: Path, first: int) -> None:
    """What lies in each place lay elsewhere."""
    path = folder / "blocks"
    data = path.read_bytes()
    path.write_bytes(data[first * BLOCK_BYTES :] + data[: first * BLOCK_BYTES])


class StoreLife(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="store-"))
        self.identity = IDENTITIES[0]
        self.files: StoreFiles | None = None
        self.job: Job | None = None
        self.leased: list[tuple[list[int], list[bytes]]] = []
        self.now = 0.0

    def teardown(self) -> None:
        if self.files is not None:
            self.files.close([])
        shutil.rmtree(self.folder)

    @initialize()
    def open(self) -> None:
        self.memory = ctypes.create_string_buffer(BLOCKS * BLOCK_BYTES)
        base = ctypes.addressof(self.memory)
        self.files = StoreFiles(
            self.folder,
            identity=self.identity,
            block_bytes=BLOCK_BYTES,
            slots=SLOTS,
            memory=(base, BLOCKS * BLOCK_BYTES),
            io="plain",
        )
        self.tiers = Tiers(BlockCache(BLOCKS), FileTier(SLOTS), JOB_BLOCKS, full_attention(1))
        self.tiers.files.restore(self.files.restored)
        self.told = HeldBlocks()
        self.job, self.leased = None, []

    @rule(chain=chains, copied=st.booleans())
    def arrives(self, chain: tuple[int, int], copied: bool) -> None:
        names = names_of(chain)
        held = self.tiers.hold(names).blocks
        room = self.tiers.allocate(len(names) - len(held))
        for name, block in zip(names[len(held) :], room, strict=False):
            self.block(block)[:] = content_of(self.identity, name)
        self.tiers.cache(names, Blocks(0, len(held), room), len(names))
        self.tiers.free([*held, *room])
        if copied:
            self.all_is_copied()

    @rule(chain=chains, copied=st.booleans())
    def is_asked_for(self, chain: tuple[int, int], copied: bool) -> None:
        self.tiers.load(self.tiers.requested(names_of(chain)))
        if copied:
            self.all_is_copied()
            assert not any(map(self.tiers.is_coming, names_of(chain)))

    def all_is_copied(self) -> None:
        assert self.files is not None
        self.now += SAVE_AGAIN_S
        while self.job is not None or (job := self.tiers.next_job(self.now)):
            job, self.job = self.job or job, None
            self.tiers.ended(job, self.files.perform(job), self.now)

    @rule(chain=chains)
    def is_leased(self, chain: tuple[int, int]) -> None:
        found = [(self.tiers.memory.block_of(name), name) for name in names_of(chain)]
        held = [(block, name) for block, name in found if block is not None]
        blocks, names = [block for block, _name in held], [name for _block, name in held]
        self.tiers.memory.hold(blocks)
        self.leased.append((blocks, names))

    @precondition(lambda self: self.leased)
    @rule()
    def is_released(self) -> None:
        self.tiers.memory.release(self.leased.pop(0)[0])

    @precondition(lambda self: self.job is None)
    @rule()
    def a_job_begins(self) -> None:
        self.job = self.tiers.next_job(self.now)

    @precondition(lambda self: self.job is not None)
    @rule(fails=st.booleans())
    def the_job_ends(self, fails: bool) -> None:
        assert self.files is not None
        assert self.job is not None
        done = [b""] * len(self.job.names) if fails else self.files.perform(self.job)
        self.tiers.ended(self.job, done, self.now)
        self.job = None

    @rule(
        killed=st.booleans(),
        written=st.integers(0, BLOCK_BYTES * JOB_BLOCKS),
        damage=st.sampled_from([nothing, nothing, bytes_lost, places_mixed_up]),
        other_model=st.sampled_from([False] * 7 + [True]),
        first=st.integers(0, SLOTS - 1),
        asked=st.lists(chains, max_size=3),
    )
    def ends_and_begins_anew(self, killed, written, damage, other_model, first, asked) -> None:
        """Killed or stopped; what lies on the disk may suffer before the next life, which is asked for some of it."""
        assert self.files is not None
        was_killed = killed or self.job is not None
        if was_killed:
            self.killed_while_saving(written)
            self.files.abandon()
        else:
            self.files.close(self.tiers.files.records())
        kept = self.tiers.files.names()
        damage(self.folder, first)
        if other_model:
            self.identity = IDENTITIES[1] if self.identity == IDENTITIES[0] else IDENTITIES[0]
        self.open()
        if other_model:
            assert self.tiers.files.names() == []
        elif not was_killed and damage is not bytes_lost:
            assert self.tiers.files.names() == kept
        for chain in asked:
            self.is_asked_for(chain, copied=True)

    def killed_while_saving(self, written: int) -> None:
        """So many bytes had reached the disk, and no record."""
        if self.job is None or self.job.kind is JobKind.LOAD:
            return
        with (self.folder / "blocks").open("r+b") as file:
            for block, slot in zip(self.job.blocks, self.job.slots, strict=True):
                count = min(written, BLOCK_BYTES)
                file.seek(slot * BLOCK_BYTES)
                file.write(bytes(self.block(block)[:count]))
                written -= count

    @invariant()
    def named_blocks_hold_what_they_are_called(self) -> None:
        if self.files is None:
            return
        for name in self.tiers.memory.hashes():
            block = self.tiers.memory.block_of(name)
            assert block is not None
            assert bytes(self.block(block)) == content_of(self.identity, name)
        for blocks, names in self.leased:
            assert [bytes(self.block(block)) for block in blocks] == [content_of(self.identity, name) for name in names]

    @invariant()
    def routers_are_told_the_truth(self) -> None:
        if self.files is None:
            return
        self.told.apply(self.tiers.take_events())
        held = {KvTier.HOST: self.tiers.memory.hashes(), KvTier.DISK: self.tiers.files.names(), KvTier.DEVICE: ()}
        for tier, names in held.items():
            assert sorted(unpack_hashes(self.told.packed(tier))) == sorted(map(block_hash64, names))

    @invariant()
    def no_block_is_lost(self) -> None:
        """What nobody holds can be had: of memory and, while nothing is being copied, of the files."""
        if self.files is None or self.job is not None:
            return
        leased = {block for blocks, _names in self.leased for block in blocks}
        assert self.tiers.memory.free == BLOCKS - len(leased)
        assert len(self.tiers.files) + len(self.tiers.files._free) == SLOTS

    def block(self, number: int) -> memoryview:
        return content_at(ctypes.addressof(self.memory) + number * BLOCK_BYTES, BLOCK_BYTES)


StoreLife.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=25, deadline=None)
test_a_store_returns_what_it_stored = StoreLife.TestCase
