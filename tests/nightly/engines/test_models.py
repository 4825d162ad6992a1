"""Models of many families with tiny random weights on real engines: what a decode worker answers after a handoff is what one
engine answers that computed everything itself. The results are the rows of docs/models.md, which ``REWRITE=1`` writes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.contracts.inference import LegKind, pack_tokens
from shared.contracts.kv_exchange import KvGroupKind
from shared.contracts.workers import HashScheme
from tests.engines.kv_boundaries import (
    Forge,
    from_own_cache,
    left_out,
    lengths,
    of_another_position,
    prove_controls,
    prove_handoffs,
    prove_too_short,
)
from tests.engines.kv_pair import (
    DECODE,
    HALF_TOKENS,
    LEN_MAX,
    PREFILL,
    decode_memory,
    remaining_frames,
    report_of,
    start_two_that_do_not_fit,
    tokens_of,
)
from tests.support.drafters import Drafting
from tests.support.kv_driver import ALONE, MODEL, Driver, driving, transfer_report_of
from tests.support.kv_tap import Tap
from tests.support.lora_files import make_adapter
from tests.support.model_families import FAMILIES, make_model
from tests.support.nats_server import NatsServer
from tests.support.prompts import random_prompt
from tests.support.worker_processes import Answer, WorkerProcess, start_worker, wait_ready

pytestmark = [pytest.mark.vllm, pytest.mark.nats, pytest.mark.timeout(3600)]

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
YES, NOT_HERE = "yes", "not run: needs a CPU with AVX-512"
COLUMNS = ("Handoff", "Preemption", "Resume", "Prefix hits", "Read-back", "LoRA", "fp8 KV")
ADAPTER = "adapter"
LORA_ARGS = "--max-lora-rank 8"
LENGTHS = (300, 700, 1100)
"""Of prompts: several windows, and a tail of less than a block."""
ANSWER_TOKENS = 60
"""Half of them are sent before an answer breaks off."""
ANSWERED = 300
"""Tokens of a conversation's first answer: more than an engine computes between two states that it keeps."""
Control = tuple[KvGroupKind, tuple[Forge, ...]]


@dataclass(frozen=True)
class ModelCase:
    """What a row of the page proves, and why a cell has no run."""

    kv: str
    """How vLLM keeps its KV, for the page."""
    no_lookup: str = ""
    """Why this machine's engine finds no block by hash."""
    no_preemption: str = ""
    no_lora: str = ""
    no_fp8: str = ""
    controls: tuple[Control, ...] = ()
    """Wrong blocks that must be seen in the answer."""
    family: str = ""
    """If the row is not named after it."""
    stages: int = 1
    """Pipeline stages of the prefill engine; the decode engine has one."""
    ranks: int = 1
    """Workers of the data parallel group that hands over; the decode worker is in none."""
    drafts: str = ""
    """How both engines draft."""

    def made(self, row: str, folder: Path) -> tuple[Path, str]:
        """A tiny model for the row of that name, made below ``folder``, and what its engines need beside it."""
        if self.drafts:
            drafting = Drafting.by(self.drafts, folder)
            return drafting.model, drafting.engine_args
        return make_model(self.family or row, folder), ""


WINDOW_CONTROL = (KvGroupKind.WINDOW, (left_out,))
STATE_CONTROL = (KvGroupKind.STATE, (left_out, of_another_position))
NO_TRITON = "not run: experts need Triton for adapters"
NO_MLA_CACHE = "not run: no prefix cache for MLA"
NO_MLA_FP8 = "not run: no fp8 for MLA"
WINDOWS_ALONE = "not run: requests hold their windows only"
ROUNDS = "not run: bfloat16 rounds otherwise in each batch"
DIFFERS = "not run: vLLM on a CPU answers two at once unlike one alone"
"""Two LFM2 requests at once in vLLM 0.32 alone, float32: other tokens than each alone from the 14th and 5th on, without
prefix caching from the 4th and 15th, where log probabilities of the likeliest token differ by 0.03 to 0.17. Two of a
Llama are equal.
"""
NOT_TRIED = "not run"
CASES = {
    "llama": ModelCase("all layers alike"),
    "qwen3": ModelCase("all layers alike"),
    "qwen3-moe": ModelCase("all layers alike; experts", no_lora=NO_TRITON),
    "mistral": ModelCase("all layers alike"),
    "mistral-window": ModelCase("all layers with a window", no_preemption=WINDOWS_ALONE, controls=(WINDOW_CONTROL,)),
    "granite": ModelCase("all layers alike"),
    # Its answer does not depend on the oldest block of the window, with four layers and with six.
    "gemma-2": ModelCase("2 of 4 layers with a window; capped attention scores"),
    "cohere-2": ModelCase("3 of 4 layers with a window", controls=(WINDOW_CONTROL,)),
    "deepseek-v2": ModelCase("MLA: one latent head", no_lookup=NO_MLA_CACHE, no_lora=NO_TRITON, no_fp8=NO_MLA_FP8),
    "gemma-3": ModelCase("5 of 6 layers with a window", controls=(WINDOW_CONTROL,)),
    "gemma-3-stages": ModelCase(
        "as gemma-3; two pipeline stages hand over to one engine without",
        controls=(WINDOW_CONTROL,),
        family="gemma-3",
        stages=2,
    ),
    "llama-draft": ModelCase("all layers alike; with those of a draft model", family="llama", drafts="draft"),
    "llama-ngram": ModelCase("all layers alike; drafts from the text before", family="llama", drafts="ngram"),
    "llama-eagle": ModelCase("all layers alike; with that of an EAGLE head", family="llama", drafts="eagle"),
    "mimo-mtp": ModelCase("all layers alike; with an MTP layer", family="llama", drafts="mtp"),
    "qwen3-moe-ranks": ModelCase(
        "as qwen3-moe; a rank of a data parallel group of two hands over to an engine of its own",
        no_lora=NO_TRITON,
        family="qwen3-moe",
        ranks=2,
    ),
    "gemma-4": ModelCase("5 of 6 layers with a window; two block lengths", controls=(WINDOW_CONTROL,)),
    "gpt-oss": ModelCase("2 of 4 layers with a window; sinks", no_lora=NO_TRITON, controls=(WINDOW_CONTROL,)),
    "llama-4": ModelCase("3 of 4 layers in chunks", no_lora=NO_TRITON),
    "qwen3-next": ModelCase(
        "3 of 4 layers are gated delta nets; experts",
        no_preemption=ROUNDS,
        no_lora=NO_TRITON,
        controls=(STATE_CONTROL,),
    ),
    "granite-4": ModelCase("2 of 4 layers are Mamba 2; experts", no_lora=NO_TRITON, controls=(STATE_CONTROL,)),
    "nemotron-h": ModelCase("2 of 4 layers are Mamba 2", no_lora=NO_TRITON, controls=(STATE_CONTROL,)),
    "falcon-h1": ModelCase("each layer has attention and Mamba 2", controls=(STATE_CONTROL,)),
    "lfm2": ModelCase("2 of 4 layers are short convolutions", no_preemption=DIFFERS, controls=(STATE_CONTROL,)),
}


@contextmanager
def pair(
    folder: Path, case: ModelCase, model: Path, engine_args: str = "", decode_args: str = "", **more: str
) -> Iterator[tuple[str, list[WorkerProcess]]]:
    """NATS and a prefill and a decode worker, between them what belongs to the first; ``more``: of their settings."""
    with NatsServer(folder, has_buckets=True) as nats:
        settings = {"model": str(model), "served_model_name": MODEL, "max_model_len": str(LEN_MAX), **more}
        cores = {"cpu_cores": ",".join(map(str, range(case.stages))), "pipeline_parallel_size": str(case.stages)}
        prefill = {"role": "prefill", "engine_args": engine_args, **cores}
        decode = {"role": "decode", "cpu_cores": "1", "engine_args": f"{engine_args} {decode_args}"}
        workers = [start_worker(nats.url, DECODE, folder, **decode, **settings)]
        group = {"data_parallel_size": str(case.ranks), "data_parallel_group": str(folder)} if case.ranks > 1 else {}
        for rank in reversed(range(case.ranks)):
            name, place = (f"{PREFILL}-{rank}", {"data_parallel_rank": str(rank)}) if rank else (PREFILL, {})
            workers.insert(0, start_worker(nats.url, name, folder, **prefill, **settings, **group, **place))
        try:
            asyncio.run(wait_ready(nats.url, workers))
            yield nats.url, workers
        finally:
            for worker in workers:
                worker.kill()


@asynccontextmanager
async def driver_on(url: str) -> AsyncIterator[Driver]:
    async with Tap(url) as tap, driving(tap) as driver:
        await tap.until(lambda: {PREFILL, DECODE} <= tap.loads.keys(), "both workers report")
        yield driver


@pytest.mark.parametrize("family", CASES)
def test_a_family_answers_the_same_after_a_handoff(family: str, tmp_path: Path):
    case = CASES[family]
    with pair(tmp_path, case, *case.made(family, tmp_path)) as (url, workers):
        hashing = hashing_of(workers)
        asyncio.run(prove_handoff(url, hashing, case))
        asyncio.run(prove_resume(url, hashing, case))
        if not case.no_lookup:
            asyncio.run(prove_lookup(url, hashing))
    looked_up = case.no_lookup or YES
    check_page(family, {"Handoff": YES, "Resume": YES, "Prefix hits": looked_up, "Read-back": looked_up})


@pytest.mark.parametrize("family", CASES)
def test_a_preempted_request_answers_the_same(family: str, tmp_path: Path):
    case = CASES[family]
    memory = decode_memory(FAMILIES[case.family or family])
    if not case.no_preemption:
        with pair(tmp_path, case, *case.made(family, tmp_path), memory) as (url, workers):
            asyncio.run(prove_preemption(url, workers[-1], refetches=not case.no_lookup))
    check_page(family, {"Preemption": case.no_preemption or YES})


@pytest.mark.parametrize("family", CASES)
def test_a_prompt_of_an_adapter_is_handed_over(family: str, tmp_path: Path):
    case = CASES[family]
    if not case.no_lora:
        model, engine_args = case.made(family, tmp_path)
        made = make_adapter(model, tmp_path / ADAPTER, seed=1)
        arguments = f"{engine_args} {LORA_ARGS}"
        with pair(tmp_path, case, model, arguments, lora_adapters=f"{ADAPTER}={made}") as (url, workers):
            asyncio.run(prove_adapter(url, hashing_of(workers), no_lookup=bool(case.no_lookup)))
    check_page(family, {"LoRA": case.no_lora or YES})


@pytest.mark.parametrize("family", CASES)
def test_kv_in_fp8_is_handed_over(family: str, tmp_path: Path):
    case = CASES[family]
    cell = case.no_fp8 or (YES if can_fp8() else NOT_HERE)
    if cell == YES:
        model, engine_args = case.made(family, tmp_path)
        with pair(tmp_path, case, model, f"{engine_args} --kv-cache-dtype fp8") as (url, workers):
            asyncio.run(prove_handoff(url, hashing_of(workers), case))
    check_page(family, {"fp8 KV": cell})


def can_fp8() -> bool:
    """vLLM's CPU backend has fp8 KV only where the processor has AVX-512."""
    return "avx512" in Path("/proc/cpuinfo").read_text(encoding="utf-8")


def hashing_of(workers: list[WorkerProcess]) -> HashScheme:
    first, *others = [worker.record.hashing for worker in workers if worker.record is not None]
    assert others == [first] * len(others)
    return first


async def prove_handoff(url: str, hashing: HashScheme, case: ModelCase) -> None:
    """Offered and streamed; every tail is computed from the boundary, and the bytes read are exactly what it needs. The first
    token is the prefill engine's. A wrong block is seen in the answer.
    """
    async with driver_on(url) as driver:
        about = [length for tokens in LENGTHS for length in lengths(hashing, tokens)]
        await prove_handoffs(driver, hashing, about, looks_up=not case.no_lookup)
        if hashing.boundaries:
            await prove_too_short(driver, hashing)
        for kind, forges in case.controls:
            await prove_controls(driver, hashing, kind, forges)


async def prove_preemption(url: str, decode: WorkerProcess, *, refetches: bool) -> None:
    """The decode worker's memory does not hold two requests: one is preempted, the second one or, if that waits for memory,
    the first. Its KV is read or computed again.
    """
    async with driver_on(url) as driver:
        prompts = [random_prompt(f"preempted {number}", HALF_TOKENS) for number in range(2)]
        reports = []
        for prompt, leg in zip(prompts, await start_two_that_do_not_fit(decode, driver, *prompts), strict=True):
            frames = await remaining_frames(leg)
            answer = tokens_of(frames)
            own = await driver.leg(PREFILL, LegKind.AGGREGATED, prompt, fields={"max_tokens": len(answer)})
            assert answer == own.token_ids
            reports.append(report_of(frames)[1])
        print(f"\n{reports}")
        preempted = [report for report in reports if report.preemptions]
        assert preempted
        assert any(report.refetched_tokens for report in preempted) == refetches


async def prove_resume(url: str, hashing: HashScheme, case: ModelCase) -> None:
    """An answer that broke off is handed over with its tokens so far, and goes on as an engine goes on from its cache."""
    async with driver_on(url) as driver:
        prompt, fields = random_prompt("resumed", 500), {"stream": True, "max_tokens": ANSWER_TOKENS}
        whole = await driver.alone(DECODE, prompt, ANSWER_TOKENS)
        sent, rest = whole[: ANSWER_TOKENS // 2], whole[ANSWER_TOKENS // 2 :]
        resume = pack_tokens(sent)
        offer = await driver.offered(PREFILL, prompt, fields=fields, resume=resume)
        resumed = await driver.taken(DECODE, prompt, offer, fields=fields, resume=resume)
        if not case.no_lookup:
            rest = await from_own_cache(driver, PREFILL, prompt + sent, hashing, len(rest))
        assert resumed.token_ids == rest
        assert transfer_report_of(resumed).recomputed_tokens <= hashing.align


async def prove_lookup(url: str, hashing: HashScheme) -> None:
    """The decode worker's own cache, and the next turn of a conversation on the prefill worker."""
    async with driver_on(url) as driver:
        first, said = random_prompt("turns", 500), {"max_tokens": ANSWERED}
        answer = await driver.leg(DECODE, LegKind.AGGREGATED, first, fields=said)
        again = await driver.leg(DECODE, LegKind.AGGREGATED, first, fields=said)
        assert again.report.cached_tokens == hashing.usable(len(first))
        assert len(again.token_ids) == len(answer.token_ids) == ANSWERED

        second = first + again.token_ids + random_prompt("more", 100)
        source = driver.source(DECODE)
        turn = await driver.leg(PREFILL, LegKind.AGGREGATED, second, kv_sources=[source], cache_hit_threshold=0.0)
        own = await driver.leg(DECODE, LegKind.AGGREGATED, second)
        assert turn.token_ids == own.token_ids
        fetched = transfer_report_of(turn).fetched_tokens
        assert fetched == own.report.cached_tokens + hashing.dropped, "what the engine finds itself, it lends"
        assert fetched > hashing.usable(len(first)), "some of the answer is read back"


async def prove_adapter(url: str, hashing: HashScheme, *, no_lookup: bool) -> None:
    """A prompt of an adapter is handed over; its answers are not the model's, and neither are its cached blocks."""
    async with driver_on(url) as driver:

        async def answer(model: str, **fields: object) -> Answer:
            found = await driver.leg(DECODE, LegKind.AGGREGATED, prompt, fields={"model": model, **fields})
            assert found.token_ids, found
            return found

        prompt = random_prompt("adapter", 700)
        usable, handed_over = hashing.usable(len(prompt)), hashing.handed_over(len(prompt))
        alone = (await answer(ADAPTER, cache_salt=ALONE)).token_ids
        plain = (await answer(MODEL, cache_salt=ALONE)).token_ids
        assert alone != plain
        fields = {"model": ADAPTER}
        offer = await driver.offered(PREFILL, prompt, fields=fields)
        taken = await driver.taken(DECODE, prompt, offer, fields=fields)
        assert taken.token_ids == alone
        assert transfer_report_of(taken).fetched_tokens == handed_over
        if not no_lookup:
            assert (await answer(MODEL)).report.cached_tokens == 0
            again = await answer(ADAPTER)
            assert (again.report.cached_tokens, again.token_ids) == (usable, alone)


def check_page(family: str, cells: dict[str, str]) -> None:
    """These cells of the family's row are on the page; with ``REWRITE`` they are written."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [number for number, line in enumerate(lines) if line.startswith("|")]
    known = [number for number in rows if lines[number].startswith(f"| {family} |")]
    written = dict.fromkeys(COLUMNS, NOT_TRIED)
    for number in known:
        written = dict(zip(COLUMNS, lines[number].strip("| ").split(" | ")[2:], strict=True))
    # What another machine has proved stays.
    cells = {column: written[column] if cell == NOT_HERE else cell for column, cell in cells.items()}
    row = f"| {family} | {CASES[family].kv} | {' | '.join((written | cells).values())} |"
    if os.environ.get("REWRITE"):
        place = known[0] if known else rows[-1] + 1
        lines[place : place + len(known)] = [row]
        PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        assert row in lines, f"docs/models.md has no row `{row}`: REWRITE=1 writes it"
