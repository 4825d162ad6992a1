"""The one client of ``make bench-serving``: ``python -m bench.serving.client`` reads jobs, a line each, and prints results.

Random prompts are sent by ``vllm bench serve`` itself, which is imported once. Conversations are sent by this module: vLLM's
multi-turn script starts a process for each run, and measures neither shares of time between tokens nor goodput.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from bench.serving.loads import Answer, Conversations, Job, Random, Result

ANSWER_S_MAX = 120.0
RUN_S_MAX = 300.0
OWN_BEGINNING = 16
"""Tokens with which all prompts of a run begin: fewer than a block, so that they are cached for no other prompt, and other in each
run. vLLM's random prompts are successive numbers, and with a small vocabulary those of different runs would be alike.
"""
WORD = re.compile("\u0120[a-z]{3,}")
"""Of a byte-level tokenizer: a space, and letters. One token, wherever it stands."""


def words_of(tokenizer: str) -> list[str]:
    vocabulary: dict[str, int] = json.loads((Path(tokenizer) / "tokenizer.json").read_text())["model"]["vocab"]
    return sorted(token[1:] for token in vocabulary if WORD.fullmatch(token))


class Speaker:
    """Text of so many tokens."""

    def __init__(self, words: list[str], seed: str) -> None:
        self._words = words
        self._draw = random.Random(seed)

    def say(self, tokens: int) -> str:
        return " " + " ".join(self._draw.choices(self._words, k=tokens))

    def between(self, bounds: tuple[int, int]) -> int:
        return self._draw.randint(*bounds)


async def converse(job: Job, load: Conversations) -> Result:
    """All conversations, ``load.at_once`` at a time."""
    words = words_of(job.tokenizer)
    shared = Speaker(words, f"shared {job.seed}").say(load.shared_tokens)
    answers: list[Answer] = []
    waiting: Iterator[int] = iter(range(load.conversations))
    timeout = aiohttp.ClientTimeout(total=ANSWER_S_MAX)
    async with aiohttp.ClientSession(timeout=timeout, headers=job.headers) as session:

        async def talk() -> None:
            for number in waiting:
                speaker = Speaker(words, f"{job.seed} {number}")
                messages = [{"role": "system", "content": shared}]
                for turn in range(load.turns):
                    new = (load.own_tokens if turn == 0 else 0) + speaker.between(load.turn_tokens)
                    messages.append({"role": "user", "content": speaker.say(new)})
                    answer, text = await ask(session, job, messages, speaker.between(load.answer_tokens))
                    messages.append({"role": "assistant", "content": text})
                    answers.append(answer)

        begun_at = time.perf_counter()
        async with asyncio.TaskGroup() as talking:
            for _ in range(load.at_once):
                talking.create_task(talk())
        took_s = time.perf_counter() - begun_at
    return Result(answers, took_s)


async def ask(
    session: aiohttp.ClientSession, job: Job, messages: list[dict[str, str]], tokens: int
) -> tuple[Answer, str]:
    """One streamed chat completion of so many tokens. Raises RuntimeError, aiohttp.ClientError."""
    body = {
        "model": job.model, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    parts, usage, first_at, begun_at, ended_at = list[str](), {}, 0.0, time.perf_counter(), 0.0
    async with session.post(f"{job.url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = msgspec.json.decode(line[6:])
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                if said := choice["delta"].get("content"):
                    ended_at = time.perf_counter()
                    first_at = first_at or ended_at
                    parts.append(said)
    if usage.get("completion_tokens") != tokens or not first_at:
        raise RuntimeError(f"an answer with {usage.get('completion_tokens')} instead of {tokens} tokens")
    gaps_s = (ended_at - first_at) / max(1, tokens - 1)
    return Answer(first_at - begun_at, gaps_s, usage["prompt_tokens"], tokens), "".join(parts)


class VllmBench:
    """``vllm bench serve`` in this process."""

    def __init__(self) -> None:
        from vllm.benchmarks import serve
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        self._main = serve.main_async
        self._parser = FlexibleArgumentParser()
        serve.add_cli_args(self._parser)

    async def run(self, job: Job, load: Random) -> Result:
        arrivals = ["--request-rate", f"{load.per_s:.3f}"] if load.per_s else ["--max-concurrency", str(load.at_once)]
        headers = [f"{name}={value}" for name, value in job.headers.items()]
        arguments = [
            *("--backend", "openai", "--base-url", job.url, "--endpoint", "/v1/completions", "--model", job.model),
            *(
                "--tokenizer",
                job.tokenizer,
                "--dataset-name",
                "random",
                "--random-input-len",
                str(load.prompt_tokens - OWN_BEGINNING),
            ),
            *("--random-prefix-len", str(OWN_BEGINNING)),
            *("--random-output-len", str(load.answer_tokens), "--ignore-eos", "--num-prompts", str(load.requests)),
            *(*arrivals, "--seed", str(job.seed), "--temperature", "0", "--disable-tqdm", "--save-detailed"),
            *("--ready-check-timeout-sec", "0", *(["--header", *headers] if headers else [])),
        ]
        found: dict[str, Any] = await self._main(self._parser.parse_args(arguments))
        if found["completed"] != load.requests:
            why = next((error for error in found["errors"] if error), "no reason")[-300:]
            return Result([], found["duration"], f"{found['completed']} of {load.requests} requests completed: {why}")
        answers = [
            Answer(ttft_s, sum(gaps_s) / max(1, load.answer_tokens - 1), prompt_tokens, tokens)
            for ttft_s, gaps_s, prompt_tokens, tokens in zip(
                found["ttfts"], found["itls"], found["input_lens"], found["output_lens"], strict=True
            )
        ]
        short = [one.tokens for one in answers if one.tokens != load.answer_tokens]
        failed = f"answers with {short} instead of {load.answer_tokens} tokens" if short else ""
        return Result(answers, found["duration"], failed)


async def run(job: Job, bench: VllmBench) -> Result:
    try:
        async with asyncio.timeout(RUN_S_MAX):
            if isinstance(job.load, Random):
                return await bench.run(job, job.load)
            return await converse(job, job.load)
    except TimeoutError:
        return Result([], RUN_S_MAX, f"not done within {RUN_S_MAX:.0f} s")
    except ExceptionGroup as failed:
        return Result([], 0.0, repr(failed.exceptions[0]))


def main() -> None:
    with contextlib.redirect_stdout(sys.stderr):
        bench = VllmBench()
    print("ready", flush=True)
    for line in sys.stdin:
        job = msgspec.json.decode(line, type=Job)
        with contextlib.redirect_stdout(sys.stderr):
            result = asyncio.run(run(job, bench))
        print(msgspec.json.encode(result).decode(), flush=True)


if __name__ == "__main__":
    main()
