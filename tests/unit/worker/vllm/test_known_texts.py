"""Prompts of legs are tokenized piece by piece, once each; everything else is vLLM's own."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from tokenizers import Tokenizer

from services.worker.engines.port import CURRENT_LEG, Leg, LegInput
from services.worker.engines.vllm.known_texts import (
    PIECE_CHARS,
    PIECE_CHARS_MAX,
    TEXT_CHARS_MIN,
    PieceTokens,
    reuse_tokens,
)
from services.worker.tiny_model import CORPUS, ensure_tiny_tokenizer

TEXT = CORPUS.read_text(encoding="utf-8")[: 8 * PIECE_CHARS]


@pytest.fixture(scope="module")
def backend(tmp_path_factory) -> str:
    folder = ensure_tiny_tokenizer(Path(tmp_path_factory.mktemp("cache")))
    return (folder / "tokenizer.json").read_text(encoding="utf-8")


class OwnTokenizer:
    """As a tokenizer of transformers: with a limit and the tokens of a text, which it notes."""

    special_tokens_map: ClassVar[dict[str, str]] = {}
    chat_template = ""

    def __init__(self, backend: str, shift: int = 0) -> None:
        self.backend_tokenizer = Tokenizer.from_str(backend)
        self.asked: list[str] = []
        self._shift = shift

    def __call__(self, text, *, add_special_tokens, truncation=False, max_length=None):
        self.asked.append(text)
        ids = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return {"input_ids": [one + self._shift for one in ids[: max_length if truncation else None]]}


def make_renderer(tokenizer: OwnTokenizer):
    """VLLM's, with what it needs for texts."""
    from vllm.renderers.base import BaseRenderer

    class Renderer(BaseRenderer):
        def __init__(self) -> None:
            self.tokenizer = tokenizer
            self._executor = ThreadPoolExecutor(1)

        async def _tokenize_prompt_async(self, prompt, params):
            return self._tokenize_prompt(prompt, params)

        def render_messages(self, *_arguments):
            raise NotImplementedError

    return Renderer()


def params(max_length: int = 1_000_000, **asked):
    asked = {"add_special_tokens": True, "truncation": True, "max_length": max_length, **asked}
    return SimpleNamespace(get_encode_kwargs=lambda: asked, return_token_offsets=False)


@pytest.fixture
def renderer(backend):
    renderer = make_renderer(OwnTokenizer(backend))
    reuse_tokens(renderer, "")
    renderer.tokenizer.asked.clear()
    yield renderer
    renderer._executor.shutdown()


def tokens(renderer, text: str, *, of_leg: bool = True, **asked) -> list[int]:
    async def tokenize():
        if of_leg:
            CURRENT_LEG.set(Leg(LegInput()))
        return await renderer._tokenize_prompt_async({"prompt": text}, params(**asked))

    return asyncio.run(tokenize())["prompt_token_ids"]


def whole(backend: str, text: str) -> list[int]:
    return Tokenizer.from_str(backend).encode(text).ids


def test_a_leg_prompt_has_the_tokens_of_the_whole_text(renderer, backend):
    for text in (TEXT, TEXT + " And then?", TEXT[: 5 * PIECE_CHARS] + " But " + TEXT[3 * PIECE_CHARS :]):
        assert tokens(renderer, text) == whole(backend, text)
    assert renderer.tokenizer.asked == []


def test_vllm_tokenizes_what_is_no_leg_prompt(renderer, backend):
    assert tokens(renderer, TEXT, of_leg=False) == whole(backend, TEXT)
    assert renderer.tokenizer.asked == [TEXT]


def test_vllm_tokenizes_short_texts_and_texts_without_cuts(renderer):
    short, uncut = TEXT[: TEXT_CHARS_MIN - 1], "x" * (PIECE_CHARS_MAX + 1)
    for text in (short, uncut):
        assert tokens(renderer, text)
    assert renderer.tokenizer.asked == [short, uncut]


def test_vllm_cuts_a_prompt_that_is_too_long(renderer, backend):
    ids = whole(backend, TEXT)

    assert tokens(renderer, TEXT, max_length=len(ids)) == ids
    assert renderer.tokenizer.asked == []
    assert tokens(renderer, TEXT, max_length=len(ids) - 1) == ids[:-1]
    assert renderer.tokenizer.asked == [TEXT]


def test_a_tokenizer_that_differs_from_its_pieces_stays(backend):
    renderer = make_renderer(OwnTokenizer(backend, shift=1))
    before = renderer._tokenize_prompt_async

    reuse_tokens(renderer, "")

    assert renderer._tokenize_prompt_async == before


def test_what_is_kept_is_kept_for_each_salt_apart(backend):
    known = PieceTokens(Tokenizer.from_str(backend))
    sizes = []
    for salt in ("", "a", "b", "a"):
        assert known.tokens(TEXT, special=True, salt=salt) == whole(backend, TEXT)
        sizes.append(len(known._known))

    assert sizes == [sizes[0], 2 * sizes[0], 3 * sizes[0], 3 * sizes[0]]


def test_the_memory_of_pieces_is_bounded(backend):
    known = PieceTokens(Tokenizer.from_str(backend), bytes_max=10_000)
    for number in range(20):
        text = f"{number} " + TEXT[number : number + 4 * PIECE_CHARS]
        assert known.tokens(text, special=True) == whole(backend, text)

    assert 0 < known._bytes <= 10_000
    assert len(known._known) < 10
