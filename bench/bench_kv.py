"""Costs and savings of the KV exchange on real engines: ``python -m bench.bench_kv [--quick] [--only handoff,...]``.

Each part starts its own engines: handoffs and the same with vLLM's own connector, batches with lost blocks, conversations and leases, conversations that engines have evicted, decoding beside long prompts, handoffs between hosts. Writes those parts of docs/benchmarks/kv.md.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench import bench_kv_bus as distant
from bench import bench_kv_busy as busy
from bench import bench_kv_evicted as evicted
from bench import bench_kv_handoff as handoffs
from bench import bench_kv_losses as losses
from bench import bench_kv_turns as turns
from bench import plain_reads
from bench.bench_kv_handoff import OFFERED, STREAMED, UPSTREAM
from bench.kv_bench_fleet import bench_fleet
from bench.kv_bench_page import Measured, measuring, ms, page, table
from bench.kv_handoff_tables import Work, handoff_lines, physics_lines
from bench.plain_reads import PlainReader
from bench.wide_model import KV_BYTES_PER_TOKEN, make_wide_model
from tests.support.kv_driver import BLOCK

COMMAND = "make bench-kv"
CACHE = Path.home() / ".cache" / "baton"
WIDE = {"served_model_name": "baton-tiny", "kv_cache_bytes": str(2**30), "max_model_len": "16384"}
CHUNK = 512
"""Tokens that a prefill engine computes in a step, and so a streamed handoff's last piece."""
CHUNKS = f"--max-num-batched-tokens {CHUNK}"
WORK = Work(KV_BYTES_PER_TOKEN, CHUNK, others="upstream's engines do not run")


@dataclass(frozen=True)
class Size:
    """Options of a run."""

    times: int
    lengths: dict[int, int]
    """Prompt lengths of handoffs, and repetitions."""
    alone: dict[int, int]
    """The same where upstream's engines do not run."""
    histories: tuple[int, ...]
    turns: int
    seconds: float
    leases: int
    batches: int
    """Of each kind, with lost blocks."""
    distant: int
    """Handoffs for each delay of the bus."""
    rounds: int
    """With evicted conversations, on each engine."""


WHOLE = Size(
    times=5,
    lengths={64: 20, 256: 12, 512: 20, 1024: 12, 2048: 12, 4096: 6, 8192: 6},
    alone={64: 20, 512: 20, 2048: 20, 8192: 6},
    histories=(500, 1000, 2000, 4000),
    turns=6,
    seconds=20.0,
    leases=300,
    batches=7,
    distant=20,
    rounds=15,
)
QUICK = Size(
    times=2,
    lengths={64: 6, 512: 6, 2048: 6},
    alone={64: 6, 512: 6},
    histories=(500, 2000),
    turns=3,
    seconds=8.0,
    leases=40,
    batches=3,
    distant=6,
    rounds=6,
)


async def measure_handoffs(size: Size) -> list[str]:
    """Handoffs beside vLLM's connector."""
    with tempfile.TemporaryDirectory() as folder:
        wide = {**WIDE, "model": str(make_wide_model(Path(folder), CACHE)), "engine_args": CHUNKS}
        plainly = {"engine_args": f"{CHUNKS} {plain_reads.ENGINE_ARGS}"}
        environ = {plain_reads.SOCKET: f"{folder}/plain-reads"}
        ours = {handoffs.P: {**wide, "role": "prefill"}, handoffs.D: {**wide, "role": "decode", **plainly}}
        theirs = {name: {**wide, "role": ours[name]["role"], "connector": "upstream"} for name in ours}
        async with bench_fleet(ours, environ=environ) as fleet, bench_fleet(theirs) as upstream:
            fleets = {STREAMED: fleet, OFFERED: fleet, UPSTREAM: upstream}
            with closing(PlainReader(environ[plain_reads.SOCKET])) as plain:
                found = await handoffs.measure(fleets, size.lengths, plain)
    return handoff_lines(found, WORK)


async def measure_losses(size: Size) -> list[str]:
    """Batches in which some requests lose KV. Upstream's engines run after Baton's have ended."""
    found: losses.Found = {}
    with tempfile.TemporaryDirectory() as folder:
        wide = {**WIDE, "model": str(make_wide_model(Path(folder), CACHE)), "engine_args": CHUNKS}
        for ways in (losses.OURS, losses.THEIRS):
            workers = {
                name: {**wide, "role": role, "connector": "baton" if ways is losses.OURS else "upstream"}
                for name, role in ((handoffs.P, "prefill"), (handoffs.D, "decode"))
            }
            async with bench_fleet(workers) as fleet:
                found |= await losses.measure(fleet, ways, size.batches)
    return losses.lines(found)


async def measure_speed(size: Size) -> list[str]:
    """Where a handoff's time goes, and its speed, without other engines on the cores: idle upstream engines keep stepping now and then."""
    with tempfile.TemporaryDirectory() as folder:
        wide = {**WIDE, "model": str(make_wide_model(Path(folder), CACHE))}
        plainly = {"engine_args": f"{CHUNKS} {plain_reads.ENGINE_ARGS}"}
        ours = {
            handoffs.P: {**wide, "role": "prefill", "engine_args": CHUNKS},
            handoffs.D: {**wide, "role": "decode", **plainly},
        }
        environ = {plain_reads.SOCKET: f"{folder}/plain-reads"}
        async with bench_fleet(ours, environ=environ) as fleet:
            with closing(PlainReader(environ[plain_reads.SOCKET])) as plain:
                found = await handoffs.measure_alone(fleet, size.alone, plain)
        async with bench_fleet({handoffs.D: {**wide, "role": "decode", "connector": "upstream"}}) as fleet:
            firsts = await handoffs.measure_first_steps(fleet, size.alone)
    return physics_lines(found, firsts, WORK)


async def measure_turns(size: Size) -> list[str]:
    """Conversations, leases and idle CPU."""
    workers = {"p1": {"role": "prefill"}, "d1": {"role": "decode"}}
    async with bench_fleet(workers, router={"fetch_tokens_min": str(BLOCK), "stream_tokens_min": "-1"}) as fleet:
        cached = await turns.measure_conversations(fleet, turns=size.turns, answer_tokens=512, times=size.times)
        leases = await busy.leases_under_load(fleet, "d1", size.leases)
        idle = await busy.idle_cpu(fleet, "d1")
        await fleet.replace("p1", "p2", role="prefill", cpu_cores="0", engine_args="--no-enable-prefix-caching")
        uncached = await turns.measure_next_turns(fleet, size.histories, size.times)
    fetched, computed = (turns.p50_ms(cached[how]) for how in (turns.FETCH, turns.COMPUTE))
    rows = [["on", "grows by 576 a turn", *turn_cells(fetched, computed, cached[turns.FETCH], cached[turns.COMPUTE])]]
    for history in size.histories:
        ways = [uncached[history, how] for how in (turns.FETCH, turns.COMPUTE)]
        rows.append(["off", history, *turn_cells(*map(turns.p50_ms, ways), *ways)])
    return [
        "## The next turn of a conversation: read-back against recompute",
        "",
        "Over HTTP and the router, disaggregated, handoffs offered. Prefix caching on: the prefill engine holds what it computed in earlier turns and",
        f"lacks the answers (512 tokens each, {size.turns} turns). Off: the prefill engine caches nothing, as if the history had been",
        "evicted or computed by another engine. The decode engine caches in both. Recompute: the same fleet, and",
        "`kv_fetch_min_tokens` in the body prevents fetching.",
        "",
        *table(
            "prefix caching | history tokens | TTFT p50 ms read-back | recompute | change | times faster | tokens fetched | computed instead",
            rows,
        ),
        "## Leases: from the request, over NATS, to the grant of 100 blocks",
        "",
        *table(
            "engine | p50 ms | p99 ms | requests",
            [
                [name, ms(busy.quantile(took, 0.5)), ms(busy.quantile(took, 0.99)), len(took)]
                for name, took in leases.items()
            ],
        ),
        "## CPU of an idle engine, worker included",
        "",
        *table("leases | % of a core", [[name, f"{used:.1%}"] for name, used in idle.items()]),
    ]


def turn_cells(fetched_ms: float, computed_ms: float, *ways: list[turns.Turn]) -> list[str]:
    fetched = median(turn.fetched for turn in ways[0])
    more = median(turn.computed for turn in ways[1]) - median(turn.computed for turn in ways[0])
    change = fetched_ms / computed_ms
    cells = [f"{fetched_ms:.1f}", f"{computed_ms:.1f}", f"{change - 1:+.1%}", f"{1 / change:.2f}"]
    return [*cells, f"{fetched:.0f}", f"{more:.0f}"]


async def measure_evicted(size: Size) -> list[str]:
    """Conversations that engines have evicted, from a store."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workers = evicted.workers_of(make_wide_model(folder, CACHE), KV_BYTES_PER_TOKEN)
        first = {worker: workers[worker] for worker in (evicted.WRITER, evicted.STORE)}
        async with bench_fleet(first, router={}, environ={"BATON_STATE_DIR": name}) as fleet:
            found = await evicted.measure(fleet, workers, folder, size.rounds)
    return evicted.lines(found, size.rounds, KV_BYTES_PER_TOKEN)


async def measure_decoding(size: Size) -> list[str]:
    """Decoding beside long prompts."""
    rows = []
    for mode, roles in (("disaggregated", ("prefill", "decode")), ("aggregated", ("both", "both"))):
        workers = {f"{role[0]}{number}": {"role": role} for number, role in enumerate(roles)}
        async with bench_fleet(workers, router={}) as fleet:
            gaps = await busy.measure_interference(fleet, mode, size.seconds)
        between = gaps.between_tokens
        cells = [ms(busy.quantile(between, part)) for part in (0.5, 0.99)]
        rows.append([mode, *cells, ms(max(between)), ms(median(gaps.long_ttft)), len(gaps.long_ttft), len(between)])
    return [
        "## Decoding while long prompts are computed",
        "",
        f"{busy.STREAMS} streams, and every {busy.LONG_EVERY_S} s a prompt of {busy.LONG_PROMPT} tokens. Two engines on the same two cores each time: one",
        "for prefill and one for decode, or two that do both.",
        "",
        *table(
            "engines | between tokens p50 ms | p99 ms | largest ms | TTFT p50 ms of the long prompts | long prompts | gaps",
            rows,
        ),
    ]


async def measure_bus(size: Size) -> list[str]:
    """Handoffs between hosts whose bus is far away. Needs a user who may make network namespaces."""
    with tempfile.TemporaryDirectory() as folder:
        wide = {**WIDE, "model": str(make_wide_model(Path(folder), CACHE))}
        # A thread of its own, since the connections of a thread are a host's.
        found = await asyncio.to_thread(distant.measure, wide, CHUNKS, size.distant)
    return distant.lines(found, CHUNK, KV_BYTES_PER_TOKEN)


PARTS: dict[str, Callable[[Size], Awaitable[list[str]]]] = {
    "handoff": measure_handoffs,
    "losses": measure_losses,
    "speed": measure_speed,
    "turns": measure_turns,
    "evicted": measure_evicted,
    "decoding": measure_decoding,
    "bus": measure_bus,
}


def head(size: Size) -> list[str]:
    return [
        "# Costs and savings of the KV exchange",
        "",
        f"`{COMMAND}`; one part alone: `{COMMAND} ARGS='--only handoff'`. Real vLLM engines on CPU, one core each, float32, blocks",
        f"of {BLOCK} tokens, NIXL over shared memory. Medians of {size.times} unless noted. Models have random weights: sizes and",
        "times matter.",
    ]


async def run(name: str, size: Size) -> Measured:
    with measuring() as measured:
        measured.lines = await PARTS[name](size)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="short runs, whose figures are not precise; written only with --out"
    )
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--out", type=Path, help="the page; without --quick docs/benchmarks/kv.md")
    arguments = parser.parse_args()
    size, measured = QUICK if arguments.quick else WHOLE, dict[str, Measured]()
    out: Path | None = arguments.out or (None if arguments.quick else Path("docs/benchmarks/kv.md"))
    text = out.read_text() if out and out.exists() else ""
    for name in arguments.only.split(","):
        measured[name] = asyncio.run(run(name, size))
        text = page(head(size), measured, list(PARTS), text)
        if out:  # Part by part, so that one that fails loses no other.
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
