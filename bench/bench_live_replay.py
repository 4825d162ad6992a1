"""The live check: a trace in real time through a router, NATS and simulated workers, each a process, against the same
cut in virtual time: ``python -m bench.bench_live_replay TRACE --seconds 600 --load 1 --policies baton-default,dynamo``.

Engines, requests and policies are the same on both sides; prompts are token ids made from the trace's hash ids. Each
policy gets workers with empty caches. Baton's are ``baton-default`` and ``baton-waiting`` (a router always has its queue); of
other systems, placement rules alone. A request that was rejected or failed is infinitely late. It fails (exit status 1)

* if requests failed other than by a rejection (503, 429), or were sent too late by the client,
* if both sides rank two policies differently that clearly differ in virtual time,
* with ``--within SHARE``, if a policy's TTFT p50, p95 or cache hits differ by more than that between the sides.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import uvloop

from bench.live_client import Outcome, replay
from bench.live_router import AS_IT_IS
from bench.policies import BATON_DEFAULT, BATON_WAITING
from bench.policies.systems import UnknownPolicyError, make_rule
from bench.study import experiment
from bench.study.results import Result, Slo, buckets_of
from replay.profile import PROFILES
from replay.split import Split
from replay.spread import spread_of
from replay.traces import Request, at_load, read_trace
from tests.support.nats_server import NatsServer, free_port
from tests.support.processes import ROOT

KV_BYTES_PER_TOKEN = 128
"""Moved between the processes for each token; the link is slower by as much as this is less than the profile's."""
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
READY_S_MAX = 240.0
SETTLE_S = 3.0
STOP_S_MAX = 40.0
DIFFERENT = 1.1
"""Policies whose measures in virtual time are closer than that are not ranked."""
REJECTIONS = (429, 503)
LATE_SHARE_MAX = 0.1
"""Of the target of TTFT: how late the client may send requests at p95."""
MEASURES: dict[str, Callable[[Result], float]] = {"TTFT p95": lambda r: r.ttft.p95, "TTFT p50": lambda r: r.ttft.p50}


def worker_settings(name: str) -> dict[str, str]:
    """A simulated engine like the replay's of this profile, whose link carries KV_BYTES_PER_TOKEN for each token."""
    profile = PROFILES[name]
    rate = profile.transfer_bytes_per_s * KV_BYTES_PER_TOKEN / profile.kv_bytes_per_token
    link = f"transfer=tcp,transfer_bytes_per_s={rate},kv_bytes_per_token={KV_BYTES_PER_TOKEN}"
    values = {
        "ENGINE": "simulated",
        "BLOCK_SIZE": profile.block_tokens,
        "KV_CACHE_BYTES": profile.kv_blocks * profile.block_tokens * KV_BYTES_PER_TOKEN,
        "MAX_MODEL_LEN": profile.kv_blocks * profile.block_tokens,
        "LEGS_MAX": profile.max_num_seqs,
        "SIMULATED": f"{name},{link}",
    }
    return {f"WORKER_{setting}": str(value) for setting, value in values.items()}


@contextmanager
def process(name: str, folder: Path, module: list[str], settings: dict[str, str]) -> Iterator[psutil.Process]:
    """A process until the block ends; what it said is shown when the block fails."""
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        one = subprocess.Popen(
            [sys.executable, "-m", *module], cwd=ROOT, env={**os.environ, **settings}, stdout=out, stderr=out
        )
    try:
        yield psutil.Process(one.pid)
    except BaseException:
        print(f"--- {name}\n{log.read_text()[-1500:]}", file=sys.stderr)
        raise
    finally:
        one.terminate()
        try:
            one.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            one.kill()


def run_live(policy: str, requests: list[Request], options: argparse.Namespace) -> tuple[Result, list[str]]:
    """One policy on fresh workers, and what went wrong."""
    slo = Slo(ttft_s=options.ttft, itl_s=options.itl)
    setting = {"profile": options.profile, "slo_ttft_s": slo.ttft_s, "slo_itl_s": slo.itl_s, "seed": options.seed}
    with tempfile.TemporaryDirectory() as made, ExitStack() as running:
        folder, port = Path(made), free_port()
        nats = running.enter_context(NatsServer(folder, max_payload=MAX_PAYLOAD_BYTES, has_buckets=True))
        common = {"BATON_NATS_URL": nats.url, "BATON_LOG_LEVEL": "warning"}
        processes = {"NATS": psutil.Process(nats.pid), "client": psutil.Process()}
        for name in [f"w{number}" for number in range(options.workers)]:
            settings = {**common, **worker_settings(options.profile), "WORKER_WORKER_ID": name}
            processes[name] = running.enter_context(process(name, folder, ["services.worker"], settings))
        settings = {
            **common,
            "ROUTER_PORT": str(port),
            "ROUTER_LOG_REQUESTS": "false",
            **router_settings(policy, slo, options),
        }
        module = ["bench.live_router", policy, json.dumps(setting)]
        processes["router"] = running.enter_context(process("router", folder, module, settings))
        until_exact(port, options.workers)
        time.sleep(SETTLE_S)
        began_s, used = time.perf_counter(), cpu_of(processes)
        outcomes = uvloop.run(replay(requests, port, progress(policy, len(requests))))
        show_carried(cpu_of(processes), used, time.perf_counter() - began_s, outcomes)
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
    return summarise((policy, options.load), outcomes, slo, metrics), failures(policy, outcomes, slo)


def cpu_of(processes: dict[str, psutil.Process]) -> dict[str, float]:
    """Seconds used so far."""
    return {name: sum(one.cpu_times()[:2]) for name, one in processes.items()}


def show_carried(now: dict[str, float], before: dict[str, float], span_s: float, outcomes: list[Outcome]) -> None:
    """Whether the machine kept up: a process that needs a whole core measures the core."""
    shares = {name: (now[name] - before[name]) / span_s for name in now}
    workers = [share for name, share in shares.items() if name.startswith("w")]
    rest = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if not name.startswith("w"))
    late = spread_of([outcome.sent_at - outcome.request.at_s for outcome in outcomes])
    print(f"  CPU of a core: {rest}, workers {sum(workers):.0%} together (busiest {max(workers):.0%}); "
          f"machine {psutil.getloadavg()[0]:.1f} ready on {os.cpu_count()} cores; "
          f"requests sent {late.p95 * 1e3:.0f} ms late at p95")  # fmt: skip


def router_settings(policy: str, slo: Slo, options: argparse.Namespace) -> dict[str, str]:
    """The targets, if this policy knows them, and what was given as NAME=VALUE."""
    targets = {"default": {"ttft_s": slo.ttft_s, "itl_s": slo.itl_s}}
    known = {"ROUTER_SLOS": json.dumps(targets)} if policy == BATON_WAITING else {}
    return known | dict(one.split("=", 1) for one in options.router)


def until_exact(port: int, workers: int) -> None:
    """Wait until the router's index follows all workers."""
    deadline = time.monotonic() + READY_S_MAX
    while True:
        try:
            text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
            if sum('state="exact"' in line and line.endswith(" 1.0") for line in text.splitlines()) == workers:
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"the router does not follow {workers} workers")
        time.sleep(0.5)


def summarise(name: tuple[str, float], outcomes: list[Outcome], slo: Slo, metrics: str) -> Result:
    """Same as in the replay: what was not served, or not to its end, is infinitely late."""
    served = [outcome for outcome in outcomes if outcome.well]
    lost = [outcome.request for outcome in outcomes if not outcome.well]
    span_s = max(outcomes[-1].request.at_s - outcomes[0].request.at_s, 1e-9)
    good = [outcome for outcome in served if slo.met_by(outcome.ttft_s, outcome.tpot_s)]
    good_tokens = sum(outcome.request.tokens for outcome in good)
    tpot = spread_of(
        [outcome.tpot_s for outcome in served if outcome.request.output_tokens > 1],
        sum(request.output_tokens > 1 for request in lost),
    )
    prompt_tokens = max(1.0, metric(metrics, "baton_router_prompt_tokens_total"))
    return Result(
        policy=name[0],
        load=name[1],
        label="live",
        offered_per_s=len(outcomes) / span_s,
        requests=len(outcomes),
        refused=len(lost),
        ttft=spread_of([outcome.ttft_s for outcome in served], len(lost)),
        tpot=tpot,
        itl=tpot,
        hit_share=metric(metrics, "baton_router_cached_tokens_actual_total") / prompt_tokens,
        fetched_share=0.0,
        goodput_per_s=len(good) / span_s,
        good_share=len(good) / len(outcomes),
        goodput_tokens_per_s=good_tokens / span_s,
        good_tokens_share=good_tokens / sum(outcome.request.tokens for outcome in outcomes),
        buckets=buckets_of([outcome.request.input_tokens for outcome in group] for group in (outcomes, served, good)),
        preemptions=0,
        busy_share=0.0,
        cpu_s=0.0,
    )


def metric(text: str, name: str) -> float:
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))
    )


def progress(policy: str, total: int) -> Callable[[int], None]:
    """A line on the terminal, if there is one."""

    def told(sent: int) -> None:
        if sys.stderr.isatty() and (sent % 10 == 0 or sent == total):
            print(f"\r{policy}: {sent}/{total} sent ", end="\n" if sent == total else "", file=sys.stderr, flush=True)

    return told


def show(results: list[Result]) -> None:
    print(f"{'policy':<18} {'side':<8} {'TTFT p50':>9} {'p95':>7} {'p99':>7} {'TPOT p50 ms':>12} {'p95':>6} {'p99':>6} "
          f"{'hit %':>6} {'good/s':>7} {'failed':>6}")  # fmt: skip
    for r in results:
        print(f"{r.policy:<18} {r.label:<8} {r.ttft.p50:>9.3f} {r.ttft.p95:>7.3f} {r.ttft.p99:>7.3f} "
              f"{r.tpot.p50 * 1e3:>12.1f} {r.tpot.p95 * 1e3:>6.1f} {r.tpot.p99 * 1e3:>6.1f} "
              f"{r.hit_share * 100:>6.1f} {r.goodput_per_s:>7.3f} {r.refused:>6}")  # fmt: skip


def failures(policy: str, outcomes: list[Outcome], slo: Slo) -> list[str]:
    """Requests that failed other than by a rejection, and a client that did not keep up."""
    found = Counter(outcome.status for outcome in outcomes if not outcome.well and outcome.status not in REJECTIONS)
    problems = [
        f"{policy}: {count} requests failed ({'cut short' if status == 200 else f'status {status}'})"
        for status, count in sorted(found.items())
    ]
    late = spread_of([outcome.sent_at - outcome.request.at_s for outcome in outcomes if outcome.sent_at])
    if late.p95 > LATE_SHARE_MAX * slo.ttft_s:
        problems.append(f"{policy}: requests were sent {late.p95:.2f} s late at p95: this machine did not keep up")
    return problems


def misranked(virtual: list[Result], live: list[Result]) -> list[str]:
    """Pairs of policies that clearly differ in virtual time, and that are ranked the other way live."""
    problems = []
    for what, of in MEASURES.items():
        for side, results in (("virtual", virtual), ("live", live)):
            print(f"{what}, {side}: " + " < ".join(f"{r.policy} {of(r):.2f}" for r in sorted(results, key=of)))
        for i, j in itertools.permutations(range(len(virtual)), 2):
            if of(virtual[j]) > DIFFERENT * of(virtual[i]) and not of(live[j]) > of(live[i]):
                problems.append(f"{what}: {virtual[i].policy} is ahead of {virtual[j].policy} in virtual time only")
    return problems


def apart(virtual: list[Result], live: list[Result], within: float) -> list[str]:
    """Measures of a policy that differ by more than ``within`` of the virtual value."""
    return [
        f"{one.policy}: {what} is {of(one):.3g} in virtual time and {of(other):.3g} live"
        for one, other in zip(virtual, live, strict=True)
        for what, of in {**MEASURES, "cache hits": lambda r: r.hit_share}.items()
        if of(one) != of(other) and not abs(of(other) - of(one)) <= within * of(one)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--from-s", type=float, default=0.0, help="where the cut begins, seconds of the trace")
    parser.add_argument("--seconds", type=float, default=600.0, help="of real time")
    parser.add_argument("--load", type=float, default=1.0, help="how many times as fast requests arrive")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--profile", choices=list(PROFILES), default="8b")
    parser.add_argument("--policies", default=f"{BATON_DEFAULT},dynamo,least-loaded,round-robin")
    parser.add_argument("--ttft", type=float, default=Slo().ttft_s, help="target, seconds")
    parser.add_argument("--itl", type=float, default=Slo().itl_s, help="target, seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--router", action="append", default=[], metavar="NAME=VALUE", help="a setting of the router")
    parser.add_argument("--within", type=float, default=math.inf, help="largest relative difference between the sides")
    parser.add_argument("--virtual-only", action="store_true")
    options = parser.parse_args()
    policies = options.policies.split(",")
    try:
        for policy in set(policies).difference(AS_IT_IS):
            make_rule(policy)
    except UnknownPolicyError as error:
        parser.error(f"{error} A live router takes {', '.join(AS_IT_IS)} or a placement rule of another system.")
    requests = cut(read_trace(options.trace, seed=options.seed), options)
    split = Split(both=options.workers)
    slo = Slo(ttft_s=options.ttft, itl_s=options.itl)
    setting = experiment.Setting(
        requests=requests, split=split, profile=PROFILES[options.profile], slo=slo, seed=options.seed
    )
    print(f"{len(requests)} requests in {requests[-1].at_s:.0f} s on {options.workers} workers, {options.profile}")
    virtual, live, problems = [], [], []
    for policy in policies:
        virtual.append(experiment.run(setting, policy, 1.0, "virtual"))
        show([virtual[-1]])
        if not options.virtual_only:
            result, failed = run_live(policy, requests, options)
            live.append(result)
            problems += failed
            show([result])
    if live:
        problems += misranked(virtual, live) + apart(virtual, live, options.within)
        print("\n".join(problems) or "both sides rank all policies alike, and no request failed")
    return 1 if problems else 0


def cut(requests: list[Request], options: argparse.Namespace) -> list[Request]:
    """So many seconds of the trace, at the load."""
    last_s = options.from_s + options.seconds * options.load
    kept = [request for request in requests if options.from_s <= request.at_s < last_s]
    return [*at_load(shifted(kept), options.load)]


def shifted(requests: list[Request]) -> list[Request]:
    """The first is due at once."""
    return [
        Request(request.at_s - requests[0].at_s, request.blocks, request.input_tokens, request.output_tokens)
        for request in requests
    ]


if __name__ == "__main__":
    sys.exit(main())
