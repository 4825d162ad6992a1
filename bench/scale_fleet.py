"""Plays the workers of ``bench_scale`` in one process: ``python -m bench.scale_fleet URL --role both``.

Registers them, renews their records, and sends their load reports and KV events over NATS as ``services.worker`` does;
answers what routers ask (snapshots, tokenizer, tokens of probes), and serves legs at once with tokens that mean nothing.
The chains that a worker holds never change, so that the cached tokens of a prompt are known; only blocks stored by KV
events come and go. Commands come as lines of JSON on stdin; each is answered by one line on stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import uvloop

from bench.index_load import Load
from services.worker.engines.port import EngineTokens
from services.worker.engines.simulated.core.groups import Kind, hash_scheme
from services.worker.engines.simulated.jobs import JobMaker, engine_tokens
from services.worker.engines.simulated.model import SimulatedTokenizer
from services.worker.tiny_model import TINY_MODEL, ensure_tiny_tokenizer
from shared.bus.nats_bus import connect_nats
from shared.bus.port import Bus, Envelope, KeyValueStore
from shared.contracts.channels import FRAMES, KV_EVENTS, KV_SNAPSHOT, LOAD, START_LEG, TOKENIZER, TOKENS, WORKER_RECORDS
from shared.contracts.control import AskTokenizer, AskTokens, PromptTokens, TokenizerAsset, TokensFound
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.inference import Frame, FrameBatch, FrameKind, LegKind, LegReport, StartLeg
from shared.contracts.kv_events import (
    BLOCK_HASH_BYTES,
    TIER_ROTATIONS,
    AskKvSnapshot,
    KvDigest,
    KvEvent,
    KvEventBatch,
    KvEventKind,
    KvSnapshot,
    KvTier,
    pack_hashes,
)
from shared.contracts.kv_exchange import KvExchangeState
from shared.contracts.load import LOAD_HZ_MAX, LOAD_PERIOD_S_MAX, EngineSpeed, LoadReport, StepTotals
from shared.contracts.message import WIRE_VERSION
from shared.contracts.workers import WORKER_RECORD_TTL_S, Fingerprint, Role, WorkerPhase, WorkerRecord
from shared.runtime.settings import CommonSettings

BLOCK_TOKENS = 16
CONTEXT_TOKENS = 32_768
LEGS_MAX = 4096
RENEWALS_PER_TTL = 3
"""As in ``services.worker.lifecycle.registration``."""
TICK_S = 0.001
"""Messages are spread over ticks, as those of processes of their own would be."""
CHURN_BATCHES = 64
"""KV event batches of a worker before the blocks of the first are removed."""
HOT_PROMPTS = 8
"""Prompts of which a quarter of the workers hold parts."""
RENEWED_AT_ONCE = 64
COMPLETION_TOKENS = 16
EPOCH = Epoch(1)
PAUSE_S_MAX = 0.05
REPORTS_PER_S = LOAD_HZ_MAX
"""Of a busy worker: something changes with each step."""
QUIET_REPORTS_PER_S = 1.0 / LOAD_PERIOD_S_MAX
"""Of a worker in which nothing changes."""


def hot_chain(number: int, blocks: int) -> bytes:
    """A prompt of which many workers hold parts, packed."""
    return Load(1, blocks=blocks).chain(1_000_000_000 + number)


def hot_blocks(number: int, worker: int, blocks: int) -> int:
    """How much of that prompt a worker holds, from its start."""
    chance = random.Random(f"{number} {worker}")
    return chance.choice((0, 0, 0, chance.randrange(1, blocks)))


def xor_of(packed: bytes, tier: KvTier = KvTier.DEVICE) -> int:
    """Of the hashes, as ``KvDigest.xor`` has them in a tier."""
    xor = int(np.bitwise_xor.reduce(np.frombuffer(packed, ">u8"), initial=0))
    bits = TIER_ROTATIONS[list(KvTier).index(tier)]
    return (xor << bits | xor >> (64 - bits)) & (1 << 64) - 1


def end_of(packed: bytes) -> bytes:
    """The last hash."""
    return packed[-BLOCK_HASH_BYTES:]


def speed(worker: int) -> EngineSpeed:
    """Of a mid-sized model on a GPU; no two workers are alike."""
    factor = 1.0 + (worker % 100) / 1000
    return EngineSpeed(
        prefill_step_s=0.004 * factor,
        prefill_token_s=0.00004 * factor,
        prefill_pair_s=1e-9,
        decode_step_s=0.012 * factor,
        decode_request_s=0.0001 * factor,
        decode_context_token_s=1e-8,
        prefill_samples=500.0,
        decode_samples=500.0,
        batch_spread=0.05,
        pairs_per_token=500.0,
    )


class PlayedWorker:
    """One worker's state, and the messages that it sends."""

    def __init__(self, number: int, role: Role, revision: str, groups: Kind = "full") -> None:
        """``groups``: full, or state, which is kept at the end of each chain and of each step."""
        self.number = number
        self.worker_id = WorkerId(f"w{number}")
        self.role = role
        self.chance = random.Random(number)
        self.speed = speed(number)
        self.held: list[bytes] = []
        """Chains, packed."""
        self.prompts: set[int] = set()
        """Blocks of the load client's prompts that it holds."""
        self.has_states = groups == "state"
        self.ends: set[int] = set()
        """Blocks of these at whose ends it holds states."""
        self.churn: deque[bytes] = deque()
        """What its last KV events stored."""
        self.removed = 0
        """Blocks, by the last of them."""
        self.seq = 0
        self.blocks = 0
        self.xor = 0
        self.steps = self.tokens = 0
        self.record = WorkerRecord(
            worker_id=self.worker_id,
            epoch=EPOCH,
            role=role,
            phase=WorkerPhase.READY,
            engine="simulated",
            models=[TINY_MODEL],
            max_model_len=CONTEXT_TOKENS,
            fingerprint=Fingerprint(
                model=TINY_MODEL,
                revision=revision,
                dtype="simulated",
                block_size=BLOCK_TOKENS,
                kv_layout="played",
                connector="baton-1/played",
                engine_version="played",
            ),
            hashing=hash_scheme(groups, BLOCK_TOKENS),
            kv_tokens=20_000 * BLOCK_TOKENS,
            legs_max=LEGS_MAX,
            host="h",
            pid=1,
            wire_version=WIRE_VERSION,
        )

    def store(self, packed: bytes, *, removed: bytes = b"") -> KvEventBatch:
        """The event batch that stores some blocks and removes others."""
        events = []
        for tier, of in (KvTier.DEVICE, bytes), (KvTier.BOUNDARY, end_of):
            if tier is KvTier.DEVICE or self.has_states:
                stored, gone = of(packed), of(removed)
                events.append(KvEvent(kind=KvEventKind.STORED, hashes=stored, tier=tier))
                if gone:
                    events.append(KvEvent(kind=KvEventKind.REMOVED, hashes=gone, tier=tier))
                self.blocks += (len(stored) - len(gone)) // BLOCK_HASH_BYTES
                self.xor ^= xor_of(stored, tier) ^ xor_of(gone, tier)
        self.seq += 1
        return KvEventBatch(worker_id=self.worker_id, epoch=EPOCH, seq=self.seq, events=events)

    def computed(self, blocks: int) -> KvEventBatch:
        """The events of a step that computed so many blocks, for which as many were evicted."""
        fresh = self.chance.randbytes(blocks * BLOCK_HASH_BYTES)
        self.churn.append(fresh)
        removed = self.churn.popleft() if len(self.churn) > CHURN_BATCHES else b""
        self.removed = len(removed) // BLOCK_HASH_BYTES
        return self.store(fresh, removed=removed)

    def snapshot(self) -> KvSnapshot:
        chains = [*self.held, *self.churn]
        return KvSnapshot(
            worker_id=self.worker_id,
            epoch=EPOCH,
            seq=self.seq,
            hashes=b"".join(chains),
            boundary_hashes=b"".join(map(end_of, chains)) if self.has_states else b"",
        )

    def cached(self, hashes: Sequence[int], tokens: int) -> int:
        """Tokens of a prompt of the load client of which it can make use."""
        depth = next((at for at, block in enumerate(hashes) if block not in self.prompts), len(hashes))
        depth = min(depth, (tokens - 1) // BLOCK_TOKENS)
        while self.has_states and depth and hashes[depth - 1] not in self.ends:
            depth -= 1
        return depth * BLOCK_TOKENS

    def report(self) -> LoadReport:
        """Busy to some degree; every number has changed since the last one."""
        self.steps += 5
        self.tokens += 200
        steps, tokens, number = self.steps, self.tokens, self.number
        running = 1 + (number * 7 + steps) % 16
        return LoadReport(
            worker_id=self.worker_id,
            epoch=EPOCH,
            role=self.role,
            phase=WorkerPhase.READY,
            running=running,
            waiting=steps % 3,
            waiting_tokens=(number * 37 + steps * 11) % 5000,
            legs=running + steps % 3,
            kv_tokens_used=running * 100 * BLOCK_TOKENS,
            kv_tokens_total=20_000 * BLOCK_TOKENS,
            digest=KvDigest(seq=self.seq, count=self.blocks, xor=self.xor),
            prompt_tokens_total=2 * tokens,
            computed_tokens_total=tokens,
            cached_tokens_total=tokens,
            generation_tokens_total=tokens,
            prefill_tokens_per_s=20_000.0 + steps,
            decode_s_per_token=0.02,
            exchange=KvExchangeState(leases=steps % 4, pinned_blocks=steps % 50, leases_granted_total=steps),
            steps=StepTotals(
                seconds=steps * 0.02,
                prefill_steps=steps,
                prefill_tokens=tokens,
                prefill_pairs=tokens * 500.0,
                decode_steps=steps,
                decode_requests=steps * running,
                decode_context_tokens=tokens * 10,
            ),
            speed=self.speed,
        )


class Counts(msgspec.Struct):
    """What was sent since the start."""

    reports: int = 0
    batches: int = 0
    blocks: int = 0
    """Stored."""
    removed: int = 0
    """Blocks, too."""
    records: int = 0
    prefill_legs: int = 0
    decode_legs: int = 0
    late: int = 0
    """Ticks that came more than ``PAUSE_S_MAX`` late."""


class Rate(NamedTuple):
    """Messages a second of each worker; 0: none."""

    reports: float = 0.0
    batches: float = 0.0
    blocks: float = 0.0
    """Computed a second."""


class Fleet:
    """All played workers behind one connection."""

    def __init__(
        self, bus: Bus, records: KeyValueStore[WorkerRecord], load: Load, roles: Sequence[Role], groups: Kind
    ) -> None:
        self.tokenizer = SimulatedTokenizer(ensure_tiny_tokenizer(Path(CommonSettings().cache_dir)))
        self.jobs = JobMaker(self.tokenizer, [TINY_MODEL], CONTEXT_TOKENS)
        self.bus, self.records, self.load, self.roles = bus, records, load, roles
        self.groups = groups
        self.workers: list[PlayedWorker] = []
        self.by_id: dict[WorkerId, PlayedWorker] = {}
        self.counts = Counts()
        self.rate = Rate()
        self.read: dict[bytes, EngineTokens] = {}
        """Bodies of legs and probes, as their engine reads them."""

    async def open(self) -> None:
        await self.bus.answer(KV_SNAPSHOT, self.snapshot)
        await self.bus.answer(TOKENIZER, self.tokenizer_asset)
        await self.bus.answer(TOKENS, self.tokens)
        await self.bus.subscribe(START_LEG, self.serve)
        await self.bus.flush(5.0)

    # ---- what routers ask

    async def snapshot(self, ask: AskKvSnapshot, _envelope: Envelope) -> KvSnapshot:
        return self.by_id[ask.worker_id].snapshot()

    async def tokenizer_asset(self, ask: AskTokenizer, _envelope: Envelope) -> TokenizerAsset:
        files = self.tokenizer.files()
        return TokenizerAsset(
            worker_id=ask.worker_id,
            epoch=EPOCH,
            tokenizer_json=files.tokenizer_json,
            chat_template=files.chat_template,
            special_tokens=files.special_tokens,
            adds_special_tokens=files.adds_special_tokens,
        )

    async def tokens(self, ask: AskTokens, _envelope: Envelope) -> TokensFound:
        found = [await self.read_body(prompt.path, prompt.body) for prompt in ask.prompts]
        prompts = [PromptTokens(tokens=one.tokens, hashes=pack_hashes(one.hashes)) for one in found]
        return TokensFound(worker_id=ask.worker_id, epoch=EPOCH, prompts=prompts)

    async def read_body(self, path: str, body: bytes) -> EngineTokens:
        read = self.read.get(body)
        if read is None:
            read = self.read[body] = await engine_tokens(self.jobs, self.tokenizer, BLOCK_TOKENS, path, body)
            assert not read.refusal, read.refusal
        return read

    # ---- legs

    async def serve(self, start: StartLeg, _envelope: Envelope) -> None:
        """Answer a leg at once; the report says what the worker really holds of the prompt."""
        worker, read = self.by_id[start.worker_id], await self.read_body(start.path, start.body)
        is_prefill = start.kind is LegKind.PREFILL
        self.counts.prefill_legs += is_prefill
        self.counts.decode_legs += not is_prefill
        report = LegReport(
            prompt_tokens=len(read.tokens),
            cached_tokens=worker.cached(read.hashes, len(read.tokens)),
            completion_tokens=1 if is_prefill else COMPLETION_TOKENS,
            prefill_s=0.01,
            kv_transfer=b"{}" if is_prefill else b"",
            finish_reason="length",
        )
        usage = {"prompt_tokens": len(read.tokens), "completion_tokens": COMPLETION_TOKENS}
        body = json.dumps({"choices": [{"index": 0, "text": "x" * 64}], "usage": usage}).encode()
        whole = Frame(
            leg_id=start.leg_id,
            seq=0,
            kind=FrameKind.END,
            data=body,
            token_ids=[7] * COMPLETION_TOKENS,
            status=200,
            content_type="application/json",
            report=report,
        )
        batch = FrameBatch(router_id=start.router_id, worker_id=start.worker_id, epoch=EPOCH, frames=[whole])
        await self.bus.publish(FRAMES, batch)

    # ---- commands

    async def join(self, count: int) -> dict[str, Any]:
        """Have so many workers."""
        revision = "1"
        for number in range(len(self.workers), count):
            worker = PlayedWorker(number, self.roles[number % len(self.roles)], revision, self.groups)
            self.workers.append(worker)
            self.by_id[worker.worker_id] = worker
        await self.renew()
        return {"workers": len(self.workers)}

    async def renew(self) -> None:
        for begin in range(0, len(self.workers), RENEWED_AT_ONCE):
            some = self.workers[begin : begin + RENEWED_AT_ONCE]
            await asyncio.gather(*(self.records.put(worker.record) for worker in some))
            self.counts.records += len(some)

    async def fill(self) -> dict[str, Any]:
        """Store the load's chains, each at one worker; by KV events."""
        for number in range(self.load.chains()):
            for holder in self.load.holders_of(number):
                await self.hold(self.workers[holder], self.load.chain(number))
        return self.holding()

    async def fill_hot(self) -> dict[str, Any]:
        """Store parts of the hot prompts."""
        for number in range(HOT_PROMPTS):
            chain = hot_chain(number, self.load.blocks)
            for worker in self.workers:
                if blocks := hot_blocks(number, worker.number, self.load.blocks):
                    await self.hold(worker, chain[: blocks * BLOCK_HASH_BYTES])
        return self.holding()

    async def fill_prompts(self, bodies: list[str]) -> dict[str, Any]:
        """Each of these requests' prompts is held by one worker that prefills."""
        prefilling = [worker for worker in self.workers if worker.role is not Role.DECODE]
        cached = 0
        for number, body in enumerate(bodies):
            read = await self.read_body("/v1/completions", body.encode())
            worker = prefilling[number % len(prefilling)]
            new = [block for block in read.hashes if block not in worker.prompts]
            worker.prompts.update(new)
            cached += len(read.hashes)
            if new:
                worker.ends.add(new[-1])
                await self.hold(worker, pack_hashes(new))
        return {**self.holding(), "prompt_blocks": cached}

    async def hold(self, worker: PlayedWorker, packed: bytes) -> None:
        worker.held.append(packed)
        await self.bus.publish(KV_EVENTS, worker.store(packed))

    def holding(self) -> dict[str, Any]:
        return {"entries": sum(worker.blocks for worker in self.workers)}

    async def set_rate(self, rate: dict[str, float]) -> dict[str, Any]:
        self.rate = Rate(**rate)
        return self.counted()

    def counted(self) -> dict[str, Any]:
        return {**msgspec.to_builtins(self.counts), **self.holding(), "at": asyncio.get_running_loop().time()}

    # ---- what workers send by themselves

    async def send(self) -> None:
        """Reports and KV events until cancelled; each worker's are evenly spread over time."""
        loop = asyncio.get_running_loop()
        reports = batches = 0.0
        due = loop.time()
        next_report = next_batch = 0
        while True:
            due += TICK_S
            wait_s = due - loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            elif wait_s < -PAUSE_S_MAX:
                self.counts.late += 1
                due = loop.time()
            count, rate = len(self.workers), self.rate
            reports += count * rate.reports * TICK_S
            batches += count * rate.batches * TICK_S
            while reports >= 1.0:
                reports -= 1.0
                next_report = (next_report + 1) % count
                await self.bus.publish(LOAD, self.workers[next_report].report())
                self.counts.reports += 1
            while batches >= 1.0:
                batches -= 1.0
                next_batch = (next_batch + 1) % count
                worker = self.workers[next_batch]
                # Whole blocks; their mean is the rate.
                blocks = int(rate.blocks / rate.batches + worker.chance.random())
                if blocks:
                    await self.bus.publish(KV_EVENTS, worker.computed(blocks))
                    self.counts.batches += 1
                    self.counts.blocks += blocks
                    self.counts.removed += worker.removed

    async def renew_for_ever(self) -> None:
        while True:
            begun = asyncio.get_running_loop().time()
            for begin in range(0, len(self.workers), RENEWED_AT_ONCE):
                some = self.workers[begin : begin + RENEWED_AT_ONCE]
                await asyncio.gather(*(self.records.put(worker.record) for worker in some))
                self.counts.records += len(some)
                await asyncio.sleep(WORKER_RECORD_TTL_S / RENEWALS_PER_TTL * len(some) / len(self.workers))
            took_s = asyncio.get_running_loop().time() - begun
            await asyncio.sleep(max(0.0, WORKER_RECORD_TTL_S / RENEWALS_PER_TTL - took_s) or 0.1)

    async def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        what, given = command["what"], command.get("with", {})
        commands = {
            "join": self.join,
            "fill": self.fill,
            "fill_hot": self.fill_hot,
            "fill_prompts": self.fill_prompts,
            "rate": lambda **rate: self.set_rate(rate),
        }
        return self.counted() if what == "counts" else await commands[what](**given)


async def run(options: argparse.Namespace) -> None:
    bus = await connect_nats(options.url, name="fleet", frame_budget_bytes=64 * 1024 * 1024)
    roles = {"both": (Role.BOTH,), "apart": (Role.PREFILL, Role.DECODE)}[options.roles]
    load = Load(options.entries, workers=options.workers, blocks=options.blocks)
    fleet = Fleet(bus, await bus.key_value_store(WORKER_RECORDS), load, roles, options.groups)
    await fleet.open()
    lines = asyncio.StreamReader(limit=64 * 1024 * 1024)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(fleet.send()), tasks.create_task(fleet.renew_for_ever())]
        while line := await lines.readline():
            print(json.dumps(await fleet.obey(json.loads(line))), flush=True)
        for task in background:
            task.cancel()
    await bus.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--roles", choices=("both", "apart"), default="both")
    parser.add_argument("--groups", choices=("full", "state"), default="full")
    parser.add_argument("--entries", type=int, default=10_000_000)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=512)
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
