"""What a worker says of its cache is what the engine has, block for block."""

from __future__ import annotations

import asyncio
import hashlib
import json
from functools import reduce
from operator import xor

import cbor2
import msgspec
import pytest

from services.router.request.fields import read_request
from services.router.tokenize.parity import difference
from services.router.tokenize.probes import probes
from services.router.tokenize.tokenizer import PromptTokenizer
from shared.contracts.channels import TOKENIZER, TOKENS
from shared.contracts.control import AskTokenizer, AskTokens, ProbePrompt
from shared.contracts.inference import LegKind
from shared.contracts.kv_events import KvEventKind, KvSnapshot, unpack_hashes
from shared.contracts.load import LoadReport
from tests.engines.test_handover import completion, prompt_of

pytestmark = pytest.mark.vllm

BLOCK = 32
SETTLE_S_MAX = 60.0


def short(value: object) -> bytes:
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


def chain(tokens: list[int]) -> list[int]:
    """As vLLM's ``sha256_cbor`` does it, written down once more."""
    parent, hashes = short("vllm-none-hash"), []
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        parent = short((parent, tuple(tokens[start : start + BLOCK]), None))
        hashes.append(int.from_bytes(parent[:8], "big"))
    return hashes


async def tokens_of(router, worker, prompt: str) -> list[int]:
    answer = await router.leg(worker, LegKind.AGGREGATED, {"model": "baton-tiny", "prompt": prompt}, path="/tokenize")
    return answer.json()["tokens"]


async def test_stored_blocks_have_the_hashes_of_the_scheme(pair, router):
    prefill, _decode = pair
    prompt = prompt_of(250, seed=21)
    expected = chain(await tokens_of(router, prefill, prompt))

    await router.leg(prefill, LegKind.AGGREGATED, completion(prompt, max_tokens=1))
    load = await router.load_where(prefill, lambda load: load.running == 0 and load.digest is not None)
    snapshot = await router.snapshot(prefill)

    assert len(expected) > 5
    assert set(expected) <= set(unpack_hashes(snapshot.hashes))
    told = [event for batch in router.kv["p1"] for event in batch.events if event.kind is KvEventKind.STORED]
    assert expected == [block for event in told for block in unpack_hashes(event.hashes)]
    assert told[0].parent is None
    assert load.digest.seq <= snapshot.seq


async def test_a_received_prompt_is_held_by_the_decode_worker_too(pair, router):
    prefill, decode = pair
    prompt = prompt_of(250, seed=22)
    expected = chain(await tokens_of(router, prefill, prompt))

    await router.handed_over(prefill, decode, completion(prompt))
    snapshot = await router.snapshot(decode)

    assert set(expected) <= set(unpack_hashes(snapshot.hashes))


async def as_of_one_batch(router, worker) -> tuple[LoadReport, KvSnapshot]:
    """A load report and a snapshot after the same batch of KV events; the last ones come after the answer."""
    async with asyncio.timeout(SETTLE_S_MAX):
        while True:
            snapshot = await router.snapshot(worker)
            load = await router.load_where(worker, lambda load: load.digest is not None)
            if load.digest.seq == snapshot.seq:
                return load, snapshot


async def test_digest_and_snapshot_agree_and_batches_have_no_gaps(pair, router):
    prefill, _decode = pair
    await router.leg(prefill, LegKind.AGGREGATED, completion(prompt_of(120, seed=23)))

    load, snapshot = await as_of_one_batch(router, prefill)

    held = unpack_hashes(snapshot.hashes)
    assert load.digest.count == len(held)
    assert load.digest.xor == reduce(xor, held, 0)
    numbers = [batch.seq for batch in router.kv["p1"]]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


async def test_load_reports_count_prompt_tokens_by_source(pair, router):
    prefill, decode = pair

    first, second = await router.handed_over(prefill, decode, completion(prompt_of(500, seed=24)))

    # A report that was made before the last step may come first.
    received = second.report.received_tokens
    load = await router.load_where(decode, lambda load: load.running == 0 and load.received_tokens_total >= received)
    assert received > 0
    assert load.received_bytes_total >= second.report.received_bytes
    assert load.received_seconds_total > 0
    assert load.decode_s_per_token > 0
    computed = first.report.prompt_tokens - first.report.cached_tokens
    load = await router.load_where(
        prefill, lambda load: load.kv_tokens_used == 0 and load.computed_tokens_total >= computed
    )
    assert load.prefill_tokens_per_s > 0


async def test_the_tokenizer_that_a_router_gets_makes_the_engines_tokens(pair, router):
    from tokenizers import Tokenizer

    prefill, _decode = pair
    prompt = prompt_of(40, seed=25)

    asset = await router.bus.ask(TOKENIZER, AskTokenizer(worker_id=prefill.worker_id), timeout_s=10.0)

    tokenizer = Tokenizer.from_str(asset.tokenizer_json.decode())
    assert tokenizer.encode(prompt).ids == await tokens_of(router, prefill, prompt)
    assert "messages" in asset.chat_template
    assert asset.special_tokens["eos_token"]


async def probed(router, worker, template: str | None = None) -> list[tuple[str, str]]:
    """What a router that has this chat template would say of the engine's answers to its probes: refusals and
    differences.
    """
    record = worker.record
    asset = await router.bus.ask(TOKENIZER, AskTokenizer(worker_id=worker.worker_id), timeout_s=10.0)
    if template is not None:
        asset = msgspec.structs.replace(asset, chat_template=template + asset.chat_template)
    tokenizer = PromptTokenizer(asset, record.hashing, cache_bytes_max=1 << 20)
    asked = probes(record.models[0], block_size=record.hashing.block_size, max_model_len=record.max_model_len)
    found = await router.bus.ask(TOKENS, AskTokens(worker_id=worker.worker_id, prompts=asked), timeout_s=15.0)
    assert len(found.prompts) == len(asked)
    told = []
    for probe, theirs in zip(asked, found.prompts, strict=True):
        ours = tokenizer.whole_prompt(read_request(probe.path, probe.body))
        assert ours is not None
        told.append((theirs.refusal, difference(theirs, ours.tokens, ours.hashes)))
    return told


async def test_the_engine_tokenizes_and_hashes_every_probe_as_the_router_does(pair, router):
    for worker in pair:
        assert await probed(router, worker) == [("", "")] * 5


async def test_a_router_with_another_chat_template_is_detected(pair, router):
    told = await probed(router, pair[0], template="{{ 'Be brief. ' }}")

    assert [bool(difference) for _refusal, difference in told] == [False, False, False, True, True]


async def test_the_engine_reports_the_salted_hashes_that_it_stores(pair, router):
    prefill, _decode = pair
    body = completion(prompt_of(250, seed=31), max_tokens=1) | {"cache_salt": "tenant"}
    ask = AskTokens(
        worker_id=prefill.worker_id, prompts=[ProbePrompt(path="/v1/completions", body=json.dumps(body).encode())]
    )

    (told,) = (await router.bus.ask(TOKENS, ask, timeout_s=15.0)).prompts
    await router.leg(prefill, LegKind.AGGREGATED, body)
    await router.load_where(prefill, lambda load: load.running == 0 and load.digest is not None)
    snapshot = await router.snapshot(prefill)

    assert len(told.hashes) > 5 * 8
    assert set(unpack_hashes(told.hashes)) <= set(unpack_hashes(snapshot.hashes))


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", lambda text: {"prompt": text}),
        ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}),
        ("/v1/messages", lambda text: {"messages": [{"role": "user", "content": text}]}),
        ("/v1/responses", lambda text: {"input": text, "max_output_tokens": 16}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_the_same_prompt_of_two_tenants_has_no_block_in_common(pair, router, path, asked):
    prefill, _decode = pair
    text = f"The relay of {path} runs once around the track and hands over. " * 30
    body = {"model": "baton-tiny", "max_tokens": 1, "cache_salt": "the client's own", **asked(text)}
    told = []
    for salt in ("a" * 64, "b" * 64, "a" * 64):
        answer = await router.leg(prefill, LegKind.AGGREGATED, body, path=path, cache_salt=salt)
        assert answer.status == 200, answer.body
        told.append(answer.report.cached_tokens)

    assert told[:2] == [0, 0]
    assert told[2] > 0
