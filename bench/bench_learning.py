"""How well learned speeds predict what requests take: the tables of docs/benchmarks.

    python -m bench.bench_learning                 simulated engines in virtual time; what learning itself costs
    python -m bench.bench_learning --live          a running system: real engines, or --engine simulated

A prediction is made when a request is placed, of the time to its first token and between tokens. Errors are relative:
|predicted / measured - 1|.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import msgspec

from services.router.state.cluster_view import ClusterView
from services.router.state.worker_speeds import SpeedOf, WorkerSpeeds
from shared.engine_speed.learner import SpeedLearner
from shared.engine_speed.steps import Steps
from tests.scenarios.predicted_fleet import APART, TOGETHER, Errors, PredictedFleet, itl_errors, mixed, ttft_errors
from tests.support.fleet_builders import load, record
from tests.support.system import System

HEAD = f"{'':34}{'TTFT p50':>10}{'p90':>8}{'bias':>8}{'ITL p50':>10}{'p90':>8}{'bias':>8}"
SEEDS = (1, 2, 3)
START_S_MAX = 400.0
ANSWER_S_MAX = 120.0


def line(name: str, ttft: Errors, itl: Errors) -> str:
    numbers = f"{ttft.median:>10.1%}{ttft.p90:>8.0%}{ttft.bias:>8.2f}{itl.median:>10.1%}{itl.p90:>8.0%}{itl.bias:>8.2f}"
    return f"{name:34}{numbers}"


def virtual(requests: int) -> Iterator[str]:
    """Three workers that do both, or two and two, at three loads; and without learning."""
    yield HEAD
    for name, roles in (("both", TOGETHER), ("P and D", APART)):
        for learns, per_s in ((True, 2.0), (True, 6.0), (True, 10.0), (False, 6.0)):
            served = []
            for seed in SEEDS:
                served += PredictedFleet(seed, roles, learns=learns).run(requests, per_s=per_s, lengths=mixed)
            label = f"{name}, {per_s:g} requests/s" + ("" if learns else ", not learning")
            yield line(label, ttft_errors(served), itl_errors(served))


def cost(rounds: int = 20_000) -> Iterator[str]:
    """Microseconds of CPU."""
    step = Steps(seconds=0.1, prefill_steps=1, prefill_tokens=500, prefill_pairs=1e5, decode_steps=3)
    learner, speed = SpeedLearner(), SpeedOf(SpeedOf())
    learner.learn(step)
    estimates = itertools.cycle((learner.speed, msgspec.structs.replace(learner.speed, decode_step_s=0.01)))
    speeds = WorkerSpeeds(ClusterView())
    speeds.joined(record())
    for name, work in (
        ("worker: a sample of steps", lambda: learner.learn(step)),
        ("router: a new estimate", lambda: speeds.load(load(speed=next(estimates)))),
        ("router: a read of KV", lambda: speed.transfer_took(1000, 0.01)),
        ("router: the transit of a leg", lambda: speed.transit_took(0.003)),
    ):
        best = min(_once(work, rounds // 5) for _ in range(5))
        yield f"{name:40}{best * 1e6:8.1f} us"


def _once(work: Any, rounds: int) -> float:
    begun = time.process_time()
    for _ in range(rounds):
        work()
    return (time.process_time() - begun) / rounds


async def live(system: System, requests: int, per_s: float, longest: int) -> list[dict[str, Any]]:
    """Send random requests at random times; returns their decisions, with what was measured."""
    draw = random.Random(1)
    limits = httpx.Limits(max_connections=256)
    async with httpx.AsyncClient(
        base_url=system.endpoint, timeout=ANSWER_S_MAX, trust_env=False, limits=limits
    ) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]

        async def ask(prompt_tokens: int, tokens_out: int) -> str:
            prompt = [draw.randrange(100, 400) for _ in range(prompt_tokens)]
            body = {"model": model, "prompt": prompt, "max_tokens": tokens_out, "ignore_eos": True, "stream": True}
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_bytes():
                    pass
                return answer.headers["x-baton-decision"] if answer.status_code == 200 else ""

        tasks = []
        for _ in range(requests):
            length = round(32 * (longest / 32) ** draw.random())
            tasks.append(asyncio.create_task(ask(length, draw.randrange(8, 64))))
            await asyncio.sleep(draw.expovariate(per_s))
        ids = [one for one in await asyncio.gather(*tasks) if one]
        return [(await http.get(f"/baton/decisions/{one}")).json() for one in ids[len(ids) // 10 :]]


def before_placement_s(decision: dict[str, Any]) -> float:
    """Seconds until the request was placed, which no prediction covers."""
    return sum(decision["measured"][part] for part in ("admission_s", "tokenize_s", "place_s", "failed_s"))


def told(name: str, decisions: list[dict[str, Any]]) -> Iterator[str]:
    """The row of the table, and predicted and measured time of each part."""
    ended = [one for one in decisions if one.get("measured") and one["ttft_s"] > 0]
    pairs = [(sum(one["predicted"].values()), one["ttft_s"] - before_placement_s(one)) for one in ended]
    itl = [(one["predicted_itl_s"], one["itl_s"]) for one in ended if one["itl_s"] > 0]
    yield line(name, Errors.of(pairs), Errors.of(itl))
    parts = {
        part: (median(one["predicted"][part] for one in ended), median(one["measured"][part] for one in ended))
        for part in ended[0]["measured"]
    }
    for part, (predicted_s, measured_s) in parts.items():
        if predicted_s or measured_s > 1e-4:
            yield f"    {part:16} predicted {predicted_s * 1e3:9.2f} ms   measured {measured_s * 1e3:9.2f} ms  (medians)"


def run_live(options: argparse.Namespace) -> Iterator[str]:
    fleet = ("--engine", options.engine, *options.fleet.split())
    with tempfile.TemporaryDirectory() as folder, System(Path(folder) / "state", *fleet) as system:
        system.wait_ready(START_S_MAX)
        yield HEAD
        for per_s in options.per_s:
            decisions = asyncio.run(live(system, options.requests, per_s, options.longest))
            yield from told(f"{options.engine}, {per_s:g} requests/s", decisions)
        for labels, value in system.metrics().each("baton_router_engine_speed_seconds"):
            yield f"    {labels['worker_id']:12} {labels['parameter']:28} {value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--fleet", default="--prefill 1 --decode 1")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--per-s", type=float, nargs="*", default=[2.0])
    parser.add_argument("--longest", type=int, default=1500, help="prompt tokens")
    options = parser.parse_args()
    lines = run_live(options) if options.live else (*virtual(options.requests), *cost())
    for text in lines:
        print(text, flush=True)


if __name__ == "__main__":
    main()
