"""1P1D at twice the load of one engine, against one and two engines that do both: TTFT and TPOT by ``vllm bench serve``."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.handoffs import DISAGGREGATED
from bench.kv_bench_fleet import BenchFleet
from bench.kv_bench_page import table
from bench.seeds.engines import Engines
from services.worker.tiny_model import TINY_MODEL
from tests.outside.suite import command, last_line
from tests.outside.suites.vllm_bench import BENCH_SERVE, OFFLINE

TOKENS_OUT = 64
LOAD_SHARE = 0.45
"""The load of one engine, as a share of the requests that it completes in a second when it always has ``AT_ONCE``."""
AT_ONCE = 8
WARM_UPS, WARM_UP_SEEDS = 8, 100
"""Requests before each measurement, with prompts of their own: one that was sent before is cached, and moves no KV."""
RUN_S_MAX = 300.0
Options = dict[str, str]
ALONE: Options = {"mode": "aggregated", "decode_worker": "b1"}


@dataclass(frozen=True)
class Size:
    """Options of a run."""

    prompt_tokens: int
    requests: int
    """Of each row, at load one; twice as many at twice the load."""


@dataclass(frozen=True)
class Row:
    """One fleet under one load. Milliseconds."""

    name: str
    per_s: float
    completed: str
    ttft: tuple[float, float]
    """p50 and p99, also below."""
    tpot: tuple[float, float]
    handoffs: int
    bytes: int


async def measure(engines: Engines, size: Size) -> list[str]:
    """All rows, in the order of the table."""
    rows = []
    async with engines.fleet({"b1": "both", "b2": "both"}) as fleet:
        fastest = await serve(fleet, engines, size, ALONE, seed=1, count=2 * AT_ONCE, per_s=0.0)
        one_s = LOAD_SHARE * fastest["request_throughput"]
        for seed, (name, load, options) in enumerate(
            (
                ("one engine", 1, ALONE),
                ("one engine", 2, ALONE),
                ("two engines that do both", 2, {"mode": "aggregated"}),
            ),
            start=2,
        ):
            rows.append(await row(fleet, engines, size, name=name, load=load, one_s=one_s, options=options, seed=seed))
    async with engines.fleet({"p1": "prefill", "d1": "decode"}) as fleet:
        apart: Options = {"mode": DISAGGREGATED}
        rows.append(await row(fleet, engines, size, name="1P1D", load=2, one_s=one_s, options=apart, seed=9))
    return lines(rows, size, one_s)


async def row(
    fleet: BenchFleet, engines: Engines, size: Size, *, name: str, load: int, one_s: float, options: Options, seed: int
) -> Row:
    """One fleet under ``load`` times the load of one engine. Raises RunFailed for a request that should be handed over and
    moved no KV.
    """
    since = len(fleet.handoffs.finished)
    await serve(fleet, engines, size, options, seed=WARM_UP_SEEDS + seed, count=WARM_UPS, per_s=0.0)
    since += len(await fleet.handoffs.reported(since, WARM_UPS))
    before, count = await moved(fleet), load * size.requests
    found = await serve(fleet, engines, size, options, seed=seed, count=count, per_s=load * one_s)
    if options["mode"] == DISAGGREGATED:
        await fleet.handoffs.check(since, count)
    reads, read_bytes = (later - earlier for later, earlier in zip(await moved(fleet), before, strict=True))
    return Row(
        name=name,
        per_s=load * one_s,
        completed=f"{found['completed']} of {count}",
        ttft=(found["median_ttft_ms"], found["p99_ttft_ms"]),
        tpot=(found["median_tpot_ms"], found["p99_tpot_ms"]),
        handoffs=reads,
        bytes=read_bytes,
    )


async def moved(fleet: BenchFleet) -> tuple[int, int]:
    """Reads of KV that any worker has ended, and their bytes."""
    await fleet.tap.until_settled(*fleet.workers)
    states = [fleet.tap.exchange_state(name) for name in fleet.workers]
    return sum(one.reads_total for one in states), sum(one.read_bytes_total for one in states)


async def serve(
    fleet: BenchFleet, engines: Engines, size: Size, options: Options, *, seed: int, count: int, per_s: float
) -> dict[str, Any]:
    """The result of ``vllm bench serve``; ``per_s`` 0: ``AT_ONCE`` at a time, as fast as they go. Each ``seed`` has
    prompts of its own, so none is cached.
    """
    arrivals = ["--request-rate", f"{per_s:.3f}"] if per_s else ["--max-concurrency", str(AT_ONCE)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = [
            *(sys.executable, "-c", BENCH_SERVE, "--backend", "openai", "--base-url", str(fleet.http.base_url)),
            *("--endpoint", "/v1/completions", "--model", TINY_MODEL, "--tokenizer", str(engines.model_dir)),
            *("--dataset-name", "random", "--random-input-len", str(size.prompt_tokens)),
            *("--random-output-len", str(TOKENS_OUT), "--ignore-eos", "--num-prompts", str(count), *arrivals),
            *("--seed", str(seed), "--extra-body", json.dumps({"baton": options})),
            *("--disable-tqdm", "--save-result", "--result-dir", name, "--result-filename", "result.json"),
        ]
        log = folder / "log"
        code = await asyncio.to_thread(command, arguments, log, s_max=RUN_S_MAX, cwd=folder, env=OFFLINE)
        if code != 0:
            raise RuntimeError(f"vllm bench serve ended with {code}: {last_line(log)}")
        found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def lines(rows: list[Row], size: Size, one_s: float) -> list[str]:
    """The part of the page."""
    first, last = rows[0], rows[-1]
    cells = [
        [
            one.name,
            f"{one.per_s:.2f}",
            one.completed,
            *(f"{ms:.1f}" for ms in (*one.ttft, *one.tpot)),
            f"{one.tpot[0] / first.tpot[0] - 1:+.0%}",
            one.handoffs,
            f"{one.bytes / 1e6:.0f}",
        ]
        for one in rows
    ]
    return [
        "## 1P1D at twice the load of one engine (RFC #10818)",
        "",
        "Claim: on two A10s, one for prefill and one for decode at twice the requests of one engine had a TPOT 27 % lower,",
        "and a higher TTFT, from queueing at the prefill engine.",
        "",
        f"Our figure: TPOT p50 {last.tpot[0] / first.tpot[0] - 1:+.0%}, TTFT p50 {last.ttft[0] / first.ttft[0] - 1:+.0%} against one engine at half",
        f"the load; {last.handoffs} handoffs, {last.bytes / 1e6:.0f} MB.",
        "",
        f"`vllm bench serve`, random prompts of {size.prompt_tokens} tokens, {TOKENS_OUT} tokens each, Poisson arrivals. The load of one engine is",
        f"{one_s:.2f} requests/s, {LOAD_SHARE:.0%} of what it completes with {AT_ONCE} requests at a time. Of 1P1D, KV moved for each request.",
        "",
        *table(
            "engines | requests/s | completed | TTFT ms p50 | p99 | TPOT ms p50 | p99 | TPOT p50 to the first row | KV reads | KV MB",
            cells,
        ),
        "What differs: the thread names neither its model nor its lengths; other engines and another model, as the page's head",
        "says. On CPUs the router and the client share the engines' cores.",
    ]
