"""Cost of finding a prompt's blocks in the router: ``python -m bench.bench_tokenize [--rounds N]``.

CPU of the whole process for one request, from the body's bytes to a placement among eight workers: body, template,
tokens, hashes, lookup in the index, choice; and of it what template, tokens and hashes take. A next turn is the
conversation before with one more answer and question, as a chat and, without messages and template, as a completion; a
cold prompt is new to the router: no worker holds it, or workers hold all of it, as after a router's restart. Beside it,
in the same run, the plain ``tokenizers`` library on the same text. Needs no network: the vocabulary of 64,000 is
trained once on the standard library's sources, the prose is Python's language reference.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sysconfig
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any, NamedTuple

from shared.contracts.engine_paths import CHAT, COMPLETIONS

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from services.router.placement.fleet import Fleet
from services.router.placement.placement import Placement, PlacementPolicy, PlacementRequest
from services.router.request.facts import RequestFacts
from services.router.request.fields import read_request
from services.router.request.prompt import Prompt
from services.router.service import tune_garbage_collection
from services.router.tokenize.tokenizer import PromptTokenizer, Unfinished
from services.router.tokenize.turns import PromptWork, Work
from shared.contracts.control import TokenizerAsset
from shared.contracts.ids import WorkerId
from shared.contracts.kv_events import KvSnapshot, pack_hashes
from shared.contracts.workers import HashScheme
from tests.support.block_hashes import block_hashes
from tests.support.fleet_builders import load, record

VOCABULARY = 64_000
CORPUS_CHARS = 12_000_000
BLOCK_TOKENS = 16
WORKERS = 8
TURN_CHARS = (400, 2000)
"""Of a question, and of an answer."""
TOKENS = (2000, 8000, 32_000)
LOOP_CHARS_MAX = 4096
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = """
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role in ['user', 'system'] or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

Message = dict[str, str]


def trained() -> str:
    """The tokenizer.json, made once on this machine."""
    kept = Path(tempfile.gettempdir()) / "baton-bench" / f"tokenizer-{VOCABULARY}.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        tokenizer = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
        tokenizer.decoder = decoders.ByteLevel()
        special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            min_frequency=2,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        )
        tokenizer.train_from_iterator(corpus(), trainer)
        draft = kept.with_suffix(f".{os.getpid()}")
        tokenizer.save(str(draft))
        draft.replace(kept)
    return kept.read_text(encoding="utf-8")


def corpus() -> list[str]:
    """Half of the prose, so that the other half has words that the vocabulary does not know, and sources."""
    texts, chars = [topics[name] for name in sorted(topics)[::2]], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if chars < CORPUS_CHARS and "site-packages" not in path.parts:
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
            chars += len(texts[-1])
    return texts


class Prose:
    """New text: whole sentences of the other half, in an order of their own."""

    def __init__(self, seed: int) -> None:
        text = " ".join(" ".join(topics[name] for name in sorted(topics)[1::2]).split())
        self._sentences = [sentence + "." for sentence in text.split(". ") if 20 < len(sentence) < 400]
        self._chance = random.Random(seed)

    def text(self, chars: int) -> str:
        said, length = [], 0
        while length < chars:
            said.append(self._chance.choice(self._sentences))
            length += len(said[-1]) + 1
        return " ".join(said)[:chars]

    def chat(self, chars: int) -> list[Message]:
        """A conversation whose last word is the user's."""
        messages = [{"role": "system", "content": "You are a terse assistant."}]
        while sum(len(message["content"]) for message in messages) < chars:
            self.go_on(messages)
        return messages

    def go_on(self, messages: list[Message]) -> None:
        """One more answer, unless it is the first, and a question."""
        question, answer = TURN_CHARS
        if len(messages) > 1:
            messages.append({"role": "assistant", "content": self.text(answer)})
        messages.append({"role": "user", "content": self.text(question)})


@dataclass
class Router:
    """The parts of a router that a prompt passes."""

    tokenizer: PromptTokenizer
    fleet: Fleet
    work: PromptWork
    loop: asyncio.AbstractEventLoop
    hashed_ms: float = 0.0
    """CPU that the last prompt's tokens and hashes took."""

    @classmethod
    def made(cls, tokenizer_json: str, threads: ThreadPoolExecutor, loop: asyncio.AbstractEventLoop) -> Router:
        asset = TokenizerAsset(
            worker_id=WorkerId("w0"), epoch=1, tokenizer_json=tokenizer_json.encode(), chat_template=TEMPLATE
        )
        scheme = HashScheme(block_size=BLOCK_TOKENS)
        fleet = Fleet(PlacementPolicy())
        for number in range(WORKERS):
            fleet.cluster.record(record(f"w{number}"), 0.0)
            fleet.cluster.report(load(f"w{number}", kv_tokens_total=320_000), 0.0)
            fleet.index.join(WorkerId(f"w{number}"), 1)
        return cls(PromptTokenizer(asset, scheme, cache_bytes_max=1 << 26), fleet, PromptWork(threads, threads), loop)

    def hold(self, hashes: list[int]) -> None:
        """Half of the workers hold these blocks and no others."""
        for number in range(WORKERS // 2):
            told = KvSnapshot(worker_id=WorkerId(f"w{number}"), epoch=1, seq=1, hashes=pack_hashes(hashes))
            self.fleet.index.restore(told)

    def route(self, path: str, body: bytes) -> Prompt:
        """From bytes to workers."""
        facts: RequestFacts = read_request(path, body)
        prompt = self._hashed(facts)
        request = PlacementRequest(
            model=facts.model, prompt_tokens=prompt.tokens, hashes=prompt.hashes, tokens_out=facts.tokens_out
        )
        assert isinstance(self.fleet.place(request, 0.0), Placement)
        return prompt

    def _hashed(self, facts: RequestFacts) -> Prompt:
        begun, held = time.process_time(), self.fleet.index.held
        prompt = self.tokenizer.begin(facts, held, loop_chars_max=LOOP_CHARS_MAX)
        if isinstance(prompt, Unfinished):
            prompt = self.loop.run_until_complete(self.tokenizer.finish(prompt, held, Work(self.work, "")))
        self.hashed_ms = (time.process_time() - begun) * 1e3
        assert prompt is not None
        return prompt


def cpu_ms(work: Callable[[], Any]) -> float:
    """All threads' CPU."""
    begun = time.process_time()
    work()
    return (time.process_time() - begun) * 1e3


class Taken(NamedTuple):
    """CPU in milliseconds, and the prompt's tokens."""

    whole_ms: float
    hashed_ms: float
    """Of it, what the template, tokens and hashes took."""
    plain_ms: float
    """What the library takes for the tokens."""
    tokens: int


@dataclass
class Bench:
    """One vocabulary, one router that has served for a while."""

    router: Router
    plain: Tokenizer
    prose: Prose
    rounds: int

    def hashes(self, messages: list[Message]) -> list[int]:
        """Of the whole prompt, without the router's help."""
        return block_hashes(self.ids(messages), HashScheme(block_size=BLOCK_TOKENS))

    def ids(self, messages: list[Message]) -> list[int]:
        return self.plain.encode_batch_fast([self.text(messages)], add_special_tokens=False)[0].ids

    def body(self, path: str, messages: list[Message]) -> bytes:
        """As a client sends it."""
        prompt: dict[str, Any] = {"messages": messages} if path == CHAT else {"prompt": self.text(messages)}
        return json.dumps({"model": "m", **prompt, "stream": True, "max_tokens": 300}).encode()

    def text(self, messages: list[Message]) -> str:
        turns = [f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in messages]
        return "".join(turns) + "<|im_start|>assistant\n"

    def next_turn(self, chars: int, path: str = CHAT) -> Taken:
        """The history is held by some workers and known to the router; the last question and the answer before it are
        new to both.
        """
        messages = self.prose.chat(chars)
        self.router.hold(self.hashes(messages))
        self.router.route(path, self.body(path, messages))
        self.prose.go_on(messages)
        return self._measured(messages, path)

    def cold(self, chars: int, *, held: bool) -> Taken:
        messages = self.prose.chat(chars)
        self.router.hold(self.hashes(messages) if held else [])
        return self._measured(messages)

    def _measured(self, messages: list[Message], path: str = CHAT) -> Taken:
        body, text = self.body(path, messages), self.text(messages)
        routed: list[Prompt] = []
        took_ms = cpu_ms(lambda: routed.append(self.router.route(path, body)))
        plain_ms = cpu_ms(lambda: self.plain.encode(text, add_special_tokens=False).ids)
        expected = block_hashes(self.ids(messages), HashScheme(block_size=BLOCK_TOKENS))
        assert list(routed[0].hashes) == expected[: len(routed[0].hashes)]
        return Taken(took_ms, self.router.hashed_ms, plain_ms, len(self.ids(messages)))

    def row(self, label: str, once: Callable[[], Taken], rounds: int = 0) -> None:
        """Medians."""
        taken = [once() for _ in range(rounds or self.rounds)]
        whole, hashed = [one.whole_ms for one in taken], [one.hashed_ms for one in taken]
        plain_ms = median(one.plain_ms for one in taken)
        cells = (
            label,
            f"{median(one.tokens for one in taken):.0f}",
            f"{median(whole):.2f}",
            f"{min(whole):.2f} to {max(whole):.2f}",
            f"{median(hashed):.2f}",
            f"{min(hashed):.2f} to {max(hashed):.2f}",
            f"{plain_ms:.2f}",
            f"{plain_ms / median(whole):.1f}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    tokenizer_json = trained()
    plain = Tokenizer.from_str(tokenizer_json)
    loop = asyncio.new_event_loop()
    with ThreadPoolExecutor(1) as threads:
        begun = time.process_time()
        router = Router.made(tokenizer_json, threads, loop)
        loaded_s = time.process_time() - begun
        tune_garbage_collection()
        bench = Bench(router, plain, Prose(1), options.rounds)
        chars_per_token = 10_000 / len(plain.encode(bench.prose.text(10_000)).ids)
        print(
            "| | tokens | CPU, ms | least to most | tokens and hashes of it | least to most | `tokenizers` alone, ms | times |"
        )
        print("|---|---:|---:|---:|---:|---:|---:|---:|")
        size = round(8000 * chars_per_token)
        bench.row("the first prompt ever, all held", lambda: bench.cold(size, held=True), rounds=1)
        for _ in range(20):
            bench.cold(size, held=True)
        for count in TOKENS:
            chars = round(count * chars_per_token)
            bench.row("next turn", lambda chars=chars: bench.next_turn(chars))
            bench.row("next turn, a completion", lambda chars=chars: bench.next_turn(chars, COMPLETIONS))
            bench.row("cold, held by no worker", lambda chars=chars: bench.cold(chars, held=False))
            bench.row("cold, all held", lambda chars=chars: bench.cold(chars, held=True))
        print(f"\nLoading the tokenizer: {loaded_s:.2f} s of CPU.")
    loop.close()


if __name__ == "__main__":
    main()
