"""A next turn, whose beginning the cache of pieces has, gives the tokens and hashes of the whole conversation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.request.facts import RequestFacts
from services.router.request.fields import read_request
from services.router.request.prompt import Prompt
from services.router.tokenize.tokenizer import PromptTokenizer
from services.router.tokenize.turns import PromptWork, Work
from shared.contracts.control import TokenizerAsset
from shared.contracts.engine_paths import CHAT, COMPLETIONS
from shared.contracts.workers import HashScheme
from tests.properties.router.tokenizer_kinds import kind
from tests.support.examples import examples

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML.replace("<|im_end|>", "<|im_end|>{{ mark }}"),
    "bare": "{% for message in messages %}{{ message.content }}{% endfor %}{{ ' so' if add_generation_prompt }}",
    "last question": (
        "{% set ns = namespace(open=true, last=messages|length - 1) %}{% for message in messages[::-1] %}"
        "{% set index = (messages|length - 1) - loop.index0 %}{% if ns.open and message.role == 'user' %}"
        "{% set ns.open = false %}{% set ns.last = index %}{% endif %}{% endfor %}"
        "{% if messages|length > 1 and messages[1].role == 'system' %}{{ messages[1].content }}{% endif %}"
        "{% for message in messages %}<|im_start|>{{ message.role }}{% if loop.index0 > ns.last %}<think>{% endif %}"
        "{{ message.content }}{% endfor %}"
    ),
    "last": CHATML.replace("<|im_end|>", "{% if loop.last %}!{% endif %}"),
}
TEXTS = st.one_of(
    st.sampled_from(
        ["", "peek", "Hello there, it's me.", "<|im_start|>", " spaces ", "ü漢🙂", "a\n\nb", "the end " * 40]
    ),
    st.text(alphabet="ab .,<|>{}é漢\n", max_size=20),
)
CHATS = st.tuples(st.booleans(), st.lists(TEXTS, min_size=1, max_size=12)).map(
    lambda drawn: [
        {"role": "system" if drawn[0] and not at else ("user", "assistant")[at % 2], "content": text}
        for at, text in enumerate(drawn[1])
    ]
)
SCHEME = HashScheme(block_size=4)


LONG = " and so on," * 200


@cache
def tokenizers(name: str, source: str, cache_bytes: int) -> tuple[PromptTokenizer, PromptTokenizer]:
    """The one keeps what it reads between examples, as a router does; the other remembers nothing."""
    asset = TokenizerAsset(worker_id="w", epoch=1, tokenizer_json=kind(name).encode(), chat_template=TEMPLATES[source])
    return (
        PromptTokenizer(asset, SCHEME, cache_bytes_max=cache_bytes),
        PromptTokenizer(asset, SCHEME, cache_bytes_max=1),
    )


def body_of(chat: list[dict[str, str]], fields: dict[str, object], spaces: bool) -> bytes:
    return json.dumps({"model": "m", "messages": chat, **fields}, indent=1 if spaces else None).encode()


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "cache_salt": st.sampled_from(["a", "b"]),
        "add_special_tokens": st.booleans(),
        "add_generation_prompt": st.booleans(),
        "chat_template_kwargs": st.sampled_from([{}, {"mark": "x"}, {"mark": "y"}]),
    },
)


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("name", ["llama_3", "llama_2", "unigram"])
@settings(deadline=None, max_examples=examples(20))
@given(CHATS, st.lists(st.integers(1, 12), min_size=2, max_size=6), FIELDS, st.booleans(), st.data())
def test_prompts_of_next_turns_are_those_of_the_whole(name, source, chat, turns, usual, spaces, data):
    remembering, forgetting = tokenizers(name, source, 1 << data.draw(st.sampled_from([13, 20])))
    long_enough = {**chat[0], "content": chat[0]["content"] + LONG}
    for end in turns:
        fields = data.draw(st.one_of(st.just(usual), FIELDS))
        facts = read_request(CHAT, body_of([long_enough, *chat[1:end]], fields, spaces))
        held_until = data.draw(st.integers(0, 400))
        expected = forgetting.whole_prompt(facts)
        prompt_of(remembering, facts, Held(held_until))  # A worker holds a part.

        assert prompt_of(remembering, facts, lambda _block: True) == expected


@pytest.mark.parametrize("name", ["llama_3", "llama_2", "unigram"])
@settings(deadline=None, max_examples=examples(20))
@given(
    st.lists(TEXTS, min_size=1, max_size=8),
    st.lists(st.integers(0, 8), min_size=2, max_size=6),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_completions_that_go_on_are_those_of_the_whole(name, texts, ends, escapes, special, data):
    remembering, forgetting = tokenizers(name, "chatml", 1 << data.draw(st.sampled_from([13, 20])))
    begin = texts[0] + LONG
    for end in ends:
        fields = {"model": "m", "prompt": begin + "".join(texts[1:end]), "add_special_tokens": special}
        facts = read_request(COMPLETIONS, json.dumps(fields, ensure_ascii=escapes).encode())
        expected = forgetting.whole_prompt(facts)
        prompt_of(remembering, facts, Held(data.draw(st.integers(0, 400))))

        assert prompt_of(remembering, facts, lambda _block: True) == expected


def test_the_last_piece_of_a_turn_is_tokenized_again_with_what_follows():
    remembering, forgetting = tokenizers("llama_3", "bare", 1 << 20)
    texts = ["some words " * 200, "and an orch", "ard,", " or tw", "o"]
    chat = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    for end in range(1, len(chat) + 1):
        facts = read_request(CHAT, body_of(chat[:end], {"add_generation_prompt": False}, False))

        assert remembering.begin(facts, lambda _block: True, loop_chars_max=1 << 20) == forgetting.whole_prompt(facts)


def prompt_of(tokenizer: PromptTokenizer, facts: RequestFacts, held: Callable[[int], bool]) -> Prompt | None:
    """The prompt as a router reads it: at once, or in a thread if the tokenizer may be slow."""
    begun = tokenizer.begin(facts, held, loop_chars_max=1 << 20)
    if begun is None or isinstance(begun, Prompt):
        return begun

    async def finish() -> Prompt | None:
        work = PromptWork.in_threads()
        try:
            return await tokenizer.finish(begun, held, Work(work, "t"))
        finally:
            work.close()

    return asyncio.run(finish())


class Held:
    """So many times."""

    def __init__(self, times: int) -> None:
        self._left = times

    def __call__(self, _block: int) -> bool:
        self._left -= 1
        return self._left >= 0
