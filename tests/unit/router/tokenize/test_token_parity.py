"""The router probes how each engine tokenizes, and trusts the engine."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest

from services.router.request.fields import read_request
from services.router.tokenize.parity import ASK_AGAIN_S, NEVER, Parity, ParityBook, difference
from services.router.tokenize.probes import probes
from services.worker.engines.simulated.jobs import JobMaker, engine_tokens
from services.worker.engines.simulated.model import SimulatedTokenizer
from services.worker.tiny_model import ensure_tiny_tokenizer
from shared.contracts.channels import TOKENS
from shared.contracts.control import AskTokens, PromptTokens, TokenizerAsset, TokensFound
from shared.contracts.engine_paths import COMPLETIONS
from shared.contracts.kv_events import pack_hashes
from tests.support.memory_bus import MemoryBus
from tests.unit.router.world import World, in_world, prompt, settle

BLOCK = 32
AGREES, DIFFERS, UNKNOWN = Parity.AGREES, Parity.DIFFERS, Parity.UNKNOWN


class TokenHandler:
    """Responds to probes as an engine with the test's chat template does."""

    def __init__(self, world: World, directory, worker_id: str) -> None:
        self.asked = 0
        self.epoch = 1
        self.worker_id = worker_id
        self.tokenizer = SimulatedTokenizer(directory)
        self._bus = MemoryBus(world.hub)

    async def open(self) -> None:
        await self._bus.answer(TOKENS, self.answer, worker_id=self.worker_id)

    def change_template(self, source: str) -> None:
        self.tokenizer._template = self.tokenizer._template.environment.from_string(source)

    def asset(self, template: str | None = None) -> TokenizerAsset:
        files = self.tokenizer.files()
        return TokenizerAsset(
            worker_id=self.worker_id,
            epoch=1,
            tokenizer_json=files.tokenizer_json,
            chat_template=files.chat_template if template is None else template,
            special_tokens=files.special_tokens,
        )

    async def answer(self, ask: AskTokens, _envelope) -> TokensFound:
        self.asked += 1
        jobs = JobMaker(self.tokenizer, ["m"], 4096)
        tokenized = [await engine_tokens(jobs, self.tokenizer, BLOCK, one.path, one.body) for one in ask.prompts]
        return TokensFound(
            worker_id=ask.worker_id,
            epoch=self.epoch,
            prompts=[
                PromptTokens(tokens=one.tokens, hashes=pack_hashes(one.hashes), refusal=one.refusal)
                for one in tokenized
            ],
        )


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return ensure_tiny_tokenizer(tmp_path_factory.mktemp("cache"))


async def join(world: World, directory, *worker_ids: str, template: str | None = None) -> list[TokenHandler]:
    """Workers whose engines use ``template``; their published tokenizer has the model's own."""
    handlers = []
    for worker_id in worker_ids:
        handler = TokenHandler(world, directory, worker_id)
        await handler.open()
        asset = handler.asset()
        if template is not None:
            handler.change_template(template)
        await world.worker(worker_id, asset=asset)
        handlers.append(handler)
    return handlers


def parity_of(world: World, worker_id: str) -> Parity:
    return world.router.prompts.parity.book.parity(worker_id)


async def until(condition) -> None:
    while not condition():
        await asyncio.to_thread(lambda: None)
        await asyncio.sleep(0.01)


async def is_exact(world: World, **fields) -> bool:
    body = msgspec.json.encode(prompt(**fields))
    connection, answering = world.begin(body)
    found = await world.router.prompts.of(connection.http_request, read_request(COMPLETIONS, body))
    await answering
    return found.exact


@pytest.mark.slow
@in_world(tokenize="always")
async def test_each_worker_epoch_is_probed_once_and_agrees(world: World, directory):
    handlers = await join(world, directory, "w1", "w2")
    await until(lambda: all(parity_of(world, one) is AGREES for one in ("w1", "w2")))
    await asyncio.sleep(10 * ASK_AGAIN_S)

    # The tokenizer may arrive after the first worker joined and before the second.
    assert all(1 <= handler.asked <= 2 for handler in handlers)
    assert await is_exact(world, prompt="some words " * 100)


@in_world(tokenize="always")
async def test_an_engine_with_another_template_is_placed_by_load_and_logged_once(world: World, directory, caplog):
    await join(world, directory, "w1", template="{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    await until(lambda: parity_of(world, "w1") is DIFFERS)

    await asyncio.sleep(5 * ASK_AGAIN_S)

    errors = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    errors = [message for message in errors if "tokenize" in message]
    assert len(errors) == 1
    assert "/v1/chat/completions" in errors[0]
    assert not world.router.prompts.followed(world.workers["w1"].record().fingerprint.key())
    assert not await is_exact(world, prompt="some words " * 100)
    assert (await world.ask(prompt())).status == 200


@in_world(tokenize="always")
async def test_a_later_agreeing_probe_restores_exact_placement(world: World, directory):
    (handler,) = await join(world, directory, "w1", template="{{ messages[0].role }}")
    await until(lambda: parity_of(world, "w1") is DIFFERS)

    handler.change_template(handler.asset().chat_template)
    await asyncio.sleep(ASK_AGAIN_S)
    await until(lambda: parity_of(world, "w1") is AGREES)

    assert await is_exact(world, prompt="some words " * 100)


@in_world(tokenize="always")
async def test_one_differing_worker_disables_its_fingerprint_until_it_leaves(world: World, directory):
    await join(world, directory, "w1")
    await join(world, directory, "w2", template="{{ messages[0].role }}")
    await until(lambda: (parity_of(world, "w1"), parity_of(world, "w2")) == (AGREES, DIFFERS))
    assert not await is_exact(world, prompt="some words " * 100)

    gone = world.workers["w2"]
    gone.alive = False
    await (await world.bus.key_value_store(gone.channel)).delete("w2")
    await asyncio.sleep(2 * ASK_AGAIN_S)

    assert await is_exact(world, prompt="some words " * 100)


@pytest.mark.slow
@in_world(tokenize="always")
async def test_restarted_workers_with_another_template_publish_their_tokenizer_again(world: World, directory):
    template = "There are {{ messages | length }} messages.\n" + SimulatedTokenizer(directory).files().chat_template

    (handler,) = await join(world, directory, "w1")
    await until(lambda: parity_of(world, "w1") is AGREES)

    worker = world.workers["w1"]
    worker.epoch, worker.asset = 2, msgspec.structs.replace(handler.asset(template), epoch=2)
    handler.epoch = 2
    handler.change_template(template)
    await (await world.bus.key_value_store(worker.channel)).put(worker.record())
    await settle()
    await until(lambda: handler.asked > 1)
    await until(lambda: parity_of(world, "w1") is AGREES)

    assert world.router.prompts.followed(worker.record().fingerprint.key())


@in_world(tokenize="always")
async def test_an_unresponsive_worker_is_assumed_to_match_its_tokenizer(world: World, directory):
    handler = TokenHandler(world, directory, "w1")
    await world.worker("w1", asset=handler.asset())
    await until(lambda: world.router.prompts._tokenizers)
    await asyncio.sleep(1)

    assert parity_of(world, "w1") is UNKNOWN
    assert await is_exact(world, prompt="some words " * 100)


def test_silence_clears_no_difference_and_nothing_is_reported_twice():
    book = ParityBook()
    assert book.seen("w1", 1, "f")
    assert not book.seen("w1", 1, "f")

    assert book.found("w1", 1, DIFFERS, 10.0)
    assert not book.found("w1", 1, UNKNOWN, 50.0)
    assert not book.found("w1", 1, DIFFERS, 90.0)
    assert (book.trusted("f"), book.due(90.0 + ASK_AGAIN_S)) == (False, ["w1"])

    assert not book.found("w1", 2, AGREES, 91.0)
    assert book.seen("w1", 2, "f")
    assert book.found("w1", 2, AGREES, 92.0)
    assert (book.trusted("f"), book.next_at()) == (True, NEVER)


def test_a_difference_is_described_in_numbers():
    theirs = PromptTokens(tokens=[1, 2, 3, 4], hashes=pack_hashes([7, 8]))

    assert difference(theirs, 4, [7, 8]) == ""
    assert difference(theirs, 5, [7, 8]) == "4 tokens there, 5 here"
    assert difference(theirs, 4, [7, 9]) == "2 blocks there, 2 here, of which the first 1 are the same"
    assert difference(theirs, 4, [7]) == "2 blocks there, 1 here, of which the first 1 are the same"
    assert difference(msgspec.structs.replace(theirs, refusal="no"), 9, []) == ""


@pytest.mark.parametrize("block_size", [16, 128])
def test_probes_cover_every_kind_and_several_blocks(directory, block_size):
    tokenizer = SimulatedTokenizer(directory)
    asked = [msgspec.json.decode(probe.body) for probe in probes("m", block_size=block_size, max_model_len=8192)]

    assert {"prompt", "messages", "cache_salt"} <= set().union(*asked)
    assert {message["role"] for one in asked for message in one.get("messages", ())} == {"system", "user", "assistant"}
    assert len(tokenizer.encode(asked[0]["prompt"], special=True)) >= 3 * block_size
    assert any(not text.isascii() for one in asked if isinstance(text := one.get("prompt"), str))
