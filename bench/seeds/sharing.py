"""Prompts that begin alike, on a fleet: ``python -m bench.seeds.sharing [--quick] [--engines simulated,cpu]``. Writes
docs/benchmarks/sharing.md, part by part.

Clients ask in a closed loop, each for prompts of random groups; prompts of a group begin alike. Simulated engines run in
virtual time, with the router's own placement and admission and with others; CPU engines are vLLM's behind a router.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx

from bench.kv_bench_fleet import BenchFleet, Prompts, bench_fleet
from bench.kv_bench_page import Measured, commit, measuring, page, table
from bench.policies import BATON_DEFAULT, systems
from bench.policies.base import PolicyContext
from bench.policies.world import PolicyWorld
from bench.wide_model import make_wide_model
from replay.legs import Leg, ReplayedRequest
from replay.profile import profile_like
from replay.split import Split
from replay.traces import Request
from shared.runtime.settings import load_common

SHARES = (0.0, 0.5, 0.7, 0.9)
BLOCK = 32
MIDDLE = (0.15, 0.85)
"""Of all answers, in the order of their ends, those that count: not the first with empty caches, nor the last with idle
clients.
"""
SAMPLE_S = 0.25
REPORTED_S = 1.5
"""Until workers have reported all that they computed."""
PAGE = Path("docs/benchmarks/sharing.md")
SIMULATED, CPU = "simulated", "cpu"


@dataclass(frozen=True, kw_only=True)
class Load:
    """What clients ask for."""

    name: str
    prompt_tokens: int
    answer_tokens: int
    groups: int
    """Beginnings that prompts share."""
    clients: int
    asked: int
    """Requests of each client."""

    def shared_tokens(self, share: float) -> int:
        """Full blocks only: a block that differs in its last token is another one."""
        return int(share * self.prompt_tokens) // BLOCK * BLOCK


@dataclass
class Found:
    """What one run gave."""

    requests_per_s: float
    computed: float
    """Share of the prompt tokens that engines computed: not cached, and not fetched."""
    ttft_s: list[float]
    kv_used: list[float]
    """Share of the engines' KV blocks in use, at regular instants."""


def middle(ends: Sequence[float]) -> tuple[float, float, float]:
    """When the answers that count begin and end, and how many come in a second meanwhile."""
    ordered = sorted(ends)
    first, last = (int(share * (len(ordered) - 1)) for share in MIDDLE)
    begun_at, ended_at = ordered[first], ordered[last]
    return begun_at, ended_at, (last - first) / (ended_at - begun_at)


# ---- simulated engines, in virtual time

WORKERS = 4
KV_BLOCKS = 1024
"""Of one engine: 32,768 tokens, 15 whole requests of the prefill-heavy load."""
PREFILL_HEAVY = Load(
    name="prefill-heavy", prompt_tokens=2048, answer_tokens=32, groups=32, clients=WORKERS * 24, asked=40
)
DECODE_HEAVY = Load(
    name="decode-heavy", prompt_tokens=256, answer_tokens=512, groups=32, clients=WORKERS * 48, asked=12
)
ROUND_ROBIN, LEAST = "round-robin", "least-loaded"
COUNTED_WHOLE = "counted whole"
PLACEMENTS = {
    ROUND_ROBIN: "in turns",
    LEAST: "fewest requests",
    COUNTED_WHOLE: "Baton, shared blocks counted for each request",
    BATON_DEFAULT: "Baton",
}


class CountedWhole(PolicyWorld):
    """Its router does not know which blocks running requests share."""

    def _start(self, leg: Leg, now: float) -> None:
        leg.sent.hashes = ()
        super()._start(leg, now)


def requests_of(load: Load, share: float, seed: int) -> list[Request]:
    """In the order of the clients: each sends its next request when it has its answer."""
    draw, unique = random.Random(seed), count(1 << 40)
    shared = load.shared_tokens(share) // BLOCK
    made = []
    for client in range(load.clients):
        for number in range(load.asked):
            group = draw.randrange(load.groups)
            blocks = [group * 4096 + index for index in range(shared)]
            blocks += [next(unique) for _ in range(load.prompt_tokens // BLOCK - shared)]
            made.append(
                Request(
                    at_s=client * 0.01,
                    blocks=tuple(blocks),
                    input_tokens=load.prompt_tokens + 5,
                    output_tokens=load.answer_tokens,
                    session=client,
                    gap_s=0.0 if number else None,
                )
            )
    return made


def simulate(load: Load, share: float, placement: str, seed: int = 1) -> Found:
    profile = replace(profile_like("8b", KV_BLOCKS), block_tokens=BLOCK)
    world = (CountedWhole if placement == COUNTED_WHOLE else PolicyWorld)(Split(both=WORKERS), profile, seed=seed)
    context = PolicyContext(
        fleet=world.fleet, counts=world.counts, profile=profile, slo_ttft_s=math.inf, slo_itl_s=math.inf, seed=seed
    )
    systems.install(world, BATON_DEFAULT if placement == COUNTED_WHOLE else placement, context)
    requests, used = requests_of(load, share, seed), list[tuple[float, float]]()

    def look(now: float) -> None:
        pools = [worker.engine.pool for worker in world.workers.values()]
        used.append((now, fmean(1.0 - pool.free / pool.blocks for pool in pools)))
        if any(worker.legs for worker in world.workers.values()):
            world.at(now + SAMPLE_S, look)

    world.at(SAMPLE_S, look)
    answered = [one for one in world.run(requests) if one.finished_at is not None]
    assert len(answered) == len(requests), f"{len(requests) - len(answered)} requests were refused"
    return found_of(answered, used)


def found_of(answered: Sequence[ReplayedRequest], used: Sequence[tuple[float, float]]) -> Found:
    begun_at, ended_at, per_s = middle([one.finished_at or 0.0 for one in answered])
    counted = [one for one in answered if begun_at < (one.finished_at or 0.0) <= ended_at]
    return Found(
        requests_per_s=per_s,
        computed=1.0 - fmean((one.cached_tokens + one.fetched_tokens) / one.request.input_tokens for one in counted),
        ttft_s=[one.ttft_s for one in counted],
        kv_used=[share for at, share in used if begun_at < at <= ended_at],
    )


def measure_simulated(*, quick: bool) -> list[str]:
    lines = [
        "## Simulated engines, in virtual time",
        "",
        f"{WORKERS} engines with the speeds of an 8-billion-parameter model on one H100 and KV for {KV_BLOCKS * BLOCK:,} tokens",
        "each. Requests wait in the router (Baton) or at their engines (the other two).",
        "",
    ]
    for load in (PREFILL_HEAVY, DECODE_HEAVY):
        sized = replace(load, asked=load.asked // 4) if quick else load
        found = {(share, placement): simulate(sized, share, placement) for share in SHARES for placement in PLACEMENTS}
        lines += [*said_of(sized), *table_of(found, PLACEMENTS, ROUND_ROBIN)]
    return lines


# ---- vLLM on CPUs

CPU_LOAD = Load(name="prefill-heavy", prompt_tokens=512, answer_tokens=8, groups=12, clients=16, asked=12)
CPU_KV_BYTES = 2**27
CPU_WORKERS = ("w1", "w2")
IN_TURNS, BATON = "in turns", "Baton"
NEVER = 1 << 30


async def ask(fleet: BenchFleet, prompt: list[int], tokens: int, worker: str) -> tuple[float, float]:
    """When the answer ended, and the time to its first token. ``worker``: named by the client; empty: placed by the
    router.
    """
    placed: dict[str, Any] = {}
    if worker:
        placed = {"baton": {"mode": "aggregated", "decode_worker": worker, "sources": []}, "kv_fetch_min_tokens": NEVER}
    body = {
        "model": "baton-tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, **placed,
    }  # fmt: skip
    begun_at, first_at = time.monotonic(), 0.0
    async with fleet.http.stream("POST", "/v1/completions", json=body) as said:
        assert said.status_code == 200, await said.aread()
        async for line in said.aiter_lines():
            if line.startswith("data: {"):
                first_at = first_at or time.monotonic()
    return time.monotonic(), first_at - begun_at


async def serve(fleet: BenchFleet, load: Load, share: float, placement: str, prompts: Prompts) -> Found:
    """Each run has beginnings of its own, so that nothing is cached at its start."""
    draw, turns = random.Random(7), count()
    beginnings = [prompts.new(load.shared_tokens(share)) for _ in range(load.groups)]
    answers: list[tuple[float, float]] = []
    used: list[tuple[float, float]] = []

    async def client() -> None:
        for _ in range(load.asked):
            beginning = draw.choice(beginnings)
            prompt = beginning + prompts.new(load.prompt_tokens + 5 - len(beginning))
            worker = CPU_WORKERS[next(turns) % len(CPU_WORKERS)] if placement == IN_TURNS else ""
            answers.append(await ask(fleet, prompt, load.answer_tokens, worker))

    async def look() -> None:
        while True:
            loads = [fleet.tap.loads[name] for name in CPU_WORKERS]
            used.append((time.monotonic(), fmean(one.kv_used for one in loads)))
            await asyncio.sleep(SAMPLE_S)

    def computed() -> int:
        return sum(fleet.tap.loads[name].computed_tokens_total for name in CPU_WORKERS)

    computed_before = computed()
    looking = asyncio.create_task(look())
    async with asyncio.TaskGroup() as clients:
        for _ in range(load.clients):
            clients.create_task(client())
    looking.cancel()
    await asyncio.sleep(REPORTED_S)
    begun_at, ended_at, per_s = middle([end for end, _ttft in answers])
    return Found(
        requests_per_s=per_s,
        computed=(computed() - computed_before) / (len(answers) * (load.prompt_tokens + 5)),
        ttft_s=[ttft_s for end, ttft_s in answers if begun_at < end <= ended_at],
        kv_used=[one for at, one in used if begun_at < at <= ended_at],
    )


async def measure_cpu(*, quick: bool) -> list[str]:
    load = replace(CPU_LOAD, asked=3) if quick else CPU_LOAD
    shares = (0.0, 0.7) if quick else SHARES
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_wide_model(Path(folder), Path(load_common().cache_dir)))
        settings = {
            "role": "both", "model": model, "served_model_name": "baton-tiny",
            "kv_cache_bytes": str(CPU_KV_BYTES), "max_model_len": "1024",
        }  # fmt: skip
        async with bench_fleet(dict.fromkeys(CPU_WORKERS, settings), router={}) as fleet:
            fleet.http.timeout = httpx.Timeout(600.0)
            prompts, found = Prompts(3), {}
            for share in shares:
                for placement in (IN_TURNS, BATON):
                    found[share, placement] = await serve(fleet, load, share, placement, prompts)
            tokens = fleet.tap.loads[CPU_WORKERS[0]].kv_tokens_total
    return [
        "## vLLM on CPUs",
        "",
        f"{len(CPU_WORKERS)} engines, each on a core of its own, with KV for {tokens:,} tokens each; a model with random",
        "weights. Without Baton's placement the client names the workers in turns, and nothing is fetched.",
        "",
        *said_of(load),
        *table_of(found, {IN_TURNS: IN_TURNS, BATON: BATON}, IN_TURNS),
    ]


# ---- the page


def said_of(load: Load) -> list[str]:
    return [
        f"**{load.name.capitalize()}**: prompts of {load.prompt_tokens:,} tokens in {load.groups} groups, answers of",
        f"{load.answer_tokens}, {load.clients} clients in a closed loop, {load.clients * load.asked:,} requests.",
        "",
    ]


def table_of(found: dict[tuple[float, str], Found], placements: dict[str, str], base: str) -> list[str]:
    """A row for each share and placement, with the gain over ``base`` at this share and over no sharing."""
    rows: list[list[object]] = []
    for (share, placement), one in found.items():
        ttft_s = sorted(one.ttft_s)
        rows.append([
            f"{share:.0%}", placements[placement], f"{one.requests_per_s:.2f}",
            gain(one, found[share, base]), gain(one, found[0.0, placement]),
            f"{one.computed:.0%}", f"{ttft_s[len(ttft_s) // 2]:.2f}", f"{ttft_s[len(ttft_s) * 95 // 100]:.2f}",
            f"{fmean(one.kv_used):.0%}", f"{max(one.kv_used):.0%}",
        ])  # fmt: skip
    head = (
        f"shared | placement | requests/s | over {placements[base]} | over no sharing | computed | TTFT p50, s | p95"
        " | KV used | most"
    )
    return table(head, rows)


def gain(one: Found, other: Found) -> str:
    return f"{one.requests_per_s / other.requests_per_s - 1.0:+.0%}" if one is not other else ""


HEAD = [
    "# Prompts that begin alike",
    "",
    "`python -m bench.seeds.sharing`. [rickyyx/vllm#1](https://github.com/rickyyx/vllm/pull/1) counts only tokens that",
    "must be computed when it admits a request to an engine, and claims 20 to 30 % more throughput at 70 % sharing where",
    "prompts dominate, more than 90 % of KV in use, and little where answers dominate. vLLM does so inside of an engine;",
    "here is what placement adds over a fleet: requests go where their beginning is cached, and blocks that running requests",
    "share count once in the free KV that a request needs. *Computed*: of all prompt tokens; the others were cached or",
    "fetched. *KV used*: mean over engines and time.",
]


def parts(names: Sequence[str], *, quick: bool) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    measures: dict[str, Callable[[], list[str]]] = {
        SIMULATED: lambda: measure_simulated(quick=quick),
        CPU: lambda: asyncio.run(measure_cpu(quick=quick)),
    }
    yield from ((name, measures[name]) for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short runs; their figures are not precise")
    parser.add_argument("--engines", default=SIMULATED, help="simulated, cpu, or both with a comma between")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page")
    arguments = parser.parse_args()
    names = arguments.engines.split(",")
    if unknown := set(names) - {SIMULATED, CPU}:
        parser.error(f"no engines are called {', '.join(sorted(unknown))}; there are {SIMULATED} and {CPU}")
    text = arguments.out.read_text() if arguments.out.exists() else ""
    for name, measure in parts(names, quick=arguments.quick):
        with measuring() as measured:
            short = "Short form: not precise.\n" if arguments.quick else ""
            measured.said = f"{short}{measured.said} Commit {commit()}."
            measured.lines = measure()
        done: dict[str, Measured] = {name: measured}
        text = page(HEAD, done, [SIMULATED, CPU], text)
        arguments.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
