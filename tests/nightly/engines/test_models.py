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
from shared.runtime.service import EXIT_CONFIGURATION
from shared.runtime.state_folder import refusals
from tests.engines.kv_pair import (
    DECODE,
    DECODE_TOKENS,
    HALF_TOKENS,
    PREFILL,
    remaining_frames,
    report_of,
    start_two_that_do_not_fit,
    tokens_of,
)
from tests.support.kv_driver import ALONE, MODEL, Driver, driving, transfer_report_of
from tests.support.kv_tap import Tap
from tests.support.lora_files import make_adapter
from tests.support.model_families import FAMILIES, WINDOW, make_model
from tests.support.nats_server import NatsServer
from tests.support.prompts import random_prompt
from tests.support.worker_processes import READY_S_MAX, Answer, WorkerProcess, start_worker, wait_ready

pytestmark = [pytest.mark.vllm, pytest.mark.nats, pytest.mark.timeout(3600)]

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
YES, NOT_HERE = "yes", "not run: needs a CPU with AVX-512"
COLUMNS = ("Handoff", "Preemption", "Resume", "Prefix hits", "Read-back", "LoRA", "fp8 KV")
ADAPTER = "adapter"
LORA_ARGS = "--max-lora-rank 8"
LENGTHS = (300, 700, 1100)
"""Of prompts: several windows, and a tail of less than a block."""
ANSWER_TOKENS = 60
"""Where an answer is interrupted."""


@dataclass(frozen=True)
class ModelCase:
    """What a row of the page proves, and why a cell has no run."""

    kv: str
    """How vLLM keeps its KV, for the page."""
    no_lookup: str = ""
    """Why this machine's engine finds no block by hash."""
    no_lora: str = ""
    no_fp8: str = ""
    refused: str = ""
    """Why the engine refuses to start."""


NO_TRITON = "not run: experts need Triton for adapters"
NO_MLA_CACHE = "not run: no prefix cache for MLA"
NO_MLA_FP8 = "not run: no fp8 for MLA"
CASES = {
    "llama": ModelCase("all layers alike"),
    "qwen3": ModelCase("all layers alike"),
    "qwen3-moe": ModelCase("all layers alike; experts", no_lora=NO_TRITON),
    "mistral": ModelCase("all layers alike"),
    "mistral-window": ModelCase("all layers with a window", refused=f"every layer attends to {WINDOW} tokens only"),
    "granite": ModelCase("all layers alike"),
    "gemma-2": ModelCase("2 of 4 layers with a window; capped attention scores"),
    "cohere-2": ModelCase("3 of 4 layers with a window"),
    "deepseek-v2": ModelCase("MLA: one latent head", no_lookup=NO_MLA_CACHE, no_lora=NO_TRITON, no_fp8=NO_MLA_FP8),
    "gemma-3": ModelCase("5 of 6 layers with a window"),
    "gemma-4": ModelCase("5 of 6 layers with a window; two block lengths"),
    "gpt-oss": ModelCase("2 of 4 layers with a window; sinks", no_lora=NO_TRITON),
    "llama-4": ModelCase("3 of 4 layers in chunks", no_lora=NO_TRITON),
}


@contextmanager
def pair(
    folder: Path, model: Path, engine_args: str = "", decode_args: str = "", **more: str
) -> Iterator[tuple[str, list[WorkerProcess]]]:
    """NATS and a prefill and a decode worker; ``more``: of their settings."""
    with NatsServer(folder, has_buckets=True) as nats:
        settings = {"model": str(model), "served_model_name": MODEL, "max_model_len": "2000", **more}
        prefill = {"role": "prefill", "cpu_cores": "0", "engine_args": engine_args}
        decode = {"role": "decode", "cpu_cores": "1", "engine_args": f"{engine_args} {decode_args}"}
        workers = [
            start_worker(nats.url, PREFILL, folder, **prefill, **settings),
            start_worker(nats.url, DECODE, folder, **decode, **settings),
        ]
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
    case, cells = CASES[family], dict.fromkeys(COLUMNS, "")
    model = make_model(family, tmp_path)
    if case.refused:
        assert_refused(tmp_path, model, case.refused)
        check_page(family, case, {**dict.fromkeys(COLUMNS, "refused"), COLUMNS[0]: f"refused: {case.refused}"})
        return
    memory = f"--num-gpu-blocks-override {DECODE_TOKENS // FAMILIES[family].block}"
    with pair(tmp_path, model, decode_args=memory) as (url, workers):
        block = block_tokens(workers)
        asyncio.run(prove_handoff(url, block))
        asyncio.run(prove_preemption(url, workers[1], refetches=not case.no_lookup))
        asyncio.run(prove_resume(url, block))
        cells["Handoff"] = cells["Preemption"] = cells["Resume"] = YES
        cells["Prefix hits"] = cells["Read-back"] = case.no_lookup or YES
        if not case.no_lookup:
            asyncio.run(prove_lookup(url, block))
    cells["LoRA"] = case.no_lora or YES
    if not case.no_lora:
        made = make_adapter(model, tmp_path / ADAPTER, seed=1)
        with pair(tmp_path, model, LORA_ARGS, lora_adapters=f"{ADAPTER}={made}") as (url, workers):
            asyncio.run(prove_adapter(url, block_tokens(workers), no_lookup=bool(case.no_lookup)))
    cells["fp8 KV"] = case.no_fp8 or (YES if can_fp8() else NOT_HERE)
    if cells["fp8 KV"] == YES:
        with pair(tmp_path, model, "--kv-cache-dtype fp8") as (url, workers):
            asyncio.run(prove_handoff(url, block_tokens(workers)))
    check_page(family, case, cells)


def can_fp8() -> bool:
    """vLLM's CPU backend has fp8 KV only where the processor has AVX-512."""
    return "avx512" in Path("/proc/cpuinfo").read_text(encoding="utf-8")


def block_tokens(workers: list[WorkerProcess]) -> int:
    sizes = {worker.record.hashing.block_size for worker in workers if worker.record is not None}
    (size,) = sizes
    return size


async def prove_handoff(url: str, block: int) -> None:
    """Whole answers and streamed ones; every full block is read and only the tail computed. The first token is the prefill
    engine's.
    """
    async with driver_on(url) as driver:
        answers = []
        for tokens in LENGTHS:
            for stream in (False, True):
                prompt = random_prompt(f"{tokens} {stream}", tokens)
                alone = await driver.alone(DECODE, prompt)
                offer = await driver.offered(PREFILL, prompt)
                answer = await driver.taken(DECODE, prompt, offer, fields={"stream": stream})
                report = transfer_report_of(answer)
                assert answer.token_ids == alone, (tokens, stream, report)
                assert report.recomputed_tokens <= block, report
                assert report.fetched_tokens >= tokens // block * block, report
                assert report.first_token_received, report
                answers.append(tuple(alone))
        assert len(set(answers)) == len(answers), "the answers do not depend on the prompts"


async def prove_preemption(url: str, decode: WorkerProcess, *, refetches: bool) -> None:
    """The decode worker's memory does not hold two requests: one is preempted, and its KV read or computed again."""
    async with driver_on(url) as driver:
        first, second = (random_prompt(f"preempted {number}", HALF_TOKENS) for number in range(2))
        expected = await driver.alone(PREFILL, second, ANSWER_TOKENS)
        hungry, victim = await start_two_that_do_not_fit(decode, driver, first, second)
        await remaining_frames(hungry)
        frames = await remaining_frames(victim)
        _leg_report, report = report_of(frames)
        assert tokens_of(frames) == expected, report
        assert report.preemptions >= 1, report
        assert bool(report.refetched_tokens) == refetches, report


async def prove_resume(url: str, block: int) -> None:
    """An answer that broke off is handed over with its tokens so far, and goes on as if it had not."""
    async with driver_on(url) as driver:
        prompt, fields = random_prompt("resumed", 500), {"stream": True, "max_tokens": ANSWER_TOKENS}
        whole = await driver.alone(DECODE, prompt, ANSWER_TOKENS)
        sent = whole[: ANSWER_TOKENS // 2]
        resume = pack_tokens(sent)
        offer = await driver.offered(PREFILL, prompt, fields=fields, resume=resume)
        rest = await driver.taken(DECODE, prompt, offer, fields=fields, resume=resume)
        assert sent + rest.token_ids == whole
        assert transfer_report_of(rest).recomputed_tokens <= block


async def prove_lookup(url: str, block: int) -> None:
    """The decode worker's own cache, and the next turn of a conversation on the prefill worker."""
    async with driver_on(url) as driver:
        first = random_prompt("turns", 500)
        said = await driver.leg(DECODE, LegKind.AGGREGATED, first, fields={"max_tokens": 3 * block})
        again = await driver.leg(DECODE, LegKind.AGGREGATED, first, fields={"max_tokens": 3 * block})
        assert again.token_ids == said.token_ids
        assert again.report.cached_tokens == len(first) // block * block

        second = first + said.token_ids + random_prompt("more", 100)
        history = (len(first) + len(said.token_ids) - 1) // block * block
        source = driver.source(DECODE)
        turn = await driver.leg(PREFILL, LegKind.AGGREGATED, second, kv_sources=[source], cache_hit_threshold=0.0)
        assert turn.token_ids == await driver.alone(PREFILL, second)
        assert transfer_report_of(turn).fetched_tokens == history


async def prove_adapter(url: str, block: int, *, no_lookup: bool) -> None:
    """A prompt of an adapter is handed over; its answers are not the model's, and neither are its cached blocks."""
    async with driver_on(url) as driver:

        async def answer(model: str, **fields: object) -> Answer:
            found = await driver.leg(DECODE, LegKind.AGGREGATED, prompt, fields={"model": model, **fields})
            assert found.token_ids, found
            return found

        prompt, tokens = random_prompt("adapter", 700), 700
        alone = (await answer(ADAPTER, cache_salt=ALONE)).token_ids
        plain = (await answer(MODEL, cache_salt=ALONE)).token_ids
        assert alone != plain
        fields = {"model": ADAPTER}
        offer = await driver.offered(PREFILL, prompt, fields=fields)
        taken = await driver.taken(DECODE, prompt, offer, fields=fields)
        assert taken.token_ids == alone
        assert transfer_report_of(taken).fetched_tokens == tokens // block * block
        if not no_lookup:
            assert (await answer(MODEL)).report.cached_tokens == 0
            again = await answer(ADAPTER)
            assert (again.report.cached_tokens, again.token_ids) == (tokens // block * block, alone)


def assert_refused(folder: Path, model: Path, why: str) -> None:
    """The worker ends with a wrong configuration, and its log and the state folder name the reason."""
    state = folder / "state"
    with NatsServer(folder, has_buckets=True) as nats:
        environ = {"BATON_STATE_DIR": str(state)}
        worker = start_worker(nats.url, PREFILL, folder, environ=environ, model=str(model), max_model_len="2000")
        try:
            assert worker.process.wait(READY_S_MAX) == EXIT_CONFIGURATION, worker.log.read_text()
        finally:
            worker.kill()
    ((reason, _at_s),) = refusals(str(state)).values()
    assert why in reason
    assert why in worker.log.read_text()


def check_page(family: str, case: ModelCase, cells: dict[str, str]) -> None:
    """The family's row is on the page; with ``REWRITE`` it is written."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [number for number, line in enumerate(lines) if line.startswith("|")]
    known = [number for number in rows if lines[number].startswith(f"| {family} |")]
    for number in known:  # What another machine has proved stays.
        written = dict(zip(COLUMNS, lines[number].strip("| ").split(" | ")[2:], strict=True))
        cells = {column: written[column] if cell == NOT_HERE else cell for column, cell in cells.items()}
    row = f"| {family} | {case.kv} | {' | '.join(cells.values())} |"
    if os.environ.get("REWRITE"):
        place = known[0] if known else rows[-1] + 1
        lines[place : place + len(known)] = [row]
        PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        assert row in lines, f"docs/models.md has no row `{row}`: REWRITE=1 writes it"
