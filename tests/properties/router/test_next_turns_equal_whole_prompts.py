"""A next turn that is read from its last messages on gives the text, tokens and hashes of the whole conversation."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.request.facts import RequestFacts
from services.router.request.fields import read_request
from services.router.request.prompt import Prompt
from services.router.tokenize.chat_template import FAILURES_MAX, HEAD, ChatTemplate, Rendered, TemplateFailed
from services.router.tokenize.known_prompts import KnownPrompt
from services.router.tokenize.message_loop import Dependencies, NeedsWhole
from services.router.tokenize.segments import Node, Place
from services.router.tokenize.tokenizer import KNOWN_BYTES_MIN, PromptTokenizer, Unfinished
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
FOLLOWED = {
    "chatml": CHATML.replace("<|im_end|>", "<|im_end|>{{ mark }}"),
    "bare": "{% for message in messages %}{{ message.content }}{% endfor %}{{ ' so' if add_generation_prompt }}",
    "default system": "{% if messages[0].role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}" + CHATML,
    "tools look around": (
        "{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\n' }}{%- endif %}"
        "{%- for message in messages %}"
        "{%- if (message.role == 'user') or (message.role == 'system' and not loop.first) %}"
        "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
        "{%- elif message.role == 'tool' %}"
        "{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' or loop.last %}tool{% endif %}"
        "{%- else %}{{ message.content }}{% if message.tool_calls %}{{ loop.length }}{% endif %}{%- endif %}"
        "{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "system taken out": (
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content|trim %}"
        "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
        "{{ bos_token }}<|im_start|>{{ system }}<|im_end|>"
        "{% for message in messages %}<|im_start|>{{ message.role }}{{ loop.index }}{{ message.content | trim }}"
        "{% endfor %}{{ messages[-1].role }}{{ messages|length }}"
    ),
    "roles alternate": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set prefix = messages[0].content + ' ' %}"
        "{% set turns = messages[1:] %}{% else %}{% set prefix = '' %}{% set turns = messages %}{% endif %}"
        "{% for message in turns %}{% if loop.index0 % 2 == 0 %}<|im_start|>even{% else %}<|im_start|>odd{% endif %}"
        "{{ (prefix if loop.first else '') + message.content }}{% endfor %}"
    ),
    "last question": (
        "{% set ns = namespace(open=true, last=messages|length - 1) %}{% for message in messages[::-1] %}"
        "{% set index = (messages|length - 1) - loop.index0 %}{% if ns.open and message.role == 'user' %}"
        "{% set ns.open = false %}{% set ns.last = index %}{% endif %}{% endfor %}"
        "{% if messages|length > 1 and messages[1].role == 'system' %}{{ messages[1].content }}{% endif %}"
        "{% for message in messages %}<|im_start|>{{ message.role }}{% if loop.index0 > ns.last %}<think>{% endif %}"
        "{{ message.content }}{% endfor %}"
    ),
    "counts pictures": (
        "{% set count = namespace(n=0) %}{% macro said(content) %}{% if content is string %}{{ content }}"
        "{% else %}{% set count.n = count.n + 1 %}{{ count.n }}{% endif %}{% endmacro %}"
        "{% for message in messages %}{{ said(message.content) }}{{ loop.previtem.role if message.role == 'tool' }}"
        "<|im_end|>{% endfor %}"
    ),
    "a macro, an inner loop": (
        "{% macro said(message) %}<|im_start|>{{ message.role }}{{ messages[0].content|length }}{% endmacro %}"
        "{% for message in messages %}{{ said(message) }}{% set all = message.content %}"
        "{% for char in all[:3] %}{{ char }}{{ ',' if not loop.last }}{% endfor %}{{ all }}{% endfor %}"
    ),
}
SOMETIMES = {
    "peeks": CHATML.replace("<|im_end|>", "{% if 'peek' in message.content %}{{ loop.length }}{% endif %}<|im_end|>"),
    "next": CHATML.replace("<|im_end|>", "{% if 'peek' in message.content %}{{ loop.nextitem }}{% endif %}<|im_end|>"),
    "counts": CHATML.replace("<|im_end|>", "{% if 'peek' in message.content %}{{ messages|length }}{% endif %}"),
    "last of all": CHATML.replace("<|im_end|>", "{% if 'peek' in message.content %}{{ messages[-1].role }}{% endif %}"),
    "behind": CHATML.replace(
        "<|im_end|>", "{% if 'peek' in message.content %}{{ messages[loop.index0 + 1] is defined }}{% endif %}"
    ),
    "tail": CHATML.replace("<|im_end|>", "{% if 'peek' in message.content %}{{ messages[2:]|length }}{% endif %}"),
    "breaks": CHATML.replace("<|im_end|>", "{% if 'peek' in message.content %}{% break %}{% endif %}"),
    "far tail": CHATML.replace("<|im_end|>", "{% if 'peek' in message.content and messages[4:] %}more{% endif %}"),
}
NEVER = {
    "a local namespace": "{% set ns = namespace(last=1) %}"
    + CHATML.replace("<|im_end|>", "{% set ns = namespace(last=messages|length) %}{{ loop.index0 < ns.last }}"),
    "last": CHATML.replace("<|im_end|>", "{% if loop.last %}!{% endif %}"),
    "rev": CHATML.replace("<|im_end|>", "{{ loop.revindex }}"),
    "previous": CHATML.replace("<|im_end|>", "{{ loop.previtem.role if not loop.first }}"),
    "changed": CHATML.replace("<|im_end|>", "{{ loop.changed(message.role) }}"),
    "cycle": CHATML.replace("<|im_end|>", "{{ loop.cycle('a', 'b') }}"),
    "namespace": "{% set ns = namespace(n=0) %}" + CHATML.replace("<|im_end|>", "{% set ns.n = ns.n + 1 %}{{ ns.n }}"),
    "namespace in a macro": (
        "{% set ns = namespace(n=0) %}{% macro up() %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endmacro %}"
        + CHATML.replace("<|im_end|>", "{{ up() }}")
    ),
    "joiner": "{% set sep = joiner(',') %}" + CHATML.replace("<|im_end|>", "{{ sep() }}"),
    "cycler": "{% set c = cycler('a', 'b') %}" + CHATML.replace("<|im_end|>", "{{ c.next() }}"),
    "two loops": CHATML + CHATML,
    "in a set": "{% set all %}" + CHATML + "{% endset %}{{ all|trim }}",
    "filtered": CHATML.replace("in messages", "in messages if message.role == 'user'"),
    "printed": CHATML + "{{ messages }}",
    "as JSON": CHATML + "{{ messages|tojson }}",
    "compared": CHATML + "{{ messages == messages[0:] }}",
    "added to": CHATML + "{{ messages + [1] }}",
    "sorted": "{% for message in messages|sort(attribute='content') %}{{ message.content }}{% endfor %}",
    "backwards": "{% for message in messages|reverse %}{{ message.content }}{% endfor %}",
}
COUNT = "{% set n = messages|length %}"
BEFORE = {
    "writes a count": "{{ messages|length }}" + CHATML,
    "counts before": COUNT + CHATML.replace("<|im_end|>", "{{ n }}"),
    "counts in a branch": "{% if messages %}" + COUNT + "{% endif %}" + CHATML.replace("<|im_end|>", "{{ n }}"),
    "counts in a list": "{% set n = [{'n': [messages|length]}] %}" + CHATML.replace("<|im_end|>", "{{ n }}"),
    "counts in a macro": COUNT
    + "{% macro said() %}{{ n }}{% endmacro %}"
    + CHATML.replace("<|im_end|>", "{{ said() }}"),
    "chooses a macro": "{% if messages|length > 3 %}{% macro said() %}A{% endmacro %}{% else %}{% macro said() %}B"
    "{% endmacro %}{% endif %}" + CHATML.replace("<|im_end|>", "{{ said() }}"),
    "counts half": "{% set n = messages|length / 2 %}" + CHATML.replace("<|im_end|>", "{{ n }}"),
    "keeps the last": "{% set last = messages[-1] %}" + CHATML.replace("<|im_end|>", "{{ last.content }}"),
    "copies": "{% set all = messages|list %}" + CHATML.replace("<|im_end|>", "{{ all[-1].content }}"),
    "also writes the number": "{% set ns = namespace(last=messages|length) %}"
    + CHATML.replace(
        "<|im_end|>", "{{ loop.index0 > ns.last }}{% if 'peek' in message.content %}{{ ns.last }}{% endif %}"
    ),
    "compares with near numbers": "{% set ns = namespace(last=messages|length - 3) %}"
    + CHATML.replace("<|im_end|>", "{{ loop.index >= ns.last }}"),
    "compares with halves": "{% set ns = namespace(last=messages|length / 2) %}"
    + CHATML.replace("<|im_end|>", "{{ loop.index >= ns.last }}"),
    "compares with a copy": "{% set ns = namespace(last=messages|length - 3) %}{% set copy = ns %}"
    + CHATML.replace("<|im_end|>", "{{ loop.index >= copy.last }}{{ ns.last }}"),
    "reads all roles": "{% for message in messages[0:99] %}{{ message.role }}{% endfor %}" + CHATML,
}
TEMPLATES = FOLLOWED | SOMETIMES | BEFORE | NEVER
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


PLAIN = "{% set unused = joiner %}"
"""A template with this is rendered with a plain list of messages, as the engine does it."""


def made(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"}, chars_max=1_000_000)


@cache
def templates(name: str) -> tuple[ChatTemplate, ChatTemplate]:
    """As it is, and plain."""
    return made(TEMPLATES[name]), made(PLAIN + TEMPLATES[name])


def known_prompt(messages: list[dict[str, str]], begun: Rendered) -> KnownPrompt:
    place = Place(Node(1, "", 0, [], None, b""), [], 0, begun.text[: begun.lasting])
    return KnownPrompt(b"", len(messages), messages[:HEAD], begun.dependencies, place)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(deadline=None, max_examples=examples(25))
@given(CHATS, st.data())
def test_text_rendered_on_is_that_of_the_whole(name, chat, data):
    template, plain = templates(name)
    variables = {"add_generation_prompt": data.draw(st.booleans())}
    count = data.draw(st.integers(1, len(chat)))
    wholes = [check_alike(template, plain, messages, variables) for messages in (chat, chat[:count])]
    if None in wholes:
        return
    (whole, lasting, dependencies), begun = wholes
    if begun.dependencies is None:
        return
    known = begun.text[: begun.lasting]
    try:
        rest = template.render_continuation(known_prompt(chat[:count], begun), chat[count:], variables)
    except NeedsWhole:
        return
    assert known + rest.text == whole
    if rest.dependencies is not None and dependencies is not None:
        assert (rest.lasting + len(known), rest.dependencies) == (lasting, dependencies)


def check_alike(template: ChatTemplate, plain: ChatTemplate, messages: list, variables: dict) -> Rendered | None:
    try:
        expected = plain.render(messages, variables)
    except TemplateFailed:
        with pytest.raises(TemplateFailed):
            template.render(messages, variables)
        return None
    found = template.render(messages, variables)
    assert found.text == expected.text
    return found


def text_chat(text: str, messages: int) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[at % 2], "content": f"{text} {at}"} for at in range(messages)]


@pytest.mark.parametrize("name", FOLLOWED)
def test_common_templates_are_followed(name):
    chat, template = text_chat("text", 7), made(TEMPLATES[name])
    first = template.render(chat[:3], {})

    assert template.render_continuation(known_prompt(chat[:3], first), chat[3:5], {}).lasting


@pytest.mark.parametrize("name", NEVER)
def test_rounds_that_need_others_make_the_text_unknown(name):
    template = made(TEMPLATES[name])

    assert template.render(text_chat("peek", 3), {}).dependencies is None


@pytest.mark.parametrize("name", BEFORE)
def test_what_differs_before_the_loop_makes_the_text_unknown(name):
    chat, template = text_chat("peek", 7), made(TEMPLATES[name])
    first = template.render(chat[:3], {})

    if first.dependencies is not None:
        with pytest.raises(NeedsWhole):
            template.render_continuation(known_prompt(chat[:3], first), chat[3:], {})


def test_a_text_with_another_time_is_rendered_anew():
    chat = text_chat("text", 3)
    for source in "{{ strftime_now('%Y') }}", "{% set year = strftime_now('%Y') %}":
        template = ChatTemplate(source + CHATML, {}, chars_max=1000)
        first = template.render(chat[:2], {})
        before, variables, comparisons = first.dependencies
        year = datetime.now(UTC).strftime("%Y")
        earlier = {name: (str, value[1].replace(year, "1999")) for name, value in variables.items()}
        dependencies = Dependencies(before.replace(year, "1999"), earlier, comparisons)

        assert template.render_continuation(known_prompt(chat[:2], first), chat[2:], {}).lasting
        with pytest.raises(NeedsWhole):
            template.render_continuation(
                known_prompt(chat[:2], first._replace(dependencies=dependencies)), chat[2:], {}
            )


def test_a_time_in_the_loop_makes_the_text_unknown():
    template = ChatTemplate(CHATML.replace("<|im_end|>", "{{ strftime_now('%Y') }}"), {}, chars_max=1000)

    assert template.render(text_chat("text", 2), {}).dependencies is None


def test_a_template_that_needs_whole_chats_is_seldom_followed_until_it_does_not():
    template, chat = made(FOLLOWED["system taken out"]), text_chat("text", 5)
    known = known_prompt(chat[:3], template.render(chat[:3], {}))
    for _ in range(FAILURES_MAX):
        with pytest.raises(NeedsWhole):
            template.render_continuation(known, [], {})  # It reads the last message.
    followed = [template.render(chat, {}).dependencies is not None for _ in range(2 * FAILURES_MAX)]
    template.render_continuation(known, chat[3:], {})

    assert sum(followed) == 2
    assert template.render(chat, {}).dependencies is not None


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


@pytest.mark.parametrize("source", ["chatml", "bare", "last question", "peeks", "last"])
@pytest.mark.parametrize("name", ["llama_3", "llama_2", "unigram"])
@settings(deadline=None, max_examples=examples(20))
@given(CHATS, st.lists(st.integers(1, 12), min_size=2, max_size=6), FIELDS, st.booleans(), st.data())
def test_prompts_of_next_turns_are_those_of_the_whole(name, source, chat, turns, usual, spaces, data):
    remembering, forgetting = tokenizers(name, source, 1 << data.draw(st.sampled_from([13, 20])))
    long_enough = {**chat[0], "content": chat[0]["content"] + " and so on," * (KNOWN_BYTES_MIN // 10)}
    for end in turns:
        fields = data.draw(st.one_of(st.just(usual), FIELDS))
        facts = read_request(CHAT, body_of([long_enough, *chat[1:end]], fields, spaces))
        held_until = data.draw(st.integers(0, 400))
        expected = forgetting.whole_prompt(facts)
        remembering.begin(facts, Held(held_until), loop_chars_max=1 << 20)  # A worker holds a part.
        found = remembering.begin(facts, lambda _block: True, loop_chars_max=1 << 20)

        assert found == expected


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
    begin = texts[0] + "and so on, " * (KNOWN_BYTES_MIN // 10)
    for end in ends:
        fields = {"model": "m", "prompt": begin + "".join(texts[1:end]), "add_special_tokens": special}
        facts = read_request(COMPLETIONS, json.dumps(fields, ensure_ascii=escapes).encode())
        expected = forgetting.whole_prompt(facts)
        remembering.begin(facts, Held(data.draw(st.integers(0, 400))), loop_chars_max=1 << 20)

        assert remembering.begin(facts, lambda _block: True, loop_chars_max=1 << 20) == expected


def test_the_last_piece_of_a_turn_is_tokenized_again_with_what_follows():
    remembering, forgetting = tokenizers("llama_3", "bare", 1 << 20)
    texts = ["some words " * (KNOWN_BYTES_MIN // 10), "and an orch", "ard,", " or tw", "o"]
    chat = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    for end in range(1, len(chat) + 1):
        facts = read_request(CHAT, body_of(chat[:end], {"add_generation_prompt": False}, False))

        assert remembering.begin(facts, lambda _block: True, loop_chars_max=1 << 20) == forgetting.whole_prompt(facts)


class Held:
    """So many times."""

    def __init__(self, times: int) -> None:
        self._left = times

    def __call__(self, _block: int) -> bool:
        self._left -= 1
        return self._left >= 0


def long_chats(*lengths: int) -> list[RequestFacts]:
    """Requests of one conversation, which the event loop would not read."""
    chat = [{"role": ("user", "assistant")[at % 2], "content": f"{at} " + "some words " * 9} for at in range(901)]
    return [read_request(CHAT, body_of(chat[:length], {}, False)) for length in lengths]


async def finished(tokenizer: PromptTokenizer, facts: RequestFacts, held: Callable[[int], bool]) -> Prompt | None:
    begun = tokenizer.begin(facts, held, loop_chars_max=1 << 20)
    assert isinstance(begun, Unfinished)
    with ThreadPoolExecutor(1) as threads:
        return await tokenizer.finish(begun, held, Work(PromptWork(threads, threads), ""))


async def test_a_next_turn_is_read_from_its_new_part_on():
    remembering, _ = tokenizers("llama_3", "default system", 1 << 22)
    first, *later = long_chats(897, 899, 901)
    for facts in later:
        assert isinstance(remembering.begin(facts, lambda _block: True, loop_chars_max=1 << 20), Unfinished)

    prompt = await finished(remembering, first, lambda _block: True)
    prompts = [remembering.begin(facts, lambda _block: True, loop_chars_max=1 << 20) for facts in later]

    assert prompt == remembering.whole_prompt(first)
    assert prompts == [remembering.whole_prompt(facts) for facts in later]


async def test_a_prompt_that_no_worker_holds_is_not_remembered():
    remembering, _ = tokenizers("llama_3", "default system", 1 << 23)
    first, later = long_chats(897, 899)
    await finished(remembering, first, lambda _block: False)

    assert await finished(remembering, later, lambda _block: True) == remembering.whole_prompt(later)
