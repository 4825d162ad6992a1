"""Random event sequences of a holder: after each, every block is free and no state remains."""

from __future__ import annotations

import random

import pytest

from connector.holder.holder import FOLLOW_S_MAX
from tests.support.kv_messages import blocks_of, first_of
from tests.unit.connector.holding import Holding, chain, lease_request, release

HISTORIES = 1000
PROMPTS = [chain(count, f"prompt {number}") for number, count in enumerate((1, 3, 5, 8))]


class History:
    """Requests that compute in steps; readers that request leases, disappear or send wrong messages."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.holding = Holding(blocks=40, lease_share_max=self.rng.choice([0.1, 0.5, 1.0]), lease_s_max=20.0)
        self.holder = self.holding.holder
        self.requests: dict[str, tuple[list[bytes], list]] = {}
        self.steps: list = []
        self.grants: list = []
        self.number = 0

    def any_event(self) -> None:
        events = (
            self.start,
            self.end,
            self.compute,
            self.request_lease,
            self.request_lease,
            self.release,
            self.offer,
            self.wait,
        )
        self.rng.choice(events)()
        self.number += 1
        pinned = self.holder.counts.pinned_blocks
        in_use = {block.block_id for _, blocks in self.requests.values() for block in blocks}
        assert self.holding.free >= self.holding.free_at_first - pinned - len(in_use)
        assert pinned <= 40

    def start(self) -> None:
        hashes = self.rng.choice(PROMPTS)
        if self.holding.free < len(hashes):
            return
        blocks = self.holding.pool.get_new_blocks(len(hashes))
        self.requests[f"r{self.number}"] = (hashes, blocks)
        self.steps.append(self.holding.schedule(hashes, blocks, 0))

    def compute(self) -> None:
        if self.steps:
            self.holder.computed(self.steps.pop(0))
        self.grants += self.holder.advance()

    def end(self) -> None:
        if self.requests:
            _, blocks = self.requests.pop(self.rng.choice(list(self.requests)))
            self.holding.end(blocks)

    def request_lease(self) -> None:
        hold_s, follow_s = self.rng.uniform(0, 30), self.rng.choice([0.0, 10.0, 1e9])
        request = lease_request(
            self.rng.choice(PROMPTS),
            f"ask-{self.rng.randrange(12)}",
            reader_id=self.rng.choice(["decode-1", "decode-2"]),
            epoch=self.rng.choice([7, 7, 7, 6]),
            hold_s=hold_s,
            follow_s=follow_s,
        )
        self.grants.append(self.holder.lease(request))

    def offer(self) -> None:
        if self.requests:
            hashes, blocks = self.rng.choice(list(self.requests.values()))
            offer = self.holding.offer(hashes, [block.block_id for block in blocks], f"leg-{self.rng.randrange(12)}")
            if offer is not None:
                assert blocks_of(offer) == [block.block_id for block in blocks][: len(blocks_of(offer))]

    def release(self) -> None:
        offered = f"leg-{self.rng.randrange(12)}"
        reader = self.rng.choice(["decode-1", "decode-2", "prefill-1"])
        for _ in range(self.rng.choice([1, 1, 2])):
            if self.rng.random() < 0.5:
                self.holder.release(release(lease_id=offered, reader_id=reader))
            else:
                self.holder.release(release(f"ask-{self.rng.randrange(12)}", reader_id=reader))

    def wait(self) -> None:
        self.holding.now += self.rng.uniform(0, 8)
        self.grants += self.holder.advance()

    def finish(self) -> None:
        for _, blocks in self.requests.values():
            self.holding.end(blocks)
        if self.rng.random() < 0.3:
            self.holder.release_all()
        else:
            self.holding.now += FOLLOW_S_MAX + 1.0
        self.grants += self.holder.advance()


@pytest.mark.slow
def test_after_any_history_every_block_is_free():
    granted = 0
    for seed in range(HISTORIES):
        history = History(seed)
        for _ in range(30):
            history.any_event()
        history.finish()
        counts = history.holder.counts
        granted += counts.granted_total

        assert history.holding.free == history.holding.free_at_first, seed
        assert (counts.leases, counts.pinned_blocks, counts.next_expiry_s) == (0, 0, 0.0), seed
        assert counts.granted_total == counts.released_total + counts.expired_total, seed
        assert history.holding.pool.reset_prefix_cache(), seed
    assert granted > 3 * HISTORIES


def test_each_followed_request_gets_exactly_one_final_grant_unless_released():
    for seed in range(100):
        history = History(seed)
        history.release = lambda: None
        for _ in range(60):
            history.any_event()
        history.finish()

        next_block: dict[str, int] = {}
        for grant in history.grants:
            if grant.groups:
                assert first_of(grant) == next_block.get(grant.ask_id, 0), seed
                next_block[grant.ask_id] = first_of(grant) + len(blocks_of(grant))
            if grant.final and grant.lease_id:
                next_block.pop(grant.ask_id, None)
        assert next_block == {}, seed
