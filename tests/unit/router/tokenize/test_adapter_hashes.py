"""Prompts of one text, with and without an adapter, share tokens but no block hash."""

from __future__ import annotations

import asyncio
from itertools import combinations
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from services.router.request.fields import read_request
from services.router.tokenize.block_hash import HashKeys
from services.router.tokenize.segments import Segments
from services.router.tokenize.tokenizer import PromptTokenizer
from services.router.tokenize.turns import PromptWork, Work
from services.worker.tiny_model import ensure_tiny_tokenizer
from shared.contracts.control import TokenizerAsset
from shared.contracts.engine_paths import COMPLETIONS
from shared.contracts.workers import HashScheme
from tests.support.block_hashes import block_hashes

SCHEME = HashScheme(block_size=32)
TEXT = "a beginning that many prompts have in common " * 30
SQL = ("sql", "sha256:1")
KEYS = (
    HashKeys(),
    HashKeys("tenant"),
    HashKeys("", SQL),
    HashKeys("tenant", SQL),
    HashKeys("", ("sql", "sha256:2")),
    HashKeys("", ("mail", "sha256:1")),
    HashKeys("('sql', 'sha256:1')"),
    HashKeys("", ("sql', 'x", "sha256:1")),
)


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory) -> str:
    return (Path(ensure_tiny_tokenizer(tmp_path_factory.mktemp("cache"))) / "tokenizer.json").read_text()


def test_cached_pieces_of_one_adapter_are_not_anothers(tokenizer_json):
    tokenizer = Tokenizer.from_str(tokenizer_json)
    segments = Segments(tokenizer, SCHEME, cache_bytes_max=1 << 20)
    tokens = tokenizer.encode(TEXT).ids

    def hashes(keys: HashKeys) -> list[int]:
        walk = segments.begin(TEXT, special=True, keys=keys)
        while segments.advance(walk, lambda _block: True, 1 << 20):
            pass
        return list(segments.prompt(walk).hashes)

    found = {keys: hashes(keys) for keys in (*KEYS, *KEYS)}  # the second round is served from the cache

    for keys, ours in found.items():
        assert ours == block_hashes(tokens, SCHEME, salt=keys.salt, adapter=keys.adapter), keys
    for one, other in combinations(KEYS, 2):
        assert not set(found[one]) & set(found[other]), (one, other)


@pytest.mark.parametrize("prompt", [TEXT, list(range(5, 400))], ids=["text", "tokens"])
def test_a_prompt_is_hashed_with_its_adapter(tokenizer_json, prompt):
    asset = TokenizerAsset(worker_id="w1", epoch=1, tokenizer_json=tokenizer_json.encode())
    known = PromptTokenizer(asset, SCHEME, cache_bytes_max=1 << 20)
    facts = read_request(COMPLETIONS, msgspec.json.encode({"model": "sql", "prompt": prompt, "cache_salt": "s"}))
    tokens = Tokenizer.from_str(tokenizer_json).encode(TEXT).ids if isinstance(prompt, str) else prompt

    async def found(loop_chars_max: int) -> list[int]:
        work = PromptWork.in_threads()
        try:
            options = {"work": Work(work, "t"), "loop_chars_max": loop_chars_max, "adapter": SQL}
            return list((await known.prompt(facts, lambda _block: True, **options)).hashes)
        finally:
            work.close()

    expected = block_hashes(tokens, SCHEME, salt="s", adapter=SQL)
    assert asyncio.run(found(1 << 20)) == asyncio.run(found(0)) == expected
    if isinstance(prompt, str):
        assert list(known.whole_prompt(facts, SQL).hashes) == expected
