"""LoRA adapters on real engines: handoffs, prefix hits and hashes by content, and changes while requests run."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.worker.tiny_model import ensure_tiny_model
from shared.contracts.channels import CHANGE_ADAPTER, TOKENS, WORKER_RECORDS
from shared.contracts.control import AskTokens, ProbePrompt
from shared.contracts.fleet_orders import AdapterAction, AdapterChanged, ChangeAdapter
from shared.contracts.ids import WorkerId
from shared.contracts.inference import LegKind
from shared.contracts.kv_events import unpack_hashes
from shared.contracts.workers import LoraAdapter
from shared.runtime.settings import CommonSettings
from tests.support.block_hashes import block_hashes
from tests.support.kv_driver import ALONE, BLOCK, MODEL, Driver, driving, transfer_report_of
from tests.support.kv_tap import Tap
from tests.support.lora_files import make_adapter
from tests.support.nats_server import NatsServer
from tests.support.prompts import VOCABULARY
from tests.support.worker_processes import Answer, WorkerProcess, ready_workers, start_worker

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

PREFILL, DECODE = "p1", "d1"
CHANGE_S_MAX = 60.0
ENGINE_ARGS = "--max-lora-rank 8 --max-loras 2 --max-cpu-loras 2"
COMPLETIONS = "/v1/completions"
TEXT = "The runner takes the baton and the crowd stands up. " * 12


@dataclass
class Pair:
    """A prefill and a decode worker, each with a folder of adapters of its own."""

    nats_url: str
    folders: dict[str, Path]
    workers: list[WorkerProcess]

    def record(self, worker_id: str):
        (one,) = [worker.record for worker in self.workers if worker.worker_id == worker_id]
        return one


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both have ``sql`` from the same files at different places, and ``mail`` from different files."""
    folder = tmp_path_factory.mktemp("lora")
    model = ensure_tiny_model(Path(CommonSettings().cache_dir))
    folders = {PREFILL: folder / "loras-of-p1", DECODE: folder / "elsewhere" / "loras-of-d1"}
    for number, place in enumerate(folders.values()):
        make_adapter(model, place / f"sql-{number}", seed=1)
        make_adapter(model, place / "sql-new", seed=2)
        make_adapter(model, place / "mail", seed=3 + number)
        make_adapter(model, place / "third", seed=5)
        make_adapter(model, place / "too-large", seed=6, rank=16)
        (place / "broken").mkdir()
        (place / "broken" / "adapter_config.json").write_text('{"r": 8}')
        (place / "broken" / "adapter_model.safetensors").write_bytes(b"no tensors")
    (folder / "secret").mkdir()
    with NatsServer(folder, has_buckets=True) as nats:
        workers = [
            start_worker(
                nats.url,
                worker_id,
                folder,
                role=role,
                cpu_cores=core,
                max_model_len="4096",
                engine_args=ENGINE_ARGS,
                lora_dir=str(folders[worker_id]),
                lora_adapters=f"sql=sql-{number} mail=mail",
            )
            for number, (worker_id, role, core) in enumerate([(PREFILL, "prefill", "0"), (DECODE, "decode", "1")])
        ]
        with ready_workers(nats.url, *workers):
            yield Pair(nats.url, folders, workers)


@pytest.fixture
async def driver(pair: Pair) -> AsyncIterator[Driver]:
    async with Tap(pair.nats_url) as tap, driving(tap) as one:
        await tap.until(lambda: {PREFILL, DECODE} <= tap.loads.keys(), "both workers report")
        yield one


def prompt_of(seed: str, tokens: int = 500) -> list[int]:
    return random.Random(seed).choices(VOCABULARY, k=tokens)


async def answer(driver: Driver, worker: str, model: str, prompt: Sequence[int], **fields: object) -> Answer:
    """One engine serves the whole request."""
    return await driver.leg(worker, LegKind.AGGREGATED, prompt, fields={"model": model, **fields})


async def alone(driver: Driver, worker: str, model: str, prompt: Sequence[int]) -> list[int]:
    """The tokens of an engine that reuses nothing."""
    return (await answer(driver, worker, model, prompt, cache_salt=ALONE)).token_ids


async def change(driver: Driver, worker: str, action: str, name: str, path: str = "") -> AdapterChanged:
    order = ChangeAdapter(worker_id=WorkerId(worker), action=AdapterAction(action), name=name, path=path)
    return await driver.bus.ask(CHANGE_ADAPTER, order, timeout_s=CHANGE_S_MAX)


async def loaded(driver: Driver, worker: str) -> dict[str, LoraAdapter]:
    """As the registry has it."""
    entry = await (await driver.bus.key_value_store(WORKER_RECORDS)).get(worker)
    assert entry is not None
    assert entry.value is not None
    return {one.name: one for one in entry.value.adapters}


async def test_the_registry_names_files_not_places(pair: Pair, driver: Driver):
    ours, theirs = await loaded(driver, PREFILL), await loaded(driver, DECODE)

    assert ours.keys() == theirs.keys() == {"sql", "mail"}
    assert ours["sql"] == theirs["sql"]
    assert ours["mail"].digest != theirs["mail"].digest
    assert pair.record(PREFILL).fingerprint == pair.record(DECODE).fingerprint


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_prompt_of_an_adapter_is_handed_over(pair: Pair, driver: Driver, stream: bool):
    for tokens in (70, 500, 1100):
        prompt, fields = prompt_of(f"handoff {tokens} {stream}", tokens), {"model": "sql", "stream": stream}
        offer = await driver.offered(PREFILL, prompt, fields=fields)
        taken = await driver.taken(DECODE, prompt, offer, fields=fields)

        report = transfer_report_of(taken)
        assert report.fetched_tokens == tokens // BLOCK * BLOCK, report
        assert taken.token_ids == await alone(driver, DECODE, "sql", prompt)
        assert taken.token_ids != await alone(driver, DECODE, MODEL, prompt)


async def test_each_adapter_finds_its_own_prefixes_only(pair: Pair, driver: Driver):
    prompt, cached = prompt_of("prefix"), 500 // BLOCK * BLOCK
    first = {model: await answer(driver, DECODE, model, prompt) for model in (MODEL, "sql", "mail")}
    again = {model: await answer(driver, DECODE, model, prompt) for model in (MODEL, "sql", "mail")}

    assert len({tuple(one.token_ids) for one in first.values()}) == 3
    for model, one in first.items():
        assert one.report.cached_tokens == 0, model
        assert again[model].report.cached_tokens == cached, model
        assert again[model].token_ids == one.token_ids


async def test_a_conversation_with_an_adapter_is_read_back(pair: Pair, driver: Driver):
    first = prompt_of("turns")
    said = await answer(driver, DECODE, "sql", first, max_tokens=3 * BLOCK)
    second = first + said.token_ids + prompt_of("more", 100)
    history = (len(first) + len(said.token_ids) - 1) // BLOCK * BLOCK

    source = driver.source(DECODE)
    options = {"kv_sources": [source], "cache_hit_threshold": 0.0}
    turn = await driver.leg(PREFILL, LegKind.AGGREGATED, second, fields={"model": "sql"}, **options)
    assert transfer_report_of(turn).fetched_tokens == history
    assert turn.token_ids == await alone(driver, PREFILL, "sql", second)

    plain = await driver.leg(PREFILL, LegKind.AGGREGATED, second, **options)
    assert transfer_report_of(plain).fetched_tokens == 0


async def test_other_files_under_one_name_exchange_nothing(pair: Pair, driver: Driver):
    prompt, fields = prompt_of("two mails"), {"model": "mail"}
    offer = await driver.offered(PREFILL, prompt, fields=fields)
    taken = await driver.taken(DECODE, prompt, offer, fields=fields)

    assert transfer_report_of(taken).fetched_tokens == 0
    assert taken.token_ids == await alone(driver, DECODE, "mail", prompt)
    assert taken.token_ids != await alone(driver, PREFILL, "mail", prompt)


async def test_the_router_computes_the_engines_hashes(pair: Pair, driver: Driver):
    prompt, scheme = prompt_of("hashes"), pair.record(PREFILL).hashing
    adapters = await loaded(driver, PREFILL)
    for salt in ("", "tenant"):
        for name in ("sql", "mail", MODEL):
            lora = (name, adapters[name].hashed_as) if name in adapters else None
            ours = block_hashes(prompt, scheme, salt=salt, adapter=lora)
            await answer(driver, PREFILL, name, prompt, **({"cache_salt": salt} if salt else {}))
            await driver.tap.until(lambda ours=ours: set(ours) <= stored(driver), f"the blocks of {name} are told")

            probe = {"model": name, "prompt": TEXT, **({"cache_salt": salt} if salt else {})}
            asked = [ProbePrompt(path=COMPLETIONS, body=json.dumps(probe).encode())]
            ask = AskTokens(worker_id=WorkerId(PREFILL), prompts=asked)
            (told,) = (await driver.bus.ask(TOKENS, ask, timeout_s=30.0)).prompts
            assert len(told.tokens) >= 2 * BLOCK
            assert list(unpack_hashes(told.hashes)) == block_hashes(told.tokens, scheme, salt=salt, adapter=lora)


def stored(driver: Driver) -> set[int]:
    batches = driver.router.kv.get(PREFILL, [])
    return {one for batch in batches for event in batch.events for one in unpack_hashes(event.hashes)}


async def test_an_adapter_is_replaced_while_a_stream_runs(pair: Pair, driver: Driver):
    prompt = prompt_of("replaced")
    before = await alone(driver, DECODE, "sql", prompt)
    long = {"max_tokens": 600, "stream": True}
    expected = (await answer(driver, DECODE, "sql", prompt, **long)).token_ids
    running = asyncio.create_task(answer(driver, DECODE, "sql", prompt_of("replaced"), **long))
    await driver.router.load_where(worker_named(pair, DECODE), lambda load: load.running > 0)

    done = await change(driver, DECODE, "load", "sql", "sql-new")
    assert done.failure == ""
    after = await answer(driver, DECODE, "sql", prompt)

    assert (await loaded(driver, DECODE))["sql"].digest == done.digest
    assert after.report.cached_tokens == 0
    assert after.token_ids != before
    assert (await running).token_ids == expected
    assert (await answer(driver, DECODE, "sql", prompt)).report.cached_tokens > 0

    assert (await change(driver, PREFILL, "load", "sql", "sql-new")).digest == done.digest
    offer = await driver.offered(PREFILL, prompt_of("new"), fields={"model": "sql"})
    taken = await driver.taken(DECODE, prompt_of("new"), offer, fields={"model": "sql"})
    assert transfer_report_of(taken).fetched_tokens == 480
    assert taken.token_ids == await alone(driver, DECODE, "sql", prompt_of("new"))


async def test_an_adapter_that_the_engine_drops_is_read_from_its_copy(pair: Pair, driver: Driver):
    """The engine keeps two adapters in memory; three are loaded, and their folders are gone."""
    prompt = prompt_of("three")
    assert (await change(driver, DECODE, "load", "third", "third")).failure == ""
    expected = {name: await alone(driver, DECODE, name, prompt) for name in ("sql", "mail", "third")}
    shutil.rmtree(pair.folders[DECODE] / "mail")
    shutil.rmtree(pair.folders[DECODE] / "third")

    for name in ("mail", "third", "sql", "mail"):
        assert await alone(driver, DECODE, name, prompt) == expected[name]
    assert len({tuple(one) for one in expected.values()}) == 3


async def test_what_cannot_be_loaded_is_refused_and_the_engine_lives(pair: Pair, driver: Driver):
    for path, why in (
        ("too-large", "rank"),
        ("broken", "cannot load"),
        ("nowhere", "cannot be found"),
        ("../../secret", "only place"),
        ("/etc", "only place"),
    ):
        done = await change(driver, DECODE, "load", "bad", path)
        assert why in done.failure, done
    assert (await change(driver, DECODE, "load", MODEL, "sql-new")).failure
    assert (await change(driver, DECODE, "unload", "bad")).failure
    assert (await answer(driver, DECODE, "bad", prompt_of("bad"))).status == 404
    assert (await answer(driver, DECODE, MODEL, prompt_of("bad"))).status == 200
    assert (await answer(driver, DECODE, "sql", prompt_of("bad"))).status == 200


async def test_an_adapter_is_unloaded_while_a_stream_runs(pair: Pair, driver: Driver):
    prompt, long = prompt_of("unloaded"), {"max_tokens": 600, "stream": True}
    expected = (await answer(driver, PREFILL, "sql", prompt, **long)).token_ids
    running = asyncio.create_task(answer(driver, PREFILL, "sql", prompt, **long))
    await driver.router.load_where(worker_named(pair, PREFILL), lambda load: load.adapters_running == ["sql"])

    assert (await change(driver, PREFILL, "unload", "sql")).failure == ""

    assert "sql" not in await loaded(driver, PREFILL)
    assert (await answer(driver, PREFILL, "sql", prompt)).status == 404
    assert (await running).token_ids == expected
    await driver.router.load_where(worker_named(pair, PREFILL), lambda load: not load.adapters_running)
    assert pair.record(PREFILL).adapters_at_once_max == 2
    assert (await answer(driver, PREFILL, MODEL, prompt)).status == 200


def worker_named(pair: Pair, worker_id: str) -> WorkerProcess:
    (one,) = [worker for worker in pair.workers if worker.worker_id == worker_id]
    return one
