"""Read-back of KV against recompute, with vLLM's own multi-turn script, from its source distribution."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

from bench.kv_bench_fleet import BenchFleet
from bench.kv_bench_page import table
from bench.seeds.apart import moved
from bench.seeds.engines import Engines
from services.worker import tiny_model
from services.worker.tiny_model import TINY_MODEL
from shared.contracts.channels import DEFAULT_MODE
from shared.contracts.control import DefaultMode
from tests.outside.suite import command, environment
from tests.outside.suites.vllm_bench import OFFLINE
from tests.outside.suites.vllm_sources import sources, vllm_version
from tests.support.kv_driver import BLOCK
from tests.support.nats_server import free_port
from tests.support.processes import service_process

READ_BACK, RECOMPUTE = "read-back", "recompute"
FETCHED = Path(".outside") / "vllm-multi-turn"
SCRIPT = Path("benchmarks") / "multi_turn" / "benchmark_serving_multi_turn.py"
WORDS = 60_000
AT_ONCE = 4
"""Conversations that take turns, one request at a time."""
RUN_S_MAX = 400.0
LOG_SHOWN = 6000
NONE_FAILED = "num_failures=0"
NEVER = str(1 << 30)


@dataclass(frozen=True)
class Size:
    """Options of a run."""

    conversations: int
    messages: int
    """Of each conversation, of which every other one is the user's."""


@dataclass(frozen=True)
class Run:
    """One run of the script."""

    caching: str
    how: str
    ttft_ms: tuple[float, float, float]
    """Least, p50 and p75, of the turns after the first one of a conversation."""
    turns: int
    reads: int
    bytes: int
    fetched_tokens: int
    """By the prefill engine."""


async def measure(engines: Engines, size: Size) -> list[str]:
    """Both ways, with the prefill engine's prefix cache and without."""
    folder = FETCHED.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    script = sources(folder) / SCRIPT
    python = environment(folder, "pandas", on_ours=True)
    runs, other = [], str(free_port())
    async with engines.fleet({"p1": "prefill", "d1": "decode"}, fetch_tokens_min=str(BLOCK)) as fleet:
        store = await fleet.tap.bus.key_value_store(DEFAULT_MODE)
        await store.put(DefaultMode(mode="disaggregated"))
        with service_process(
            "router", fleet.folder, BATON_NATS_URL=fleet.nats.url, ROUTER_PORT=other, ROUTER_FETCH_TOKENS_MIN=NEVER
        ):
            urls = {READ_BACK: str(fleet.http.base_url), RECOMPUTE: f"http://127.0.0.1:{other}"}
            for caching, prefill in (("on", "p1"), ("off", "p2")):
                if caching == "off":
                    await engines.without_cache(fleet, "p1", prefill, "prefill")
                for how, url in urls.items():
                    command_line = [python, script, "--url", url]
                    runs.append(await converse(fleet, engines, size, command_line, prefill, caching, how))
    return lines(runs, size)


async def converse(
    fleet: BenchFleet, engines: Engines, size: Size, command_line: list[Any], prefill: str, caching: str, how: str
) -> Run:
    """One run, whose conversations no engine has seen. ``prefill``: the id of the prefill worker. Raises RunFailed for a
    request that moved no KV from the prefill to the decode engine.
    """
    reads, read_bytes = await moved(fleet)
    since = len(fleet.handoffs.finished)
    fetched = fleet.tap.loads[prefill].received_tokens_total
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, wanted, found = folder / "text.txt", folder / "conversations.json", folder / "found.json"
        text.write_text(words(f"{caching} {how}"))
        wanted.write_text(json.dumps(conversations(size, text)))
        arguments = [
            *command_line,
            *("--input-file", wanted, "--model", engines.model_dir, "--served-model-name", TINY_MODEL),
            *("--num-clients", "1", "--max-active-conversations", str(AT_ONCE), "--no-early-stop"),
            *("--stats-json-output", found),
        ]
        code = await asyncio.to_thread(command, arguments, folder / "log", s_max=RUN_S_MAX, cwd=folder, env=OFFLINE)
        log = (folder / "log").read_text(errors="replace")
        if code != 0 or NONE_FAILED not in log:
            print(log[-LOG_SHOWN:])
            raise RuntimeError(f"vLLM's multi-turn script ended with {code}, or requests failed; see its log above")
        stats = json.loads(found.read_text())
    await fleet.handoffs.check(since, len(stats))
    later = [one["ttft_ms"] for one in stats if one["input_num_turns"] > 1]
    after = await moved(fleet)
    _p25, p50, p75 = quantiles(later, n=4)
    return Run(
        caching=caching,
        how=how,
        ttft_ms=(min(later), p50, p75),
        turns=len(later),
        reads=after[0] - reads,
        bytes=after[1] - read_bytes,
        fetched_tokens=fleet.tap.loads[prefill].received_tokens_total - fetched,
    )


def words(seed: str) -> str:
    """A text for the conversations, of the words of baton-tiny's corpus."""
    known = sorted(set((Path(tiny_model.__file__).parent / "tiny_corpus.txt").read_text().split()))
    return " ".join(random.Random(seed).choices(known, k=WORDS))


def conversations(size: Size, text: Path) -> dict[str, Any]:
    """As the script's own example has them (``generate_multi_turn.json``), but for their number and length."""

    def uniform(low: int, high: int) -> dict[str, Any]:
        return {"distribution": "uniform", "min": low, "max": high}

    return {
        "filetype": "generate_conversations",
        "num_conversations": size.conversations,
        "text_files": [str(text)],
        "print_stats": False,
        "prompt_input": {
            "num_turns": {"distribution": "constant", "value": size.messages},
            "common_prefix_num_tokens": {"distribution": "constant", "value": 500},
            "prefix_num_tokens": {"distribution": "constant", "value": 1000},
            "num_tokens": uniform(120, 160),
        },
        "prompt_output": {"num_tokens": uniform(80, 120)},
    }


def lines(runs: list[Run], size: Size) -> list[str]:
    """The part of the page."""
    of = {(run.caching, run.how): run for run in runs}
    change = {
        caching: of[caching, READ_BACK].ttft_ms[1] / of[caching, RECOMPUTE].ttft_ms[1] for caching in ("on", "off")
    }
    cells = [
        [
            run.caching,
            run.how,
            run.turns,
            *(f"{ms:.1f}" for ms in run.ttft_ms),
            run.fetched_tokens,
            run.reads,
            f"{run.bytes / 1e6:.0f}",
        ]
        for run in runs
    ]
    return [
        "## Read-back against recompute (PR #32553)",
        "",
        "Claim: TTFT p50 219.61 ms against 307.86 recomputed (-28.6 %), p75 244.65 against 342.86, least 143.76 against 243.50;",
        "more than twice as fast without prefix caching.",
        "",
        f"Our figure: TTFT p50 {change['on'] - 1:+.1%} with the prefill engine's prefix cache, {1 / change['off']:.2f} times as fast without.",
        "",
        f"vLLM {vllm_version()}'s `benchmarks/multi_turn/benchmark_serving_multi_turn.py`, {size.conversations} conversations of {size.messages} messages, {AT_ONCE} of them at a",
        "time, one request at a time; it ends when no further one can take a turn. Turns after the first. All requests are handed",
        "over from the prefill to the decode engine, so each has a read on the decode engine. Recompute: a router beside it that",
        "lets nothing be fetched.",
        "",
        *table("prefix cache | way | turns | TTFT ms least | p50 | p75 | tokens read back | KV reads | KV MB", cells),
        "What differs: the example's lengths, but fewer and shorter conversations, of random words instead of a book; other",
        "engines and another model, as the page's head says. On CPUs the script's client shares their cores, and the model says",
        "whole words only, so that its text becomes the same tokens again; a model that does not has less to read back.",
    ]
