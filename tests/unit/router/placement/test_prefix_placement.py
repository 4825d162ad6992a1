"""From KV events to placements: a prompt goes to its blocks, and gaps in the index are noticed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from services.router.state import fleet_table as t
from services.router.state.prefix_index import IndexState
from services.worker.tiny_model import ensure_tiny_tokenizer
from shared.contracts.channels import KV_EVENTS
from shared.contracts.control import TokenizerAsset
from shared.contracts.ids import WorkerId
from shared.contracts.kv_events import KvDigest, KvEvent, KvEventKind, pack_hashes, unpack_hashes
from shared.contracts.kv_exchange import KvSource
from shared.contracts.workers import HashScheme, Role
from tests.support.block_hashes import block_hashes
from tests.support.builders import kv_batch
from tests.unit.router.world import World, in_world, prompt, settle

TEXT = "a beginning that many prompts have in common " * 20


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory) -> bytes:
    return (Path(ensure_tiny_tokenizer(tmp_path_factory.mktemp("cache"))) / "tokenizer.json").read_bytes()


def blocks_of(tokenizer_json: bytes, text: str) -> list[int]:
    return block_hashes(Tokenizer.from_str(tokenizer_json.decode()).encode(text).ids, HashScheme(block_size=32))


async def two_prefills(world: World, tokenizer_json: bytes) -> None:
    for worker_id, role in (("p1", Role.PREFILL), ("p2", Role.PREFILL), ("d1", Role.DECODE)):
        asset = TokenizerAsset(worker_id=worker_id, epoch=1, tokenizer_json=tokenizer_json)
        await world.worker(worker_id, role, asset=asset)
    fingerprint = world.workers["p1"].record().fingerprint.key()
    while not world.router.prompts.followed(fingerprint):
        await asyncio.to_thread(lambda: None)


def state_of(world: World, worker_id: str) -> IndexState:
    return world.router.fleet.index.state(worker_id)


def held(world: World, worker_id: str) -> set[int]:
    index = world.router.fleet.index
    return set(unpack_hashes(index.table.blocks(index.slot(worker_id), 0)))


@in_world()
async def test_a_prompt_goes_to_the_worker_with_its_blocks(world: World, tokenizer_json):
    await two_prefills(world, tokenizer_json)
    await world.bus.publish(KV_EVENTS, kv_batch(1, *blocks_of(tokenizer_json, TEXT), worker_id="p2"))
    await settle()

    responses = [await world.ask(prompt(prompt=TEXT)) for _ in range(4)]

    assert {response.headers["x-baton-prefill-worker"] for response in responses} == {"p2"}


@in_world()
async def test_prompts_are_tokenized_once_a_second_worker_can_compute_them(world: World, tokenizer_json):
    for worker_id, role in (("p1", Role.PREFILL), ("d1", Role.DECODE)):
        asset = TokenizerAsset(worker_id=worker_id, epoch=1, tokenizer_json=tokenizer_json)
        await world.worker(worker_id, role, asset=asset)
    fingerprint = world.workers["p1"].record().fingerprint.key()
    while not world.router.prompts.followed(fingerprint):
        await asyncio.to_thread(lambda: None)

    async def is_exact() -> bool:
        assert (await world.ask(prompt(prompt=TEXT))).status == 200
        return world.router.decisions.log.newest_first()[0].exact

    assert not await is_exact()
    world.workers["d1"].role = Role.BOTH
    await world.workers["d1"].report()
    await settle()
    assert await is_exact()

    world.workers["d1"].role = Role.DECODE
    await world.workers["d1"].report()
    await settle()
    assert not await is_exact()

    await world.worker("p2", Role.PREFILL)
    assert await is_exact()


@in_world(fetch_tokens_min=64)
async def test_the_prefill_worker_reads_a_conversation_from_the_decode_worker(world: World, tokenizer_json):
    for worker_id, role in (("p1", Role.PREFILL), ("d1", Role.DECODE)):
        asset = TokenizerAsset(worker_id=worker_id, epoch=1, tokenizer_json=tokenizer_json)
        await world.worker(worker_id, role, asset=asset, connector="baton-1")
    fingerprint = world.workers["p1"].record().fingerprint.key()
    while not world.router.prompts.followed(fingerprint):
        await asyncio.to_thread(lambda: None)
    blocks = blocks_of(tokenizer_json, TEXT)[:-1]
    await world.bus.publish(KV_EVENTS, kv_batch(1, *blocks, worker_id="d1"))
    await settle()

    for body in (prompt(prompt=TEXT), prompt(prompt=TEXT, kv_fetch_min_tokens=100_000)):
        assert (await world.ask(body, x_baton_mode="disaggregated")).status == 200

    sources = [leg.kv_sources for leg in world.workers["p1"].started]
    assert sources == [[KvSource(worker_id="d1", epoch=1, end=len(blocks))], []]


@in_world()
async def test_a_snapshot_repairs_a_missed_batch(world: World, tokenizer_json):
    await world.pair()
    worker = world.workers["p1"]
    asked = world.router.kv.snapshots
    worker.seq, worker.held = 3, pack_hashes([1, 2, 3])

    await world.bus.publish(KV_EVENTS, kv_batch(3, 3, worker_id="p1"))
    await asyncio.sleep(1)

    assert world.router.kv.snapshots == asked + 1
    assert state_of(world, "p1") is IndexState.EXACT
    assert held(world, "p1") == {1, 2, 3}


@in_world()
async def test_a_digest_mismatch_triggers_a_snapshot(world: World):
    await world.pair()
    asked = world.router.kv.snapshots

    await world.workers["p1"].report(digest=KvDigest(seq=0, count=5, xor=7))
    await asyncio.sleep(1)

    assert world.router.kv.snapshots == asked + 1
    assert state_of(world, "p1") is IndexState.EXACT


@in_world()
async def test_a_worker_without_a_snapshot_is_placed_by_load(world: World):
    p1, _d1 = await world.pair()
    await p1._subscriptions[-1].close()

    world.router.kv.doubt_all()
    await asyncio.sleep(2)

    assert state_of(world, "p1") is IndexState.FALLBACK
    assert (await world.ask(prompt())).status == 200


@in_world()
async def test_the_index_is_exact_again_after_a_bus_outage(world: World):
    await world.pair()

    world.bus.lose()
    await asyncio.sleep(1)
    world.bus.restore()
    await asyncio.sleep(2)

    assert {state_of(world, "p1"), state_of(world, "d1")} == {IndexState.EXACT}
    assert (await world.ask(prompt())).status == 200


@in_world()
async def test_a_departed_worker_leaves_nothing_in_the_index(world: World):
    p1, _d1 = await world.pair()
    await world.bus.publish(KV_EVENTS, kv_batch(1, 11, 12, worker_id="p1"))
    await settle()
    p1.alive = False

    await (await world.bus.key_value_store(p1.channel)).delete("p1")
    await asyncio.sleep(6)

    fleet = world.router.fleet
    assert (list(fleet.cluster.workers), fleet.index.table.size()) == (["d1"], 0)


@in_world()
async def test_placement_learns_which_evicted_blocks_are_computed_again(world: World):
    p1, d1 = await world.pair()
    removed = KvEvent(kind=KvEventKind.REMOVED, hashes=pack_hashes([11, 12]))
    for seq, batch in enumerate((kv_batch(1, 11, 12), kv_batch(2, 13), kv_batch(3, 11)), 1):
        batch.events[:0] = [removed] if seq == 2 else []
        await world.bus.publish(KV_EVENTS, msgspec.structs.replace(batch, worker_id="p1"))
    await settle()
    for worker in (p1, d1):
        await worker.report()
    await settle()

    fleet = world.router.fleet.cluster
    rows = [fleet.table.of(fleet.workers[WorkerId(name)].row) for name in ("p1", "d1")]
    assert [(row[t.EVICTED_BLOCKS], row[t.RESTORED_BLOCKS]) for row in rows] == [(2, 1), (0, 0)]
