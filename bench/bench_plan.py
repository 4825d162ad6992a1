"""The error of ``baton plan``: splits of a fleet under a piece of a trace, in virtual time and live, that is in real time
through a router, NATS and simulated workers, each a process.

    python -m bench.bench_plan TRACE --splits 4B,2P+2D,3P+1D --seconds 150 --load 0.9 --slower 5

``--slower N`` makes engines, links, targets and arrivals N times as slow: a machine that is too small for a live run of the
real speeds then measures everything but the router's and the workers' own time, which it counts N times too little.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import uvloop

from bench.bench_live_replay import (
    MAX_PAYLOAD_BYTES,
    SETTLE_S,
    cpu_of,
    cut,
    metric,
    process,
    until_exact,
    worker_settings,
)
from bench.live_client import Outcome, replay
from replay.capacity.trial import Case, Question, Target, Trial, try_out
from replay.profile import PROFILES, Profile
from replay.split import Split, split_of
from replay.spread import spread_of
from replay.traces import Request, read_trace
from tests.support.nats_server import NatsServer, free_port


def slower(profile: Profile, times: float) -> Profile:
    """All of its work takes so many times as long."""
    return replace(
        profile,
        prefill_tokens_per_s=profile.prefill_tokens_per_s / times,
        prefill_base_s=profile.prefill_base_s * times,
        prefill_s_per_pair=profile.prefill_s_per_pair * times,
        decode_base_s=profile.decode_base_s * times,
        decode_per_sequence_s=profile.decode_per_sequence_s * times,
        decode_per_context_token_s=profile.decode_per_context_token_s * times,
        transfer_bytes_per_s=profile.transfer_bytes_per_s / times,
        transfer_base_s=profile.transfer_base_s * times,
        # Live blocks have 512 tokens, too, so the decode worker computes half a block of each prompt.
        tail_tokens=profile.block_tokens // 2,
    )


def run_live(split: Split, requests: list[Request], profile: Profile, target: Target) -> tuple[Trial, dict[str, float]]:
    """The split on fresh workers, and what the machine was doing."""
    roles = [role for role in ("prefill", "decode", "both") for _ in range(getattr(split, role))]
    slos = json.dumps({"default": {"ttft_s": target.ttft_s, "itl_s": target.itl_s}})
    with tempfile.TemporaryDirectory() as made, ExitStack() as running:
        folder, port = Path(made), free_port()
        nats = running.enter_context(NatsServer(folder, max_payload=MAX_PAYLOAD_BYTES, has_buckets=True))
        common = {"BATON_NATS_URL": nats.url, "BATON_LOG_LEVEL": "warning"}
        processes = {"client": psutil.Process()}
        for number, role in enumerate(roles):
            own = {"WORKER_WORKER_ID": f"{role}-{number}", "WORKER_ROLE": role}
            settings = {**common, **worker_settings(profile), **own}
            processes[own["WORKER_WORKER_ID"]] = running.enter_context(
                process(own["WORKER_WORKER_ID"], folder, ["services.worker"], settings)
            )
        settings = {**common, "ROUTER_PORT": str(port), "ROUTER_LOG_REQUESTS": "false", "ROUTER_SLOS": slos}
        processes["router"] = running.enter_context(process("router", folder, ["services.router"], settings))
        until_exact(port, len(roles))
        time.sleep(SETTLE_S)
        began_s, used = time.perf_counter(), cpu_of(processes)
        outcomes = uvloop.run(replay(requests, port, lambda _sent: None))
        span_s, now = time.perf_counter() - began_s, cpu_of(processes)
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
    late = spread_of([outcome.sent_at - outcome.request.at_s for outcome in outcomes])
    machine = {
        "load_average": os.getloadavg()[0],
        "cpu_share": sum(now[name] - used[name] for name in now) / span_s,
        "sent_late_p95_s": late.p95,
    }
    return summarise(split, outcomes, target, text), machine


def summarise(split: Split, outcomes: list[Outcome], target: Target, metrics: str) -> Trial:
    """As in virtual time: what was refused or failed was not in time."""
    served = [outcome for outcome in outcomes if outcome.well]
    late = [outcome for outcome in served if outcome.ttft_s > target.ttft_s]
    slow = [outcome for outcome in served if outcome.ttft_s <= target.ttft_s and outcome.tpot_s > target.itl_s]
    lost = len(outcomes) - len(served)
    prompt_tokens = max(1.0, metric(metrics, "baton_router_prompt_tokens_total"))
    return Trial(
        split=split,
        load=1.0,
        requests=len(outcomes),
        in_time=1 - (lost + len(late) + len(slow)) / len(outcomes),
        stopped=False,
        late=len(late),
        slow=len(slow),
        refused=lost,
        ttft=spread_of([outcome.ttft_s for outcome in served], lost),
        itl=spread_of([outcome.tpot_s for outcome in served if outcome.request.output_tokens > 1]),
        hit_share=metric(metrics, "baton_router_cached_tokens_actual_total") / prompt_tokens,
        busy={},
        preemptions=0,
        seconds=outcomes[-1].request.at_s,
        cpu_s=0.0,
    )


def row(side: str, trial: Trial) -> str:
    return (
        f"{trial.split.short:<10} {side:<8} {trial.in_time:>8.1%} {trial.ttft.p50:>9.2f} {trial.ttft.p95:>8.2f} "
        f"{trial.itl.p50 * 1e3:>8.1f} {trial.itl.p95 * 1e3:>8.1f} {trial.refused:>8} {trial.hit_share:>7.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--splits", default="4B,2P+2D,3P+1D")
    parser.add_argument("--from-s", type=float, default=0.0, help="where the piece begins, seconds of the trace")
    parser.add_argument("--seconds", type=float, default=150.0, help="of real time")
    parser.add_argument("--load", type=float, default=0.9, help="how many times as fast requests arrive")
    parser.add_argument("--slower", type=float, default=1.0)
    parser.add_argument("--profile", choices=list(PROFILES), default="8b")
    parser.add_argument("--ttft", type=float, default=5.0, help="target, seconds at the real speed")
    parser.add_argument("--itl", type=float, default=0.1, help="target, seconds at the real speed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--virtual-only", action="store_true")
    options = parser.parse_args()
    options.load /= options.slower
    requests = cut(read_trace(options.trace, seed=options.seed), options)
    profile = slower(PROFILES[options.profile], options.slower)
    target = Target(ttft_s=options.ttft * options.slower, itl_s=options.itl * options.slower, share=0.95)
    case = Case(requests=requests, whole=requests, too_large=0, whole_too_large=0, profile=profile, target=target)
    print(f"{len(requests)} requests in {requests[-1].at_s:.0f} s, engines {options.slower:g} times slower")
    print("split      side      in time  TTFT p50      p95  ITL p50      p95  refused    hits")
    for text in options.splits.split(","):
        split = split_of(text)
        print(row("virtual", try_out(case, Question(split, to_the_end=True))), flush=True)
        if not options.virtual_only:
            live, machine = run_live(split, requests, profile, target)
            print(row("live", live), flush=True)
            print("           " + ", ".join(f"{name} {value:.2f}" for name, value in machine.items()), flush=True)


if __name__ == "__main__":
    main()
