"""The figures that the threads behind Baton claim, measured here: ``python -m bench.seeds [--quick] [--only apart,turns,...]``.

Each part starts its own engines, takes at most eight minutes and writes its part of docs/benchmarks/seeds.md.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench import bench_kv
from bench.kv_bench_page import Measured, commit, measuring, page
from bench.seeds import apart, turns
from bench.seeds.engines import Engines, engines
from tests.outside.suite import command, last_line

APART = {"cpu": apart.Size(prompt_tokens=512, requests=60), "gpu": apart.Size(prompt_tokens=2048, requests=300)}
APART_QUICK = apart.Size(prompt_tokens=512, requests=12)
TURNS = {"cpu": turns.Size(conversations=8, messages=10), "gpu": turns.Size(conversations=24, messages=16)}
SHARING = Path("docs/benchmarks/sharing.md")
SHARING_S_MAX = 900.0
TURNS_QUICK = turns.Size(conversations=4, messages=6)


async def measure_apart(on: Engines, *, quick: bool) -> list[str]:
    return await apart.measure(on, APART_QUICK if quick else APART["gpu" if on.gpus else "cpu"])


async def measure_turns(on: Engines, *, quick: bool) -> list[str]:
    return await turns.measure(on, TURNS_QUICK if quick else TURNS["gpu" if on.gpus else "cpu"])


async def measure_losses(on: Engines, *, quick: bool) -> list[str]:
    if on.gpus:
        return ["## Lost KV in a batch (PR #12285)", "", "Measured on CPU engines only: `make bench-seeds`."]
    found = await bench_kv.measure_losses(bench_kv.QUICK if quick else bench_kv.WHOLE)
    return [
        "## Lost KV in a batch (PR #12285)",
        "",
        "Claim: with recomputing limited to what lost its KV, the others of a batch need not be computed again. The review asked",
        "for TTFT by the number of lost requests, with and without, and that ready requests do not wait for lost ones.",
        "",
        *found[2:],  # without a heading of its own
        "What differs: losses are made by naming KV that its holder does not have; the figures of ready and lost requests are",
        "apart. Also in [kv.md](kv.md).",
    ]


async def measure_sharing(on: Engines, *, quick: bool) -> list[str]:
    """Runs ``bench.seeds.sharing``, which has a page of its own."""
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "sharing.md" if quick else SHARING
        arguments = [sys.executable, "-m", "bench.seeds.sharing", "--engines", "simulated,cpu", "--out", own]
        code = await asyncio.to_thread(
            command,
            [*arguments, *(["--quick"] if quick else [])],
            Path(folder) / "log",
            s_max=SHARING_S_MAX,
            cwd=Path(),
        )
        if code != 0:
            raise RuntimeError(f"bench.seeds.sharing ended with {code}: {last_line(Path(folder) / 'log')}")
        found = own.read_text()
    return [
        "## Prompts that begin alike (rickyyx/vllm#1)",
        "",
        "Claim: 20 to 30 % more throughput at 70 % sharing where prompts dominate, more than 90 % of the KV cache in use; little",
        "where decoding dominates.",
        "",
        "Our figures, from [sharing.md](sharing.md): of prompts that share so much, on engines of each kind.",
        "",
        *shared_rows(found),
        "",
        "What differs: the thread's change is inside of one engine, and vLLM has it; here it is placement over a fleet.",
    ]


def shared_rows(text: str) -> list[str]:
    """The rows of placement by Baton in the tables of sharing.md, each with what its table is of."""
    rows, engines_, load, head = list[str](), "", "", ""
    for line in text.splitlines():
        if line.startswith("## "):
            engines_ = line.removeprefix("## ")
        elif line.startswith("**"):
            load = line.split("**")[1]
        elif line.startswith("| shared"):
            head = line
        elif line.startswith("| ") and line.split("|")[2].strip() == "Baton":
            rows.append(f"| {engines_} | {load} {line}")
    columns = head.count("|") + 1
    return [f"| engines | load {head}", "|" + "---|" * columns, *rows]


PARTS: dict[str, Callable[..., Awaitable[list[str]]]] = {
    "apart": measure_apart,
    "turns": measure_turns,
    "sharing": measure_sharing,
    "losses": measure_losses,
}


def head(on: Engines) -> list[str]:
    return [
        "# The figures of the threads",
        "",
        "What the discussions that Baton answers claim or ask to be measured, and what it is here. `make bench-seeds`; one part",
        f"alone: `make bench-seeds ARGS='--only turns'`; on GPUs: `GPU=1`. {on.said}.",
    ]


async def run(name: str, on: Engines, *, quick: bool) -> Measured:
    with measuring() as measured:
        measured.said = f"{'Short form: not precise. ' if quick else ''}{measured.said} Commit {commit()}."
        measured.lines = await PARTS[name](on, quick=quick)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short runs; their figures are not precise")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--gpu", action="store_true", help="engines on NVIDIA GPUs")
    parser.add_argument("--out", type=Path, help="the page")
    arguments = parser.parse_args()
    out = arguments.out or Path(f"docs/benchmarks/seeds{'-gpu' if arguments.gpu else ''}.md")
    unknown = set(arguments.only.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    measured: dict[str, Measured] = {}
    text = out.read_text() if out.exists() else ""
    with engines(on_gpus=arguments.gpu) as on:
        for name in arguments.only.split(","):
            measured[name] = asyncio.run(run(name, on, quick=arguments.quick))
            text = page(head(on), measured, list(PARTS), text)
            out.parent.mkdir(parents=True, exist_ok=True)  # Part by part, so that one that fails loses no other.
            out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
