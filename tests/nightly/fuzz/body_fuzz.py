"""So many request bodies, nearly right or far too much, through all that reads them before an engine's server does."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from services.router.request.fields import read_request
from services.router.tokenize.tokenizer import PromptTokenizer
from services.router.tokenize.turns import PromptWork, Work
from services.worker.legs.body import own_body
from services.worker.legs.guard import refusal_of
from services.worker.tiny_model import ensure_tiny_tokenizer
from shared.contracts.control import TokenizerAsset
from shared.contracts.engine_paths import CHAT, COMPLETIONS
from shared.contracts.inference import LegKind
from shared.contracts.request_body import FIELDS_MAX, STEP_BYTES, VALUES_MAX
from shared.contracts.workers import HashScheme
from tests.nightly.fuzz.bus_fuzz import Campaign
from tests.nightly.fuzz.watch import OBJECTS_GROWN_MAX, Watch, memory_bytes, objects

TEMPLATE = (
    "{% for message in messages %}{{ motto }}{{ message.role ~ message.content }}{{ eos_token }}{% endfor %}"
    "{% if enable_thinking %}{{ motto * 3 }}{% endif %}"
)
CHARS_MAX = 256 * 1024
CPU_S_MAX = 2.0
"""For one body, in all threads: the largest take a tenth of that."""
LARGE_SHARE = 0.01
CHANGES_MAX = 2
RESERVED = ("eos_token", "bos_token", "pad_token", "range", "messages", "tokenize", "padding", "chat_template")
TEXTS = ("", "hello", "word " * 40, '"[{', "\\", "\u2200é\U0001f600", "a" * 3000, "x\0y")
NUMBERS = ("0", "1", "-1", "2.0", "1e400", "9" * 400, "NaN", "Infinity", '"5"', "true", "null", "[]", "{}")
NAMES = (
    *("model", "stream", "n", "best_of", "max_tokens", "echo", "tools", "documents", "cache_salt", "baton", "unknown"),
    *("reasoning_effort", "add_generation_prompt", "chat_template", "cache_hit_threshold", "prompt_embeds"),
)


class Bodies:
    """What clients send; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"bodies {seed}")

    def body(self) -> bytes:
        chance = self.random
        fields = [self._field(name) for name in chance.sample(NAMES, chance.randrange(4))]
        fields.append(('"prompt":' if chance.random() < 0.3 else '"messages":') + self._prompt())
        if chance.random() < 0.5:
            fields.append(f"{self._text('chat_template_kwargs')}:{self._variables()}")
        if chance.random() < 0.1:
            fields.append('"chat_template_kwargs":{}')
        chance.shuffle(fields)
        raw = ("{" + ",".join(fields) + "}").encode(chance.choice(("utf-8",) * 20 + ("utf-16", "utf-32", "utf-8-sig")))
        for _ in range(chance.choice((0, 0, 0, 1, CHANGES_MAX))):
            at = chance.randrange(len(raw) + 1)
            raw = raw[:at] + chance.choice((b'"', b"\\", b"[", b"}", b",", b"\xff", b"\0", b"")) + raw[at + 1 :]
        return raw

    def _field(self, name: str) -> str:
        return f"{self._text(name)}:{self._value()}"

    def _value(self) -> str:
        if self.random.random() < LARGE_SHARE:
            return self._large()
        return self.random.choice((*NUMBERS, *map(json.dumps, TEXTS)))

    def _large(self) -> str:
        count = self.random.choice((120, 900, 1100, 20_000, FIELDS_MAX))
        padding = " " * self.random.choice((0, STEP_BYTES))
        shape = self.random.randrange(4)
        if shape == 0:
            return "[" * count + padding + "]" * count
        if shape == 1:
            return '{"a":' * count + padding + "1" + "}" * count
        inside = ("[]", '"\\"["')[shape - 2]
        return "[" + f"{inside}," * count + padding + "1]"

    def _prompt(self) -> str:
        chance = self.random
        kind = chance.random()
        if kind < 0.1:
            return self._value()
        if kind < 0.3:
            return json.dumps(chance.choice(TEXTS) * chance.choice((1, 10)))
        if kind < 0.4:
            return json.dumps([chance.choice((-1, 7, 2**40)) for _ in range(chance.choice((1, 50, 5000)))])
        turns = chance.choice((0, 1, 3, 30, 2000 if chance.random() < 0.05 else 2))
        return "[" + ",".join(self._message() for _ in range(turns)) + "]"

    def _message(self) -> str:
        role = json.dumps(self.random.choice(("user", "user", "assistant", "system", "tool", "")))
        text = json.dumps(self.random.choice(TEXTS), ensure_ascii=self.random.random() < 0.5)
        content = text if self.random.random() < 0.8 else f'[{{"type":"text","text":{text}}},{self._value()}]'
        return f'{{"role":{role},"content":{content}}}'

    def _variables(self) -> str:
        names = ("motto", "enable_thinking", "add_bos_token", *RESERVED)
        chosen = self.random.sample(names, self.random.randrange(4))
        return "{" + ",".join(f"{self._text(name)}:{self._variable()}" for name in chosen) + "}"

    def _variable(self) -> str:
        return json.dumps("m" * 50_000) if self.random.random() < 0.05 else self._value()

    def _text(self, text: str) -> str:
        """As JSON, sometimes with an escape in it."""
        if self.random.random() < 0.9:
            return json.dumps(text)
        at = self.random.randrange(len(text))
        return f'"{text[:at]}\\u{ord(text[at]):04x}{text[at + 1 :]}"'


def set_variables(body: bytes) -> set[str]:
    """The variables that an engine's server would read from it."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return set()
    variables = value.get("chat_template_kwargs") if isinstance(value, dict) else None
    return set(variables) if isinstance(variables, dict) else set()


def size(value: Any) -> tuple[int, int]:
    """Objects, arrays and fields; values behind another."""
    fields = values = 0
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list | dict):
            inside = list(one.values()) if isinstance(one, dict) else one
            fields += 1 + (len(one) if isinstance(one, dict) else 0)
            values += max(0, len(one) - 1)
            waiting += inside
    return fields, values


class Readers:
    """Everything that reads a body before an engine's server does."""

    def __init__(self, folder: Path, work: PromptWork) -> None:
        tokenizer_json = (ensure_tiny_tokenizer(folder) / "tokenizer.json").read_bytes()
        asset = TokenizerAsset(
            worker_id="w1",
            epoch=1,
            tokenizer_json=tokenizer_json,
            chat_template=TEMPLATE,
            special_tokens={"eos_token": "</s>"},
        )
        scheme = HashScheme(block_size=16)
        self._tokenizer = PromptTokenizer(asset, scheme, cache_bytes_max=1 << 22, chars_max=CHARS_MAX)
        self._work = work

    async def read(self, body: bytes, campaign: Campaign) -> None:
        """Note in the campaign what is wrong."""
        begun = time.process_time()
        for path in (CHAT, COMPLETIONS):
            facts = read_request(path, body)
            prompt = None
            if facts.fault is None:
                work = Work(self._work, "t")
                prompt = await self._tokenizer.prompt(facts, lambda _block: True, work=work, loop_chars_max=4096)
            campaign.read += prompt is not None
            if prompt is not None and prompt.tokens > max(CHARS_MAX, len(body)):
                campaign.findings.append(f"{prompt.tokens} tokens of {len(body)} bytes: {body[:300]!r}")
        refused = refusal_of(body, CHAT)
        for kind in () if refused else LegKind:
            own_body(CHAT, body, kind, moves_kv=True)
        if time.process_time() - begun > CPU_S_MAX:
            campaign.findings.append(f"took {time.process_time() - begun:.1f} s: {len(body)} bytes, {body[:300]!r}")
        if refused:
            return
        campaign.heard += 1
        if taken := set_variables(body) & set(RESERVED):
            campaign.findings.append(f"an engine would get {taken}: {body[:300]!r}")
        if len(body) > STEP_BYTES:
            self._check_size(body, campaign)

    def _check_size(self, body: bytes, campaign: Campaign) -> None:
        try:
            fields, values = size(json.loads(body))
        except (ValueError, RecursionError):
            return
        if fields > FIELDS_MAX or values > VALUES_MAX:
            campaign.findings.append(f"an engine would get {fields} fields and {values} values: {body[:300]!r}")


async def fuzz(folder: Path, count: int, seed: int, progress: Callable[[str, int], None]) -> Campaign:
    """``count`` bodies."""
    campaign, bodies = Campaign("bodies"), Bodies(seed)
    with ThreadPoolExecutor(1) as quick, ThreadPoolExecutor(1) as slow, Watch() as watch:
        readers = Readers(folder, PromptWork(quick, slow))
        before, bytes_before = objects(), memory_bytes()
        for at in range(count):
            await readers.read(bodies.body(), campaign)
            campaign.sent += 1
            if at % 1000 == 0:
                progress(campaign.name, campaign.sent)
        campaign.findings += watch.findings
        campaign.objects_grown, campaign.bytes_grown = objects() - before, memory_bytes() - bytes_before
    if campaign.objects_grown > OBJECTS_GROWN_MAX:
        campaign.findings.append(f"{campaign.objects_grown} more objects than before")
    return campaign


def fuzz_bodies(count: int, seed: int, progress: Callable[[str, int], None]) -> Campaign:
    """In real time: the threads take it."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(fuzz(Path(folder), count, seed, progress))
