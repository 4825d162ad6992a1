"""Sends legs, leases and fetches directly to workers over NATS, without a router process."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec

from connector.layout.routes import ReaderRank, routes_to
from connector.layout.tensors import stages_of
from services.router.tokenize.block_hash import extend_chain
from shared.bus.port import Bus
from shared.contracts.channels import KV_FETCH, KV_HANDSHAKE, KV_LEASE, KV_PREFETCH, KV_RELEASE
from shared.contracts.engine_paths import COMPLETIONS
from shared.contracts.ids import WorkerId
from shared.contracts.inference import PREFETCH_S_MAX, LegKind, PrefetchedKv, PrefetchKv
from shared.contracts.kv_exchange import (
    AskKvHandshake,
    FetchedKv,
    FetchKv,
    KvGrant,
    KvOffer,
    KvSource,
    KvTransferReport,
    LeaseKv,
    ReleaseKv,
    pack_full_hashes,
)
from shared.contracts.workers import HashScheme
from tests.support.kv_tap import Tap
from tests.support.pulled_legs import PulledLeg
from tests.support.worker_processes import Answer, Router

MODEL = "baton-tiny"
BLOCK = 32
TOKENS = 16
"""Output tokens where the length does not matter."""
ANSWER_S_MAX = 60.0
GRANT_S_MAX = 30.0
ALONE = "alone"
"""A cache salt that no other request uses, so that its prompts are computed without cached blocks."""


def body(prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    """Body of a greedy completion request."""
    fixed = {"model": MODEL, "prompt": list(prompt), "temperature": 0, "ignore_eos": True}
    return {**fixed, "max_tokens": TOKENS, **fields}


def full_hashes(tokens: Sequence[int]) -> list[bytes]:
    """Full hashes of the prompt's full blocks."""
    scheme, names = HashScheme(block_size=BLOCK), list[bytes]()
    for at in range(0, len(tokens) - BLOCK + 1, BLOCK):
        _short, digest = extend_chain(names[-1] if names else None, tokens[at : at + BLOCK], scheme)
        assert digest is not None
        names.append(digest)
    return names


def transfer_report_of(answer: Answer) -> KvTransferReport:
    """The leg's transfer report; asserts that its tokens add up."""
    assert answer.failure is None, answer.failure
    transfer_report = answer.report.kv
    assert transfer_report is not None, "no transfer report"
    assert (
        transfer_report.local_tokens + transfer_report.fetched_tokens + transfer_report.recomputed_tokens
        == transfer_report.prompt_tokens
    ), transfer_report
    return transfer_report


class Driver:
    """Acts as a router and as a reader of KV; ``tap`` records the messages on the bus."""

    def __init__(self, router: Router, tap: Tap) -> None:
        self.router = router
        self.tap = tap
        self.bus: Bus = router.bus
        self.reader_id = WorkerId(f"reader-{uuid.uuid4().hex[:8]}")

    async def leg(self, worker: str, kind: LegKind, prompt: Sequence[int], **options: Any) -> Answer:
        """Run one leg to its end. ``fields`` are body fields; other options are fields of StartLeg. As routers do, it leaves
        the worker no threshold of its own unless it is told to.
        """
        fields, options = options.pop("fields", {}), {"cache_hit_threshold": 0.0, **options}
        async with asyncio.timeout(ANSWER_S_MAX):
            return await self.router.leg(worker_ref(worker), kind, body(prompt, **fields), **options)

    async def start(self, worker: str, kind: LegKind, prompt: Sequence[int], **options: Any) -> PulledLeg:
        """Start one leg without waiting for its end."""
        return await self.router.start(worker_ref(worker), kind, body(prompt, **options.pop("fields", {})), **options)

    async def offered(self, worker: str, prompt: Sequence[int], **options: Any) -> KvOffer:
        """The offer of a prefill leg."""
        answer = await self.leg(worker, LegKind.PREFILL, prompt, **options)
        offer = transfer_report_of(answer).offer
        assert offer is not None, "the prefill leg made no offer"
        return offer

    async def taken(self, worker: str, prompt: Sequence[int], offer: KvOffer, **options: Any) -> Answer:
        """A decode leg that reads the offered blocks."""
        return await self.leg(worker, LegKind.DECODE, prompt, kv_transfer=msgspec.msgpack.encode(offer), **options)

    async def hand_over(self, prefill: str, decode: str, prompt: Sequence[int], block: int = BLOCK) -> None:
        """Hand a prompt over: every full block is read, and the tokens are those of one engine, from the first one on, which
        is the prefill leg's.
        """
        alone = await self.alone(decode, prompt)
        answer = await self.taken(decode, prompt, await self.offered(prefill, prompt))
        transfer_report = transfer_report_of(answer)
        assert transfer_report.reads[0].failure == ""
        assert transfer_report.first_token_received
        assert transfer_report.fetched_tokens == len(prompt) // block * block
        assert answer.token_ids == alone

    async def alone(self, worker: str, prompt: Sequence[int], tokens: int = TOKENS) -> list[int]:
        """Expected output tokens: those of one engine that fetches and reuses nothing."""
        fields = {"cache_salt": ALONE, "max_tokens": tokens}
        answer = await self.leg(worker, LegKind.AGGREGATED, prompt, fields=fields, cache_hit_threshold=0.0)
        assert len(answer.token_ids) == tokens, answer
        return answer.token_ids

    def source(self, worker: str, **fields: Any) -> KvSource:
        """The worker in its current epoch."""
        return KvSource(worker_id=WorkerId(worker), epoch=self.tap.loads[worker].epoch, **fields)

    async def fetch(self, worker: str, prompt: Sequence[int], *sources: KvSource) -> FetchedKv:
        """Order the worker to fetch the prompt's full blocks."""
        order = FetchKv(
            worker_id=WorkerId(worker),
            sender_id=WorkerId("test"),
            hashes=pack_full_hashes(full_hashes(prompt)),
            sources=list(sources),
            deadline_s=ANSWER_S_MAX / 2,
        )
        return await self.bus.ask(KV_FETCH, order, timeout_s=ANSWER_S_MAX)

    async def prefetch(
        self, worker: str, prompt: Sequence[int], *sources: KvSource, deadline_s: float = PREFETCH_S_MAX, **fields: Any
    ) -> PrefetchedKv:
        """Order the worker to prefetch the prompt, as routers do. ``fields``: of the body."""
        order = PrefetchKv(
            worker_id=WorkerId(worker),
            epoch=self.tap.loads[worker].epoch,
            path=COMPLETIONS,
            body=msgspec.json.encode(body(prompt, **fields)),
            sources=list(sources),
            tokens=len(prompt),
            deadline_s=deadline_s,
        )
        return await self.bus.ask(KV_PREFETCH, order, timeout_s=ANSWER_S_MAX)

    async def pieces_per_block(self, worker: str) -> int:
        """Into so many pieces of memory a block of the worker's first rank is spread."""
        asked = AskKvHandshake(worker_id=WorkerId(worker), reader_id=self.reader_id)
        peer = await self.bus.ask(KV_HANDSHAKE, asked, timeout_s=ANSWER_S_MAX)
        return sum(len(route.rows) for route in routes_to(ReaderRank(peer.ranks[0], len(stages_of(peer)[0])), peer))

    async def lease(self, worker: str, prompt: Sequence[int], *, hold_s: float) -> KvGrant:
        """Lease the prompt's blocks for a reader that only this test uses."""
        request = LeaseKv(
            worker_id=WorkerId(worker),
            epoch=self.tap.loads[worker].epoch,
            reader_id=self.reader_id,
            ask_id=uuid.uuid4().hex,
            hashes=pack_full_hashes(full_hashes(prompt)),
            hold_s=hold_s,
        )
        await self.bus.publish(KV_LEASE, request)
        granted = lambda: [grant for grant in self.tap.grants if grant.ask_id == request.ask_id]  # noqa: E731
        return (await self.tap.until(granted, f"{worker} grants", GRANT_S_MAX))[0]

    async def release(self, grant: KvGrant) -> None:
        message = ReleaseKv(
            worker_id=grant.worker_id,
            epoch=grant.epoch,
            reader_id=self.reader_id,
            ask_ids=[grant.ask_id],
            lease_ids=[grant.lease_id],
        )
        await self.bus.publish(KV_RELEASE, message)


def worker_ref(worker_id: str) -> Any:
    """What ``Router`` needs of a worker: its id."""
    return SimpleNamespace(worker_id=WorkerId(worker_id))


@asynccontextmanager
async def driving(tap: Tap) -> AsyncIterator[Driver]:
    """A driver on the tap's NATS."""
    router = Router(tap.bus)
    await router.open()
    try:
        yield Driver(router, tap)
    finally:
        await router.inbox.close()
