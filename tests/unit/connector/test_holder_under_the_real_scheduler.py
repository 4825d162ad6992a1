"""With vLLM's scheduler, every granted block is computed, stays unchanged while leased, and is freed afterwards."""

from __future__ import annotations

import random

import pytest

from shared.contracts.kv_exchange import KvGrant, ReleaseKv
from tests.support.kv_messages import blocks_of, first_of
from tests.unit.connector.holding import lease_request
from tests.unit.connector.real_scheduler import BLOCK_TOKENS, TOKENS_A_STEP, Engine, prefixes

HOLDER = {"worker_id": "p", "epoch": 1}


class Reader:
    """Requests leases of prompts and outputs, and checks the content of granted blocks until they expire."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.prompts: dict[str, list[int]] = {}
        self.granted: list[KvGrant] = []
        self.blocks = 0

    def request(self, names: list[int], hashes: list[bytes], hold_s: float, follow_s: float) -> None:
        ask_id = f"ask-{len(self.prompts)}"
        self.prompts[ask_id] = names
        self.take([self.engine.holder.lease(lease_request(hashes, ask_id, hold_s=hold_s, follow_s=follow_s, **HOLDER))])

    def take(self, grants: list[KvGrant]) -> None:
        self.granted += [grant for grant in grants if grant.groups]
        self.blocks += sum(len(blocks_of(grant)) for grant in grants)

    def release(self, ask_id: str) -> None:
        self.granted = [grant for grant in self.granted if grant.ask_id != ask_id]
        self.engine.holder.release(ReleaseKv(reader_id="decode-1", ask_ids=[ask_id], **HOLDER))

    def check(self) -> None:
        self.granted = [grant for grant in self.granted if grant.until_s > self.engine.now]
        for grant in self.granted:
            for index, block_id in enumerate(blocks_of(grant), first_of(grant)):
                assert self.engine.holds(block_id, self.prompts[grant.ask_id], index), (grant.ask_id, index)


def prompts_with_common_beginnings(rng: random.Random) -> list[int]:
    shared = [rng.randrange(3)] * (BLOCK_TOKENS * rng.randrange(1, 5))
    return shared + [rng.randrange(90) for _ in range(rng.randrange(1, 150))]


def run_randomly(engine: Engine, reader: Reader, rng: random.Random, events: int) -> None:
    known: list[str] = []
    for number in range(events):
        event = rng.random()
        if event < 0.12 and len(engine.scheduler.requests) < 10:
            prompt = prompts_with_common_beginnings(rng)
            known.append(f"r{number}")
            engine.add(known[-1], prompt, rng.randrange(1, 80))
        elif event < 0.30 and known:
            names, hashes = engine.history(rng.choice(known[-6:]))
            if hashes:
                reader.request(names, hashes, rng.uniform(0.5, 12), rng.choice([0.0, 0.0, 20.0]))
        elif event < 0.40 and reader.prompts:
            reader.release(rng.choice(list(reader.prompts)))
        elif event < 0.43 and known and known[-1] in engine.scheduler.requests:
            engine.abort(known[-1])
        elif event < 0.50:
            engine.now += rng.uniform(0, 2)
        elif len(engine.queue) < engine.depth and engine.scheduler.has_requests():
            engine.schedule()
        elif engine.queue:
            engine.compute()
            reader.take(engine.holder.advance())
        reader.check()


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_granted_blocks_are_computed_and_all_blocks_return(tmp_path, depth):
    engine = Engine(tmp_path, depth=depth)
    reader = Reader(engine)
    run_randomly(engine, reader, random.Random(depth), events=3000)
    for request_id in list(engine.scheduler.requests):
        engine.abort(request_id)
    while engine.queue:
        engine.compute()

    engine.now += 400.0
    engine.holder.advance()

    assert engine.pool.get_num_free_blocks() == engine.free_at_first
    assert (engine.holder.counts.leases, engine.holder.counts.pinned_blocks) == (0, 0)
    assert engine.preemptions > 5
    assert reader.blocks > 500


@pytest.mark.parametrize("depth", [1, 2])
def test_a_followed_prompt_is_granted_one_chunk_after_computation(tmp_path, depth):
    engine = Engine(tmp_path, depth=depth)
    reader = Reader(engine)
    prompt = [number % 90 for number in range(3 * TOKENS_A_STEP - 2)]
    reader.request(prefixes(prompt), engine.add("r1", prompt, 1), hold_s=30.0, follow_s=30.0)
    granted = []
    while engine.busy:
        while len(engine.queue) < engine.depth and engine.scheduler.has_requests():
            engine.schedule()
        engine.compute()
        grants = engine.holder.advance()
        reader.take(grants)
        reader.check()
        granted.append(sum(len(blocks_of(grant)) for grant in grants))

    blocks = TOKENS_A_STEP // BLOCK_TOKENS
    assert [count for count in granted if count] == [blocks, blocks, blocks - 1]
