"""``python -m services.router.tokenize.trial``: tries a tokenizer and its chat template as a router uses them (see
``trials``). Reads a ``Candidate`` from standard input. Ends of what the candidate does wrong, or says it.
"""

from __future__ import annotations

import contextlib
import itertools
import resource
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import process_time
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

from services.router.request.fields import read_request
from services.router.tokenize.chat_template import ChatTemplate, TemplateFailed, TooManyRounds
from services.router.tokenize.probes import MIXTURE, PROSE, probes
from services.router.tokenize.tokenizer import NOT_EXACT, STEP_CHARS, PromptTokenizer
from services.router.tokenize.trials import DONE, TEMPLATE, TOKENIZER, Candidate, reason
from shared.contracts.control import TokenizerAsset

CPU_S_MAX: Final = 20
MEMORY_BYTES_MAX: Final = 4 << 30
"""Address space of the process: twice what a tokenizer of 260,000 tokens takes."""
TEXT_S_MAX: Final = 1.0
"""CPU time for a text of ``STEP_CHARS`` characters, of which honest tokenizers take some ten milliseconds."""
CACHE_BYTES: Final = 1 << 20

RUNS: Final = ("a", " ", "\n", "0", ".", "é", "漢", "🙂", "a ", "a1", "\n ", "aA", "'s", "\t \r\n")
"""Texts that are repeated: regular expressions backtrack, and merges add up, where nothing ends a word."""
ENDS: Final = "".join(map(chr, range(0x20, 0x7F))) + "éß漢🙂\n"
OWN_TEXTS_MAX: Final = 64
"""Texts of the tokenizer's own normalizer and pre-tokenizer that are repeated, too."""
OWN_CHARS: Final = 1024
GROWTH_MAX: Final = 64
"""Characters that a normalizer may make of one. Unicode's compatibility forms make up to 18."""
CHARS_AT_ONCE: Final = 256
NORMALIZER_BYTES_MAX: Final = 256 << 20
"""Memory for the normalization of ``CHARS_AT_ONCE`` characters."""
EMPTY_MODEL: Final = {"type": "BPE", "vocab": {}, "merges": []}
CHARACTERS: Final = "".join(map(chr, itertools.chain(range(0xD800), range(0xE000, 0xFFFE), range(0x1F300, 0x1F700))))
CHAT: Final[list[dict[str, Any]]] = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": MIXTURE},
    {"role": "assistant", "content": "Well."},
    {"role": "user", "content": PROSE},
]


class Refused(Exception):
    """The candidate must not be used."""


def main() -> None:
    """Try what standard input has."""
    bound()
    candidate = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Candidate)
    try:
        say(TEMPLATE)
        try_template(candidate)
    except Refused as refused:
        say(f"{TEMPLATE} {refused}")
        without = msgspec.structs.replace(candidate.asset, chat_template="")
        candidate = msgspec.structs.replace(candidate, asset=without)
    try:
        say(TOKENIZER)
        try_tokenizer(candidate)
    except Refused as refused:
        say(f"{TOKENIZER} {refused}")
    else:
        say(DONE)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def bound() -> None:
    """Let the process end of what takes too much, before anything else suffers."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S_MAX, CPU_S_MAX))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    with contextlib.suppress(OSError):  # Where memory is short, the kernel ends this process first.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def try_template(candidate: Candidate) -> None:
    """Compile it, and render a small chat. That it raises an error of its own is its right."""
    asset = candidate.asset
    if not asset.chat_template:
        return
    begun = process_time()
    try:
        template = ChatTemplate(asset.chat_template, asset.special_tokens, chars_max=candidate.chars_max)
    except TemplateFailed as error:
        raise Refused(reason(error)) from error
    for chat in (CHAT, CHAT[1:2]):
        with contextlib.suppress(TemplateFailed):
            render(template, chat)
    within(begun, "its chat template")


def render(template: ChatTemplate, chat: list[dict[str, Any]]) -> None:
    """Raises TemplateFailed."""
    try:
        template.render(chat, {"add_generation_prompt": True})
    except TooManyRounds as error:
        raise Refused("it loops too often for a small chat") from error


def try_tokenizer(candidate: Candidate) -> None:
    """Build it, and tokenize texts of all kinds that others fail at."""
    asset = candidate.asset
    try:
        normalize_all(asset)
        tokenizer = PromptTokenizer(asset, candidate.scheme, cache_bytes_max=CACHE_BYTES, chars_max=candidate.chars_max)
        for probe in probes("m", block_size=candidate.scheme.block_size, max_model_len=candidate.chars_max):
            begun = process_time()
            tokenizer.whole_prompt(read_request(probe.path, probe.body))
            within(begun, "a probe")
        for text in texts(asset):
            begun = process_time()
            tokenizer.tokenize(text)
            within(begun, f"{len(text)} characters such as {text[:8]!r}")
    except NOT_EXACT as error:
        raise Refused(reason(error)) from error
    except MemoryError as error:
        raise Refused("it takes too much memory") from error


def within(begun: float, what: str) -> None:
    took = process_time() - begun
    if took > TEXT_S_MAX:
        raise Refused(f"{what} took {took:.1f} s")


def normalize_all(asset: TokenizerAsset) -> None:
    """Raises Refused if a normalizer makes much of little; ends the process if it makes gigabytes."""
    parts = msgspec.json.decode(asset.tokenizer_json)
    if not isinstance(parts, dict) or not parts.get("normalizer"):
        return
    alone = {"version": "1.0", "normalizer": parts["normalizer"], "model": EMPTY_MODEL}
    normalizer = Tokenizer.from_str(msgspec.json.encode(alone).decode()).normalizer
    own = (text[:CHARS_AT_ONCE] for text in own_texts(asset.tokenizer_json))
    some = (CHARACTERS[at : at + CHARS_AT_ONCE] for at in range(0, len(CHARACTERS), CHARS_AT_ONCE))
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (min(used + NORMALIZER_BYTES_MAX, MEMORY_BYTES_MAX), MEMORY_BYTES_MAX))
    for text in itertools.chain(own, some):
        if len(normalizer.normalize_str(text)) > GROWTH_MAX * max(16, len(text)):
            raise Refused(f"its normalizer multiplies texts such as {text[:8]!r}")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))


def texts(asset: TokenizerAsset) -> Iterator[str]:
    """Texts of at most ``STEP_CHARS`` characters: what the router's quick thread tokenizes in one step."""
    yield (MIXTURE + PROSE) * (STEP_CHARS // len(MIXTURE + PROSE))
    for run in RUNS:
        yield run * (STEP_CHARS // len(run))
        yield run * ((STEP_CHARS - len(ENDS)) // len(run)) + ENDS
    for text in own_texts(asset.tokenizer_json):
        yield text[:OWN_CHARS] * (OWN_CHARS // len(text) or 1) + ENDS


def own_texts(tokenizer_json: bytes) -> list[str]:
    """What the tokenizer replaces, splits at, or removes."""
    parts = msgspec.json.decode(tokenizer_json)
    some = (parts.get(name) for name in ("normalizer", "pre_tokenizer")) if isinstance(parts, dict) else ()
    found = list(itertools.islice(filter(None, _strings(some)), OWN_TEXTS_MAX))
    return list(dict.fromkeys([*found, *"".join(found)]))[: 2 * OWN_TEXTS_MAX]


def _strings(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from _strings(value.values())
        elif isinstance(value, list):
            yield from _strings(value)


if __name__ == "__main__":
    main()
