"""Random histories of an engine that lends, for any layout of KV cache groups, and a reader that checks what it gets."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shared.contracts.ids import LegId
from shared.contracts.kv_exchange import (
    GroupBlocks,
    KvGrant,
    KvGroupKind,
    KvOffer,
    ReleaseKv,
    is_sound_grant,
    is_sound_offer,
    unpack_block_ids,
)
from tests.unit.connector.holding import lease_request
from tests.unit.connector.real_scheduler import Engine, Layout, full, state, window

HOLDER = {"worker_id": "p", "epoch": 1}
POOL_TOKENS = (320, 512, 1200)
LAYOUTS = {
    "full": Layout((full(16),)),
    "window": Layout((window(16, 40), full(16))),
    "window of other blocks": Layout((full(32), window(16, 24))),
    "three states": Layout((state(32), state(32), state(32), full(32)), unit=32),
    "states inside blocks": Layout((state(64), full(64))),
    "state without caching": Layout((state(2048), full(16)), caches=False),
    "only a window": Layout((window(16, 40),)),
    "all kinds": Layout((state(32), window(32, 70), full(32)), unit=32),
}


@dataclass(slots=True)
class Lent:
    """A block that the reader relies on."""

    block_id: int
    group: int
    index: int
    end: int
    """Token after the last one that it needs of the block."""
    until_s: float


@dataclass(slots=True)
class Asked:
    names: list[int]
    hashes: list[bytes]
    full_tokens: int
    """End of the full attention that it has."""
    lent: list[Lent]


class Reader:
    """Asks for leases of prompts and answers, and checks each block until its lease ends."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seen = Counter[str]()
        self._asked: dict[str, Asked] = {}

    def ask(self, rng: random.Random, names: list[int], hashes: list[bytes], leg_id: LegId) -> None:
        engine, groups = self.engine, self.engine.layout.groups
        end = rng.randrange(1, len(hashes) + 1) if rng.random() < 0.3 else len(hashes)
        begin = have = 0
        if rng.random() < 0.3:
            have = rng.randrange(end * engine.unit)
            widest = max(group.window for group in groups)
            begin = max(0, have - widest) // engine.layout.block_size * engine.layout.block_size
        ask_id = f"ask-{len(self._asked)}"
        size = min((group.block_size for group in groups if group.kind is KvGroupKind.FULL), default=1)
        self._asked[ask_id] = Asked(names, hashes, max(begin, have // size * size), [])
        request = lease_request(
            hashes[begin // engine.unit : end],
            ask_id,
            first=begin // engine.unit,
            have=have,
            hold_s=rng.uniform(0.5, 12),
            follow_s=rng.choice([0.0, 0.0, 20.0]),
            leg_id=leg_id,
            **HOLDER,
        )
        self.take([engine.holder.lease(request)])

    def take(self, grants: list[KvGrant]) -> None:
        for grant in grants:
            assert is_sound_grant(grant)
            if grant.groups and grant.ask_id in self._asked:
                self._rely(self._asked[grant.ask_id], grant, grant.until_s)

    def take_offer(self, request: Any, offer: KvOffer | None) -> None:
        if offer is None:
            return
        assert is_sound_offer(offer)
        self.seen["offer"] += 1
        asked = Asked(*self.engine.history(request.request_id), 0, [])
        self._asked[offer.lease_id] = asked
        self._rely(asked, offer, offer.until_s, own=request.request_id)

    def release(self, rng: random.Random) -> None:
        if not self._asked:
            return
        lease_id = rng.choice(list(self._asked))
        self._asked[lease_id].lent.clear()
        if lease_id.startswith("ask"):
            ended = ReleaseKv(reader_id="decode-1", ask_ids=[lease_id], **HOLDER)
        else:
            ended = ReleaseKv(reader_id="decode-1", lease_ids=[lease_id], **HOLDER)
        self.engine.holder.release(ended)

    def check(self) -> None:
        """Every block that it relies on holds what its prompt has there."""
        engine = self.engine
        for asked in self._asked.values():
            asked.lent = [one for one in asked.lent if one.until_s > engine.now]
            for one in asked.lent:
                assert engine.holds(one.block_id, asked.names, one.index, one.group, one.end), one

    def _rely(self, asked: Asked, granted: KvGrant | KvOffer, until_s: float, own: str = "") -> None:
        engine, boundary = self.engine, granted.boundary
        assert len(granted.groups) == len(engine.layout.groups)
        self.seen["boundary" if boundary else "full attention ahead"] += 1
        for number, (group, blocks) in enumerate(zip(engine.layout.groups, granted.groups, strict=True)):
            indices = self._indices(blocks)
            if group.kind is KvGroupKind.FULL:
                first = asked.full_tokens // group.block_size
                assert not indices or indices.start == first
                assert not boundary or max(first, indices.stop) >= -(-boundary // group.block_size)
                assert not boundary or not indices or indices.stop == -(-boundary // group.block_size)
            else:
                assert indices == (engine.holder.groups.needed(number, 0, boundary) if boundary else range(0))
            if boundary % group.block_size:
                self.seen["inside a block"] += 1
            end = boundary or indices.stop * group.block_size
            ids = unpack_block_ids(blocks.block_ids)
            asked.lent += [Lent(block, number, at, end, until_s) for at, block in zip(indices, ids, strict=True)]
            if group.kind is KvGroupKind.STATE and boundary:
                self._check_is_settled(number, ids, own)
        sizes = [group.block_size for group in engine.layout.groups if group.kind is KvGroupKind.FULL]
        ends = [
            self._indices(granted.groups[at]).stop
            for at, group in enumerate(engine.layout.groups)
            if group.kind is KvGroupKind.FULL
        ]
        if not boundary:
            asked.full_tokens = ends[0] * sizes[0]
        elif len(engine.layout.groups) == 1:
            asked.full_tokens = boundary
        assert granted.last_hash == asked.hashes[(boundary or asked.full_tokens) // engine.unit - 1]
        self.check()

    def _indices(self, blocks: GroupBlocks) -> range:
        return range(blocks.first, blocks.first + len(unpack_block_ids(blocks.block_ids)))

    def _check_is_settled(self, number: int, ids: list[int], own: str) -> None:
        """No running request will write into the block: vLLM has not marked it to be copied first."""
        manager = self.engine.manager.coordinator.single_type_managers[number]
        marked = {block.block_id for name, (_at, block) in manager._partial_hit_reqs.items() if name != own}
        assert not marked & set(ids)


class History:
    """Requests that come and go while others read what they leave."""

    def __init__(self, folder: Path, layout: Layout, seed: int) -> None:
        pytest.importorskip("vllm")
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        self.rng = random.Random(seed)
        depth = self.rng.choice([1, 2, 3])
        has_retention = any(group.kind is not KvGroupKind.FULL for group in layout.groups)
        retention = self.rng.choice([0, None, 2 * layout.block_size]) if has_retention else 0
        history = self

        class Lending(AsyncScheduler if depth > 1 else Scheduler):  # type: ignore[misc]
            """Tells of ended requests as it would tell a connector."""

            def _connector_finished(self, request: Any) -> Any:
                self.kv_cache_manager.remove_skipped_blocks(
                    request_id=request.request_id,
                    processed_computed_tokens=max(0, request.num_computed_tokens - request.num_in_flight_tokens),
                    num_prompt_tokens=request.num_prompt_tokens,
                )
                history.finished(request)
                return super()._connector_finished(request)

        blocks = 6 + self.rng.choice(POOL_TOKENS) // min(layout.block_size, 64) * len(layout.groups)
        self.engine = Engine(folder, depth=depth, layout=layout, blocks=blocks, retention=retention, kind=Lending)
        self.reader = Reader(self.engine)
        self._known: list[str] = []
        self._legs: set[str] = set()

    @property
    def seen(self) -> Counter[str]:
        return self.reader.seen + Counter(copies=self.engine.copies, preemptions=self.engine.preemptions)

    def run(self, events: int) -> None:
        for _event in range(events):
            self._any_event()
            self.reader.check()
        self._end()

    def finished(self, request: Any) -> None:
        """The request still has its blocks. Prefill legs offer them."""
        name, engine = request.request_id, self.engine
        if name not in self._legs:
            return
        from vllm.v1.request import RequestStatus

        if request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
            ids = engine.manager.get_block_ids_for_computed_tokens(name, request.num_computed_tokens)
            offer = engine.holder.offer(request.block_hashes, request.num_prompt_tokens, ids, f"offer of {name}")
            self.reader.take_offer(request, offer)
        engine.holder.leg_ended(LegId(name))

    def _any_event(self) -> None:
        rng, engine, event = self.rng, self.engine, self.rng.random()
        if event < 0.14 and len(engine.scheduler.requests) < 10:
            self._add()
        elif event < 0.32 and self._known:
            name = rng.choice(self._known[-6:])
            names, hashes = engine.history(name)
            if hashes:
                self.reader.ask(rng, list(names), hashes, LegId(name if rng.random() < 0.7 else ""))
        elif event < 0.38:
            self.reader.release(rng)
        elif event < 0.41 and self._known and self._known[-1] in engine.scheduler.requests:
            engine.abort(self._known[-1])
        elif event < 0.46:
            engine.now += rng.uniform(0, 2)
            self.reader.take(engine.holder.advance())
        elif len(engine.queue) < engine.depth and engine.scheduler.has_requests():
            engine.schedule()
        elif engine.queue:
            engine.compute()
            self.reader.take(engine.holder.advance())

    def _add(self) -> None:
        rng, known = self.rng, self._known
        if known and rng.random() < 0.3:  # the next turn, or the same prompt again
            tokens = self.engine.running.get(rng.choice(known[-4:]))
            prompt = list(tokens.tokens)[:250] if tokens else [1] * 40
        else:
            prompt = [rng.randrange(3)] * (16 * rng.randrange(1, 9))
        prompt += [rng.randrange(90) for _ in range(rng.choice([0, 1, 2, 15, rng.randrange(1, 120)]))]
        name = f"r{len(known)}"
        is_leg = rng.random() < 0.5
        if is_leg:
            self._legs.add(name)
        known.append(name)
        self.engine.add(name, prompt, 1 if is_leg else rng.randrange(1, 80))

    def _end(self) -> None:
        engine = self.engine
        for request_id in list(engine.scheduler.requests):
            engine.abort(request_id)
        while engine.queue:
            engine.compute()
            self.reader.take(engine.holder.advance())
        self.reader.check()
        engine.now += 400.0
        engine.holder.advance()

        assert (engine.holder.counts.leases, engine.holder.counts.pinned_blocks) == (0, 0)
        assert engine.pool.get_num_free_blocks() == engine.free_at_first
