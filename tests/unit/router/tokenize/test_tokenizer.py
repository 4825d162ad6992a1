"""The router's tokens equal the engine's, or count as unknown."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.router.request.fields import read_request
from services.router.tokenize.chat_template import ChatTemplate, TemplateFailed
from services.router.tokenize.tokenizer import PromptTokenizer
from services.router.tokenize.turns import PromptWork, Work
from services.worker.tiny_model import ensure_tiny_tokenizer
from shared.contracts.control import TokenizerAsset
from shared.contracts.engine_paths import CHAT, COMPLETIONS
from shared.contracts.workers import HashScheme
from shared.text_cuts import find_cuts
from tests.support.block_hashes import block_hashes

SCHEME = HashScheme(block_size=16)
CACHE_BYTES_MAX = 1 << 20

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory) -> str:
    directory = ensure_tiny_tokenizer(tmp_path_factory.mktemp("cache"))
    return (Path(directory) / "tokenizer.json").read_text()


@pytest.fixture(scope="module")
def whole(tokenizer_json) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json)


def made_of(tokenizer_json: str) -> PromptTokenizer:
    asset = TokenizerAsset(
        worker_id="w1",
        epoch=1,
        tokenizer_json=tokenizer_json.encode(),
        chat_template=TEMPLATE,
        special_tokens={"bos_token": "<s>"},
    )
    return PromptTokenizer(asset, SCHEME, cache_bytes_max=CACHE_BYTES_MAX)


@pytest.fixture(scope="module")
def prompts(tokenizer_json) -> PromptTokenizer:
    """It knows texts of other tests."""
    return made_of(tokenizer_json)


def prompt_of(prompts: PromptTokenizer, path: str, held=lambda _block: True, more=(), **fields):
    facts = read_request(path, json.dumps({"model": "m", **fields}).encode())
    with ThreadPoolExecutor(1) as threads:
        return asyncio.run(
            prompts.prompt(
                facts, held, work=Work(PromptWork(threads, threads), "tenant"), loop_chars_max=500, more=more
            )
        )


def test_an_uncached_prompt_is_not_tokenized_to_its_end(tokenizer_json):
    prompts = made_of(tokenizer_json)
    text = "every word of this is new to all of them " * 2000

    found = prompt_of(prompts, COMPLETIONS, held=lambda _block: False, prompt=text)

    assert 0 < len(found.hashes) < 100
    assert found.tokens == pytest.approx(prompt_of(prompts, COMPLETIONS, prompt=text).tokens, rel=0.1)


def test_tokenization_continues_as_far_as_blocks_are_cached(tokenizer_json, whole):
    prompts = made_of(tokenizer_json)
    text = "some words that all of them know by heart " * 300
    expected = block_hashes(whole.encode(text).ids, SCHEME)
    known = set(expected[: len(expected) // 2])

    found = prompt_of(prompts, COMPLETIONS, held=known.__contains__, prompt=text)

    assert list(found.hashes[: len(known)]) == expected[: len(known)]
    assert len(found.hashes) < len(expected)


def test_prompt_length_and_repetition_do_not_change_the_hashes(prompts, whole):
    for text in ("short one", "long enough to go to a thread " * 100):
        expected = block_hashes(whole.encode(text).ids, SCHEME)
        for _ in range(2):
            assert list(prompt_of(prompts, COMPLETIONS, prompt=text).hashes) == expected


def test_token_ids_are_used_unchanged(prompts):
    ids = list(range(100))
    assert prompt_of(prompts, COMPLETIONS, prompt=ids).hashes == block_hashes(ids, SCHEME)


def test_salts_separate_equal_prompts(prompts):
    text = "the same words for two tenants " * 30
    plain, salted = (prompt_of(prompts, COMPLETIONS, prompt=text, cache_salt=salt) for salt in (None, "tenant"))
    assert plain.tokens == salted.tokens
    assert not set(plain.hashes) & set(salted.hashes)


def test_chats_are_tokenized_as_their_template_renders_them(prompts, whole):
    messages = [{"role": "user", "content": "hello there " * 20}]
    text = "<s><user>" + "hello there " * 20 + "\n<assistant>"

    found = prompt_of(prompts, CHAT, messages=messages)

    assert list(found.hashes) == block_hashes(whole.encode(text, add_special_tokens=False).ids, SCHEME)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"messages": "no list"},
        {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"},
    ],
)
def test_prompts_only_the_engine_can_render_are_not_hashed(prompts, fields):
    assert prompt_of(prompts, CHAT, **fields) is None


def test_messages_that_repeat_a_known_text_are_not_a_chat(tokenizer_json):
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    asset = TokenizerAsset(worker_id="w1", epoch=1, tokenizer_json=tokenizer_json.encode(), chat_template=template)
    prompts = PromptTokenizer(asset, SCHEME, cache_bytes_max=CACHE_BYTES_MAX)
    text = "word " * 1000
    assert prompt_of(prompts, COMPLETIONS, prompt=text, add_special_tokens=False) is not None

    assert prompt_of(prompts, CHAT, messages=text) is None


@pytest.mark.parametrize("prompt", [[-1], [1 << 70], {"a": 1}, [1.5]])
def test_invalid_prompts_are_left_to_the_engine(prompts, prompt):
    assert prompt_of(prompts, COMPLETIONS, prompt=prompt * 20 if isinstance(prompt, list) else prompt) is None


def test_tokenizers_that_join_across_spaces_are_not_cut(whole):
    joins = Tokenizer.from_str(whole.to_str())
    joins.add_tokens(["many words in one"])
    assert find_cuts(whole).words is not None
    assert find_cuts(joins).words is None


@pytest.mark.parametrize("asset", [{}, {"tokenizer_json": b"{"}, {"tokenizer_json": b"\xff"}])
def test_unusable_assets_are_rejected_with_a_reason(asset):
    with pytest.raises(ValueError, match=r"\w"):
        PromptTokenizer(TokenizerAsset(worker_id="w", epoch=1, **asset), SCHEME, cache_bytes_max=1)


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}{{ raise_exception('no') }}", "{% if %}", "{{ 1 / 0 }}"])
def test_a_broken_or_escaping_template_fails_alone(source):
    with pytest.raises(TemplateFailed):
        ChatTemplate(source, {}, chars_max=10_000).render([], {})


def test_templates_render_as_in_hugging_face_transformers():
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    source = """
    {%- for message in messages %}
        {%- if loop.index0 == 3 %}{% break %}{% endif %}
        {{- '<' + message['role'] + '>' }}
        {%- generation %}{{ message['content'] | trim }}{% endgeneration %}
        {{ message | tojson }}
    {%- endfor %}
    {%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}{{ bos_token }}
    """
    messages = [{"role": "user", "content": " <b>hi</b> é "}, {"role": "assistant", "content": "yes"}] * 2

    theirs, _ = utils.render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )
    ours = ChatTemplate(source, {"bos_token": "<s>"}, chars_max=10_000).render(
        messages, {"add_generation_prompt": True}
    )

    assert ours == theirs[0]


@pytest.mark.parametrize("chars", [30, 3000])
def test_completion_tokens_are_hashed_after_their_prompt(prompts, whole, chars):
    text, more = "going on where it broke off " * (chars // 28), [5, 0, 77, 1999] * 20
    ids = [*whole.encode(text).ids, *more]

    found = prompt_of(prompts, COMPLETIONS, prompt=text, more=more)
    given_as_ids = prompt_of(prompts, COMPLETIONS, prompt=ids[: -len(more)], more=more)

    assert (found.tokens, list(found.hashes)) == (len(ids), block_hashes(ids, SCHEME))
    assert list(given_as_ids.hashes) == list(found.hashes)
