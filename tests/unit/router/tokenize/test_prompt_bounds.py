"""The router bounds the work for one prompt."""

from __future__ import annotations

import asyncio
import json
import sys
from concurrent.futures import Executor, Future

import pytest

from services.router.request.fields import read_request
from services.router.request.prompt import Prompt
from services.router.tokenize.prompts import BYTES_PER_TOKEN_MAX, TOKENIZERS_MAX
from services.router.tokenize.segments import PIECE_CHARS_MAX
from services.router.tokenize.tokenizer import HASHED_AT_ONCE, READ_ON_LOOP_BYTES, PromptTokenizer, TokenIds
from services.router.tokenize.turns import PromptWork, Work
from services.worker.tiny_model import ensure_tiny_tokenizer
from shared.contracts.control import TokenizerAsset
from shared.contracts.engine_paths import COMPLETIONS, GENERATE
from shared.contracts.workers import HashScheme
from tests.support.block_hashes import block_hashes
from tests.support.virtual_time import run_in_virtual_time
from tests.unit.router.world import World, in_world

SCHEME = HashScheme(block_size=16)


async def fetch_tokenizer(world: World, asset: TokenizerAsset) -> None:
    """Give the fake workers a real tokenizer."""
    prompts = world.router.prompts
    for worker in world.workers.values():
        worker.asset = asset
        prompts._tokenizers.pop(worker.record().fingerprint.key(), None)
        prompts.worker_seen(worker.record())
    while not any(prompts._tokenizers.values()):
        await asyncio.sleep(1)


class Stuck(Executor):
    """A tokenizer thread that is busy with another prompt."""

    def submit(self, *_work, **_options) -> Future:
        return Future()


@pytest.fixture(scope="module")
def asset(tmp_path_factory) -> TokenizerAsset:
    directory = ensure_tiny_tokenizer(tmp_path_factory.mktemp("cache"))
    return TokenizerAsset(worker_id="w1", epoch=1, tokenizer_json=(directory / "tokenizer.json").read_bytes())


@pytest.fixture
def prompts(asset) -> PromptTokenizer:
    return PromptTokenizer(asset, SCHEME, cache_bytes_max=1 << 20)


async def found(
    prompts: PromptTokenizer,
    prompt: object,
    *,
    held: bool = True,
    loop_chars_max: int = sys.maxsize,
    threads: PromptWork | None = None,
) -> Prompt | None:
    """Tokenize up to that many characters on the event loop; without ``threads`` there is none."""
    facts = read_request(COMPLETIONS, json.dumps({"model": "m", "prompt": prompt}).encode())
    work = Work(threads or PromptWork(Stuck(), Stuck()), "tenant")
    return await prompts.prompt(facts, lambda _block: held, work=work, loop_chars_max=loop_chars_max)


async def test_indivisible_text_is_tokenized_up_to_a_bound(prompts):
    assert await found(prompts, "a" * (64 * PIECE_CHARS_MAX)) is None  # to tokenize it would take minutes
    assert await found(prompts, "word " * PIECE_CHARS_MAX) is not None


def test_the_wait_for_the_tokenizer_thread_is_bounded(prompts):
    assert run_in_virtual_time(found(prompts, "a few words " * 1000, loop_chars_max=500)) is None


async def test_token_ids_are_hashed_as_far_as_blocks_are_cached(prompts):
    ids = [number % 1000 for number in range(3 * HASHED_AT_ONCE + 100)]
    all_hashes = block_hashes(ids, SCHEME)

    threads = PromptWork.in_threads()

    everything = await found(prompts, ids, threads=threads)
    beginning = await found(prompts, ids, held=False, threads=threads)
    threads.close()

    assert everything == Prompt(len(ids), all_hashes, exact=True)
    assert beginning == Prompt(len(ids), all_hashes[: HASHED_AT_ONCE // SCHEME.block_size], exact=True)


async def test_a_long_list_of_token_ids_is_read_in_a_thread():
    ids = [number % 1000 for number in range(5 * HASHED_AT_ONCE + 100)]
    body = json.dumps({"model": "m", "token_ids": ids, "sampling_params": {}}).encode()
    assert len(body) > READ_ON_LOOP_BYTES
    threads, token_ids = PromptWork.in_threads(), TokenIds(SCHEME)

    begun = token_ids.begin(read_request(GENERATE, body), [7], None)
    prompt = await token_ids.finish(begun, lambda _block: True, Work(threads, "tenant"))
    threads.close()

    assert prompt == Prompt(len(ids) + 1, block_hashes([*ids, 7], SCHEME), exact=True)


@pytest.mark.parametrize("ids", ["[1, -1]", "[1.5]", '["a"]', "[1e400]", "{}"])
def test_what_is_no_list_of_token_ids_is_left_to_the_engine(ids: str):
    facts = read_request(GENERATE, b'{"token_ids": %b, "sampling_params": {}}' % ids.encode())

    assert facts.body is None or TokenIds(SCHEME).begin(facts, [], None) is None


@in_world(tokenize="always")
async def test_a_body_too_long_for_every_model_is_not_parsed(world: World, asset):
    await world.worker("w1")
    await world.worker("w2")
    await fetch_tokenizer(world, asset)
    longest = BYTES_PER_TOKEN_MAX * world.workers["w1"].record().max_model_len

    exact = []
    for size in (longest // 2, longest + 1):
        body = json.dumps({"model": "m", "prompt": [7] * (size // 3)}).encode()
        connection, answering = world.begin(body)
        prompt = await world.router.prompts.of(connection.http_request, read_request(COMPLETIONS, body))
        exact.append(prompt.exact)
        await answering

    assert exact == [True, False]


@pytest.mark.parametrize("tokens", [100, HASHED_AT_ONCE + 100])
@in_world(tokenize="always")
async def test_token_ids_are_placed_exactly_without_a_tokenizer(world: World, tokens: int):
    ids = [number % 500 for number in range(tokens)]
    body = json.dumps({"model": "m", "token_ids": ids, "sampling_params": {}, "cache_salt": "s"}).encode()
    record = (await world.worker("w1")).record()
    connection, answering = world.begin(body, path=GENERATE)

    prompt = await world.router.prompts.of(connection.http_request, read_request(GENERATE, body), more=[7])
    await answering

    whole = block_hashes([*ids, 7], record.hashing, salt="s")
    assert world.router.prompts.tokenizer_of(record.fingerprint.key()) is None
    assert (prompt.tokens, prompt.exact) == (tokens + 1, True)
    assert prompt.hashes == whole[: len(prompt.hashes)]
    assert len(prompt.hashes) >= min(len(whole), HASHED_AT_ONCE // record.hashing.block_size)


@in_world()
async def test_an_unused_tokenizer_is_evicted_for_a_needed_one(world: World, asset):
    await world.worker("w1")
    known = world.router.prompts._tokenizers
    for number in range(TOKENIZERS_MAX):
        known[f"gone-{number}"] = None
    await fetch_tokenizer(world, asset)

    assert len(known) == 1


@in_world()
async def test_a_tokenizer_for_weights_that_no_worker_has_is_dropped(world: World, asset):
    worker = await world.worker("w1")
    known = world.router.prompts._tokenizers
    key, base = worker.record().fingerprint.key(), worker.record().fingerprint.base_key()
    known.update({f"{base}|step-{number}": None for number in range(5)} | {"another model|x": None})
    await fetch_tokenizer(world, asset)

    assert known.keys() == {key, "another model|x"}


@in_world(tokenize="always", revision_shares='{"m": {"v2": 1}}')
async def test_a_prompt_is_tokenized_for_the_revision_that_serves_it(world: World, asset):
    await world.worker("w1", revision="v1")
    await world.worker("w2", revision="v2")
    known = world.router.prompts._tokenizers
    known.update({view.pairs_with: None for view in world.router.fleet.cluster.workers.values()})
    body = json.dumps({"model": "m", "prompt": [7] * 100}).encode()

    exact = []
    for worker_id in ("w1", "w2"):
        key = world.router.fleet.cluster.workers[worker_id].pairs_with
        known[key] = PromptTokenizer(asset, SCHEME, cache_bytes_max=1 << 20)
        connection, answering = world.begin(body)
        exact.append((await world.router.prompts.of(connection.http_request, read_request(COMPLETIONS, body))).exact)
        await answering

    assert exact == [False, True]
