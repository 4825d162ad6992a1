"""Costs and savings of the KV exchange on real engines: ``python -m bench.bench_kv [--quick] [--only handoff,...]``.

Each part starts its own engines: handoffs (and batches with lost blocks) and the same with vLLM's own connector,
conversations and leases, decoding beside long prompts. Writes those parts of docs/benchmarks/kv.md.
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

from bench import bench_kv_busy as busy
from bench import bench_kv_handoff as handoffs
from bench import bench_kv_turns as turns
from bench import plain_reads
from bench.bench_kv_handoff import OFFERED, STREAMED, UPSTREAM, Handoff
from bench.kv_bench_fleet import bench_fleet
from bench.kv_bench_page import Measured, measuring, ms, page, table, with_interval
from bench.plain_reads import PlainReader
from bench.wide_model import KV_BYTES_PER_TOKEN, make_wide_model
from tests.support.kv_driver import BLOCK

COMMAND = "make bench-kv"
CACHE = Path.home() / ".cache" / "baton"
WIDE = {"served_model_name": "baton-tiny", "kv_cache_bytes": str(2**30), "max_model_len": "16384"}
CHUNK = 512
"""Tokens that a prefill engine computes in a step, and so a streamed handoff's last piece."""
CHUNKS = f"--max-num-batched-tokens {CHUNK}"
ALLOWED_S = 0.002
"""What a handoff may cost beside a decode step and its bytes in a plain read."""
MB = 1e6


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


WHOLE = Size(
    times=5,
    lengths={64: 20, 256: 12, 512: 20, 1024: 12, 2048: 12, 4096: 6, 8192: 6},
    alone={64: 20, 512: 20, 2048: 20, 8192: 6},
    histories=(500, 1000, 2000, 4000),
    turns=6,
    seconds=20.0,
    leases=300,
)
QUICK = Size(
    times=2,
    lengths={64: 6, 512: 6, 2048: 6},
    alone={64: 6, 512: 6},
    histories=(500, 2000),
    turns=3,
    seconds=8.0,
    leases=40,
)


async def measure_handoffs(size: Size) -> list[str]:
    """Handoffs beside vLLM's connector, and batches with lost blocks."""
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
            batches = await handoffs.measure_batches(fleet, size.times)
    return [*handoff_lines(found, size), *batch_lines(batches)]


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
    rows = [[f"{length * KV_BYTES_PER_TOKEN / MB:.0f}", *speed_cells(found[length, OFFERED])] for length in size.alone]
    return [
        *physics_lines(found, firsts, size.alone),
        "## Handoff: bytes per second, no other engines on the cores",
        "",
        "Offered handoffs and plain reads, without upstream's engines beside them.",
        "",
        *table("KV MB | pieces | exchange GB/s | plain read GB/s | exchange / plain read, paired by turn", rows),
    ]


def handoff_lines(found: dict[tuple[int, str], list[Handoff]], size: Size) -> list[str]:
    rows, waits, speeds = [], [], []
    for length, times in size.lengths.items():
        ways = {how: found[length, how] for how in (STREAMED, OFFERED, UPSTREAM)}
        megabytes = f"{length * KV_BYTES_PER_TOKEN / MB:.0f}"
        ttft, exposed = ([ms(handoffs.median_of(way, part)) for way in ways.values()] for part in (ttft_of, exposed_of))
        more = [differences(ways[how], ways[UPSTREAM], ttft_of) for how in (STREAMED, OFFERED)]
        rows.append([length, megabytes, times, *ttft, *more])
        more = [differences(ways[how], ways[UPSTREAM], exposed_of) for how in (STREAMED, OFFERED)]
        waits.append([length, megabytes, *exposed, *more])
        speeds.append([megabytes, *speed_cells(ways[OFFERED], ways[UPSTREAM])])
    return [
        "## Handoff: time to first token, and the handoff's share",
        "",
        "One request at a time, new prompts, 32 KB of KV per token, prefill in chunks of 512 tokens. The engines of",
        "all three methods run side by side and take turns, in every order, each while the others are idle; a difference is",
        "between requests of the same turn: the median with its interval (sign test, 95%). Negative:",
        "faster than upstream.",
        "",
        *table(
            "prompt tokens | KV MB | turns | TTFT ms streamed | offered | upstream | streamed less upstream | offered less upstream",
            rows,
        ),
        "Exposed: from the end of the prefill leg to the first token of the decode leg, which computes the prompt's tail.",
        "",
        *table(
            "prompt tokens | KV MB | exposed ms streamed | offered | upstream | streamed less upstream | offered less upstream",
            waits,
        ),
        "## Handoff: bytes per second",
        "",
        "Offered handoffs and upstream's: bytes divided by the time in which reads were in progress. Plain read: the bytes of the",
        "previous handoff, read again by the same idle engine with one plain NIXL read of the same pieces, with",
        "prepared descriptors. It is a reference and no limit: in some turns the exchange is faster.",
        "",
        *table(
            "KV MB | pieces | exchange GB/s | upstream GB/s | plain read GB/s | exchange / plain read, paired by turn",
            speeds,
        ),
    ]


Moved = list[tuple[list[Handoff], float]]
"""Offered handoffs and streamed ones of a length, each with the seconds that its bytes take in a plain read."""


def _beside_steps(moved: Moved, firsts: list[handoffs.FirstStep]) -> list[object]:
    """Exposed time beside steps of the same engine."""
    steps, first_s = [one.step_s for one in firsts], median(one.step_s for one in firsts)
    return [
        *(ms(handoffs.median_of(ways, exposed_of)) for ways, _moved_s in moved),
        ms(handoffs.median_of(moved[0][0], step_of)),
        with_interval(steps, ".1f", 1e3),
        *(ms(moved_s) for _ways, moved_s in moved),
        *(
            with_interval([one.exposed_s - one.step_s - moved_s for one in ways], "+.1f", 1e3)
            for ways, moved_s in moved
        ),
        *(with_interval([one.exposed_s - first_s - moved_s for one in ways], "+.1f", 1e3) for ways, moved_s in moved),
    ]


def _beside_cached(moved: Moved, firsts: list[handoffs.FirstStep]) -> list[object]:
    """Exposed time beside the same request without a handoff."""
    every = [one for ways, _moved_s in moved for one in ways]
    return [
        with_interval([one.cached_ttft_s for one in every], ".1f", 1e3),
        with_interval([one.ttft_s for one in firsts], ".1f", 1e3),
        *(
            f"{median(one.recomputed for one in ways):.0f}, {median(one.cached_recomputed for one in ways):.0f}"
            for ways, _moved_s in moved
        ),
        *(
            with_interval([one.exposed_s - one.cached_ttft_s - moved_s for one in ways], "+.1f", 1e3)
            for ways, moved_s in moved
        ),
    ]


def physics_lines(
    found: dict[tuple[int, str], list[Handoff]], firsts: dict[int, list[handoffs.FirstStep]], lengths: dict[int, int]
) -> list[str]:
    """Exposed time against what no connector can avoid, and where it goes."""
    rows, beside, parts = [], [], dict[str, list[list[object]]]()
    for length in lengths:
        both = found[length, OFFERED], found[length, STREAMED]
        bytes_s = median(one.plain.seconds for one in both[0] if one.plain is not None)
        moved = list(zip(both, (bytes_s, bytes_s * min(1.0, CHUNK / length)), strict=True))
        rows.append([length, len(both[0]), *_beside_steps(moved, firsts[length])])
        beside.append([length, *_beside_cached(moved, firsts[length])])
        for how, ways in zip((OFFERED, STREAMED), both, strict=True):
            timed = [one.stages for one in ways if one.stages]
            head = f"{how}: prompt tokens | {' | '.join(timed[0])}"
            cells = [with_interval([one[name] for one in timed], ".1f", 1e3) for name in timed[0]]
            parts.setdefault(head, []).append([length, *cells])
    return [
        "## Handoff: beside what physics asks for",
        "",
        "Without upstream's engines on the cores, offered and streamed in turn. A step of the same engine, and the handoff's bytes in a",
        "plain read (of the last chunk, if streamed), cannot be avoided. Decode step: between two tokens of a running request. First step:",
        "of a request whose prompt is cached, from vLLM's scheduling to its first token, on an engine with vLLM's own connector and no handoffs; vLLM",
        f"makes the request's inputs in it. Beyond: the exposed time less a step and the bytes; the aim is at most {ALLOWED_S * 1e3:.0f} ms.",
        "",
        *table(
            "prompt tokens | turns | exposed ms offered | streamed | decode step ms | first step ms | bytes ms | last chunk's ms"
            " | offered beyond a decode step ms | streamed | offered beyond a first step ms | streamed",
            rows,
        ),
        "Beside the same request without a handoff: the prompt and one more token, one request at a time on the same decode",
        "engine, which has the whole prompt cached. Its time to first token has the way there and back, admission and the first step. The",
        "same on the engine without handoffs. Beyond: the exposed time less that of the decode engine and the bytes. Computed: tokens of the handoff's",
        "decode leg, of the cached request.",
        "",
        *table(
            "prompt tokens | TTFT ms cached | without handoffs | computed offered, cached | computed streamed, cached"
            " | offered beyond ms | streamed beyond ms",
            beside,
        ),
        "Where the exposed time goes, ms:",
        "",
        *(line for head, each in parts.items() for line in table(head, each)),
    ]


def batch_lines(batches: list[handoffs.Batch]) -> list[str]:
    return [
        f"## Lost blocks: {handoffs.BATCH} requests of {handoffs.BATCH_TOKENS} tokens at once",
        "",
        "For some of them the second half of the blocks does not arrive: only that half is computed.",
        "",
        *table(
            "requests that lost half | TTFT ms of the others | TTFT ms of those | tokens computed on decode",
            [[b.lost, ms(b.intact_ms / 1e3), ms(b.lost_ms / 1e3), b.recomputed] for b in batches],
        ),
    ]


def ttft_of(handoff: Handoff) -> float:
    return handoff.ttft_s


def exposed_of(handoff: Handoff) -> float:
    return handoff.exposed_s


def step_of(handoff: Handoff) -> float:
    return handoff.step_s


def speed_of(handoff: Handoff) -> float:
    return handoff.bytes / handoff.read_s / 1e9


def differences(ours: list[Handoff], theirs: list[Handoff], part: Callable[[Handoff], float]) -> str:
    return with_interval([part(one) - part(other) for one, other in zip(ours, theirs, strict=True)], "+.1f", 1e3)


def speed_cells(ours: list[Handoff], *others: list[Handoff]) -> list[object]:
    pairs = [(one, one.plain) for one in ours if one.plain is not None]
    plain_speeds = [plain.bytes / plain.seconds / 1e9 for _one, plain in pairs]
    parts = [speed_of(one) / speed for (one, _plain), speed in zip(pairs, plain_speeds, strict=True)]
    pieces = median(plain.pieces for _one, plain in pairs)
    speeds = [*(handoffs.median_of(each, speed_of) for each in (ours, *others)), median(plain_speeds)]
    return [f"{pieces:.0f}", *(f"{speed:.2f}" for speed in speeds), with_interval(parts, ".2f")]


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


PARTS: dict[str, Callable[[Size], Awaitable[list[str]]]] = {
    "handoff": measure_handoffs,
    "speed": measure_speed,
    "turns": measure_turns,
    "decoding": measure_decoding,
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
    parser.add_argument("--quick", action="store_true", help="short runs; their figures are not precise")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/kv.md"))
    arguments = parser.parse_args()
    size, measured = QUICK if arguments.quick else WHOLE, dict[str, Measured]()
    text = arguments.out.read_text() if arguments.out.exists() else ""
    for name in arguments.only.split(","):
        measured[name] = asyncio.run(run(name, size))
        text = page(head(size), measured, list(PARTS), text)
        if not arguments.quick:  # Part by part, so that one that fails loses no other.
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
