"""Baton beside routers of other projects, in one run: ``make bench-router PEERS=1 [ARGS="--quick"]``.

All routers are up at once, alone on core 0, each over simulated engines of its own on core 1: the same engine, in a Baton worker or
behind uvicorn. The same load client on core 1 sends each the same number of the same requests, in turns, in an order that rotates.
Baton's nats-server is on core 1, too, and for latencies also on core 0: there it does not take time of the engines' core.
CPU is user + system time of the router's process minus its idle share. Beside each figure stands the time of constant work on core 0,
taken just before. Each round starts all processes anew, in another order: two processes of one router can differ by a tenth for as long
as they live. The page is written after each round, so that a run that is cut short keeps the rounds that were whole. A run in which a request
fails, an answer is short, or a router does not do what the row says, ends with status 1 and adds no figure: Baton's router must have reported of each request that KV moved between its workers. Prompts are prose
that no engine has. The engines of other routers move none, which is no work of their routers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.bench_router import (
    CHECKOUT,
    COMMAND,
    LATENCY_TOKENS,
    LONG_TOKENS,
    NONE_MOVED,
    OTHER_CORE,
    OUT,
    ROUTER_CORE,
    SHORT_TOKENS,
    System,
    await_answers,
    load,
    measure_idle,
    pin,
    running,
    send,
    started,
    wait_for,
    write_part,
)
from bench.handoffs import Moved, check_moved
from bench.kv_bench_page import commit, measuring, median_interval, table
from bench.peer_checks import RunFailed, check_answers, check_decisions, check_legs
from bench.peer_routers import PEERS, Peer
from tests.support.nats_server import free_port

ROUNDS_MIN = 5
DECISIONS_LISTED = 100
RATE = 200
SETTLE_S = 1.0
"""Until KV events of a conversation's first turn have arrived everywhere."""
CALIBRATION = 1_000_000
READY_S_MAX = 120.0
STREAM_TOKENS = 128
CONVERSATIONS = 16
ALONE = "engines alone"
PROFILED_ROUTER = "bench/profiled_router.py"
PROFILED_CONNECTIONS = 16
PROFILED_IDLE_S = 3.0
PROFILED_REQUESTS = 300
WARM_UP_REQUESTS = 200
CUT = 128 + signal.SIGTERM
"""Exit status of a run that was told to end; its processes end with it."""


@dataclass(frozen=True)
class Row:
    """One line of the table. A figure is the CPU of a number of requests or events, or an added latency."""

    label: str
    pairs: int
    """Prefill engines, and as many decode engines."""
    options: dict[str, Any]
    unit: str
    figure: Callable[[dict[str, Any], float], float]
    """From the client's result and the router's CPU seconds."""
    requests: int = 0
    turns: bool = False
    """Next turns of conversations; each run begins with their first ones, which do not count."""
    nats_core: str = OTHER_CORE
    """Where Baton's nats-server runs."""

    @property
    def run(self) -> tuple[str, str]:
        """Rows of which this is the same are figures of one run."""
        return json.dumps(self.options), self.nats_core


def cpu_us(result: dict[str, Any], cpu_s: float) -> float:
    return cpu_s / result["sent"] * 1e6


def cpu_s_of_events(result: dict[str, Any], cpu_s: float) -> float:
    return cpu_s / (result["sent"] * (STREAM_TOKENS + 1)) * 1e5


def latency(part: str) -> Callable[[dict[str, Any], float], float]:
    return lambda result, _cpu_s: float(result["latency_ms"][part])


def make_rows(quick: bool) -> list[Row]:
    size = 1 if quick else 3
    rows = [
        Row(
            f"{tokens:,} tokens, {connections} connection{'s' if connections > 1 else ''}",
            1,
            {"connections": connections, "requests": count * size, "prompt_tokens": tokens},
            "µs/request",
            cpu_us,
            count * size,
        )
        for tokens, connections, count in (
            (SHORT_TOKENS, 64, 600),
            (SHORT_TOKENS, 1, 200),
            *([] if quick else [(500, 64, 300)]),
            (2000, 64, 128),
            (2000, 1, 64),
            (LONG_TOKENS, 16, 48),
            *([] if quick else [(30_000, 4, 16)]),
        )
    ]
    for streams in (64,) if quick else (16, 64, 256, 1024):
        count = max(2 * streams, 512 * size)
        label = f"{streams} streams of {STREAM_TOKENS} tokens"
        many = {"connections": streams, "requests": count, "stream": True, "max_tokens": STREAM_TOKENS}
        rows.append(Row(label, 1, many, "s/100k events", cpu_s_of_events, count))
    paced = {"connections": 64, "rate": RATE, "seconds": 3.0 * size, "max_tokens": LATENCY_TOKENS, "warm_up": 0.5}
    for where, core in (("", ROUTER_CORE), (", nats-server with the engines", OTHER_CORE))[: 1 if quick else 2]:
        for part in ("p50", "p99"):
            label = f"latency at {RATE} requests/s, {part}{where}"
            rows.append(Row(label, 1, paced, "ms", latency(part), nats_core=core))
    if quick:  # Next turns need a fleet of their own.
        return rows
    turns = {
        "connections": 8,
        "conversations": CONVERSATIONS,
        "turns_from": 1,
        "turns_to": 8,
        "prompt_tokens": LONG_TOKENS,
    }
    rows.append(
        Row(f"{LONG_TOKENS:,} tokens, next turns", 2, turns, "µs/request", cpu_us, CONVERSATIONS * 7, turns=True)
    )
    return rows


@dataclass
class Contender:
    """A router that runs, or the engines without one."""

    name: str
    port: int
    system: System
    served: Callable[[], list[dict[str, int]]] | None = None
    """Counts of its engines; None for Baton, which keeps decisions."""
    is_direct: bool = False
    then_port: int = 0

    def measure(self, row: Row, number: int) -> tuple[float, dict[str, Any]]:
        """CPU seconds of the router in the round of this number, and the client's result. Raises RunFailed."""
        seed = f"{number} {row.label}"
        options = {"prompt_tokens": SHORT_TOKENS, "max_tokens": 16, "seed": seed, **row.options}
        if self.system.nats_pid:
            pin(self.system.nats_pid, row.nats_core)
        if self.then_port:
            options["then_port"] = self.then_port
        if row.turns:
            self.send(row.options["conversations"], **options | {"turns_from": 0, "turns_to": 1})
            time.sleep(SETTLE_S)
        served = self.served() if self.served else []
        before, begun_at = self.system.cpu_s(), time.monotonic()
        result = self.send(row.requests, **options)
        cpu_s = 0.0 if self.is_direct else self.system.worked_s(before, begun_at)
        if self.served is not None:
            result["repeated_legs"] = check_legs(served, self.served(), result["sent"])
        elif not self.is_direct:
            check_decisions(self.decisions(), min(result["sent"], DECISIONS_LISTED), next_turns=row.turns)
        return cpu_s, result

    def send(self, expected: int, **options: Any) -> dict[str, Any]:
        """The client's result, and with ``moved`` what Baton's workers moved. 0: as many are ``expected`` as were sent. Raises
        RunFailed.
        """
        handoffs = self.system.handoffs
        since = handoffs.seen if handoffs is not None else 0
        result = load(self.port, **options)
        check_answers(result, expected)
        if handoffs is not None:
            result["moved"] = check_moved(handoffs.reported(since, result["sent"]), result["sent"])
        return result

    def decisions(self) -> list[dict[str, Any]]:
        """The newest that Baton keeps."""
        return get(f"http://127.0.0.1:{self.port}/baton/decisions?limit={DECISIONS_LISTED}")["decisions"]


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


class Engines(System):
    """Simulated engines behind uvicorn."""

    def start_engines(self, pairs: int) -> dict[str, list[int]]:
        ports: dict[str, list[int]] = {"prefill": [], "decode": []}
        for _ in range(pairs):
            for role, those in ports.items():
                those.append(free_port())
                self.start(OTHER_CORE, "-m", "bench.direct_engine", f"--port={those[-1]}", f"--role={role}")
        for those in ports.values():
            for port in those:
                wait_for(f"http://127.0.0.1:{port}/health")
        return ports


@contextlib.contextmanager
def engines(directory: Path, pairs: int) -> Iterator[tuple[Engines, dict[str, list[int]]]]:
    system = Engines(directory, "")
    try:
        yield system, system.start_engines(pairs)
    finally:
        system.stop()


@contextlib.contextmanager
def peer_running(peer: Peer, pairs: int) -> Iterator[Contender]:
    with tempfile.TemporaryDirectory() as scratch, engines(Path(scratch), pairs) as (system, ports):
        # With a choice, by what is cached where; without one, what costs least.
        policy = "cache_aware" if pairs > 1 else "round_robin"
        command = peer.command(system.port, free_port(), ports["prefill"], ports["decode"], policy)
        system.router_pid = system.launch(ROUTER_CORE, command)
        every = [port for those in ports.values() for port in those]

        def served() -> list[dict[str, int]]:
            return [get(f"http://127.0.0.1:{port}/bench/served") for port in every]

        await_answers(system.port)
        yield Contender(peer.name, system.port, system, served)


@contextlib.contextmanager
def direct_running() -> Iterator[Contender]:
    """Both engines without a router: the client sends each request to one and then to the other."""
    with tempfile.TemporaryDirectory() as scratch, engines(Path(scratch), 1) as (system, ports):
        system.router_pid = os.getpid()
        prefill, decode = ports["prefill"][0], ports["decode"][0]
        yield Contender(ALONE, prefill, system, is_direct=True, then_port=decode)


@contextlib.contextmanager
def baton_running(name: str, checkout: Path, pairs: int) -> Iterator[Contender]:
    with started(pairs, checkout) as system:
        yield Contender(name, system.port, system)


def calibrate() -> float:
    """CPU milliseconds of constant work on the router's core, now."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {int(ROUTER_CORE)})
    begun = time.thread_time()
    sum(range(CALIBRATION))
    took_ms = (time.thread_time() - begun) * 1e3
    os.sched_setaffinity(0, cores)
    return took_ms


@dataclass
class Figures:
    """Of one row and one router, one of each per round."""

    values: list[float] = field(default_factory=list)
    loops_ms: list[float] = field(default_factory=list)
    repeated_legs: int = 0
    """Legs that the router sent again by itself, of all rounds."""
    moved: Moved = NONE_MOVED
    """By Baton's workers, of all rounds."""


Measured = dict[str, dict[str, Figures]]
"""By row and router."""
Show = Callable[[list[str]], None]
"""Shows a page, or what is measured of it so far."""


def measure(rows: Sequence[Row], contenders: Sequence[Contender], number: int, measured: Measured) -> None:
    """One round of all rows of one fleet, the routers in this order. Raises RunFailed."""
    runs = {row.run: [same for same in rows if same.run == row.run] for row in rows}
    for of_run in runs.values():
        for contender in contenders:
            if contender.is_direct and of_run[0].unit != "ms":
                continue
            loop_ms = calibrate()
            try:
                cpu_s, result = contender.measure(of_run[0], number + 1)
            except RunFailed as failed:
                raise RunFailed(f"{contender.name}, {of_run[0].label}: {failed}") from failed
            for row in of_run:
                figures = measured.setdefault(row.label, {}).setdefault(contender.name, Figures())
                figures.values.append(row.figure(result, cpu_s))
                figures.loops_ms.append(loop_ms)
                figures.repeated_legs += result.get("repeated_legs", 0)
                figures.moved += result.get("moved", NONE_MOVED)
                print(f"{row.label}: {contender.name}: {figures.values[-1]:.3f} {row.unit}", file=sys.stderr)


def without_engines(row: Row, by_router: dict[str, Figures]) -> dict[str, Figures]:
    """Of a latency, what a router adds: the latency of the engines alone, in the same round, is taken off."""
    alone = by_router.get(ALONE)
    if alone is None:
        return by_router
    return {
        name: Figures(
            [value - base for value, base in zip(figures.values, alone.values, strict=True)], figures.loops_ms
        )
        for name, figures in by_router.items()
        if figures is not alone
    }


def shown(values: Sequence[float]) -> str:
    """The median, and the least and the greatest."""
    digits = 3 if abs(statistics.median(values)) < 10 else 0
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def ratio(values: Sequence[float], others: Sequence[float]) -> str:
    """The median of the rounds' ratios, with its interval; empty where a difference of latencies is not positive."""
    if min(others) <= 0:
        return ""
    ratios = [value / other for value, other in zip(values, others, strict=True)]
    low, high = median_interval(ratios)
    return f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"


def repeated_in(rows: Sequence[Row], measured: Measured, names: Sequence[str]) -> str:
    """Which routers sent legs again, and how many."""
    counts = {name: sum({row.run: measured[row.label][name].repeated_legs for row in rows}.values()) for name in names}
    said = [f"{name} {count}" for name, count in counts.items() if count]
    return f"Legs that a router sent again by itself, in all rounds: {', '.join(said) or 'none'}."


def page(rows: Sequence[Row], measured: Measured, names: Sequence[str], calls: dict[str, list[float]]) -> list[str]:
    """With the rows and rounds that are measured so far."""
    baton = names[0]
    lines = []
    rows = [row for row in rows if row.label in measured]
    for row in rows:
        by_router = without_engines(row, measured[row.label])
        label = f"{row.label.replace('latency', 'added latency')}, {row.unit}"
        figures = [
            f"{shown(by_router[name].values)} @ {statistics.median(by_router[name].loops_ms):.1f}" for name in names
        ]
        ratios = [ratio(by_router[baton].values, by_router[name].values) for name in names[1:]]
        rounds = len(measured[row.label][baton].values)
        lines.append([label, *figures, *ratios, rounds, measured[row.label][baton].moved.said])
    head = " | ".join(["", *names, *(f"{baton} / {name}" for name in names[1:]), "rounds", f"handoffs of {baton}"])
    called = "; ".join(f"{name} {shown(counted)}" for name, counted in calls.items())
    return [
        "## Beside other routers",
        "",
        "sglang-router and vllm-router, from PyPI, in their P/D modes, run beside Baton's router on core 0, each over simulated engines of its own on",
        "core 1: the same engine in a Baton worker, or behind uvicorn. With one engine of each role they place round robin, else by their",
        "`cache_aware` policy. All get the same requests from the same client, which checks the number of tokens in each answer; of next turns the",
        "predicted cached tokens are those that the engine had. Their circuit breakers are off, and they may send a leg again by themselves.",
        "",
        f"Kernel {platform.release()}. Medians of the rounds, each of which starts all processes anew, with the least and the greatest, and after @",
        "the CPU milliseconds of constant work on the router's core before each run (median). Ratios are medians of the rounds'",
        f"ratios, with the sign test's interval (at 5 rounds the least and the greatest: 94 %). A row with fewer than {ROUNDS_MIN} rounds is of a run",
        "that was cut short. Handoffs are the requests of which KV moved",
        "between Baton's workers, of all rounds; the engines of other routers count a prefill and a decode leg for each request, and move none.",
        "",
        *table(head, lines),
        repeated_in(rows, measured, names),
        "",
        f"Calls per request of {SHORT_TOKENS} tokens ({PROFILED_CONNECTIONS} connections, cProfile, what an idle router calls taken off): "
        + (called or "not counted"),
        "",
    ]


def calls_per_request(checkout: Path, requests: int, rounds: int) -> list[float]:
    """Of a router of Baton, Python's and others, without what it calls while it is idle. Raises RunFailed."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "calls"

        def calls(system: System, work: Callable[[], Any]) -> tuple[int, float]:
            path.unlink(missing_ok=True)
            os.kill(system.router_pid, signal.SIGUSR1)
            begun_at = time.monotonic()
            work()
            os.kill(system.router_pid, signal.SIGUSR2)
            took_s = time.monotonic() - begun_at
            deadline = time.monotonic() + READY_S_MAX
            while not path.exists():
                if time.monotonic() > deadline:
                    raise RunFailed(f"the profiled router wrote no count within {READY_S_MAX} s")
                time.sleep(0.01)
            return int(path.read_text()), took_s

        with running(1, checkout, (str(CHECKOUT / PROFILED_ROUTER), str(path))) as system:
            options = {"connections": PROFILED_CONNECTIONS, "prompt_tokens": SHORT_TOKENS, "requests": requests}
            send(system, seed="warm-up", **options)
            idle, idle_s = calls(system, lambda: time.sleep(PROFILED_IDLE_S))
            counted = []
            for number in range(rounds):
                try:
                    count, took_s = calls(system, partial(send, system, seed=number, **options))
                except RunFailed as failed:
                    raise RunFailed(f"{failed}\n{system.router_log()}") from failed
                counted.append((count - idle / idle_s * took_s) / requests)
            return counted


def run(arguments: argparse.Namespace, show: Show) -> None:
    """``show`` gets the page after each round of each fleet, and at the end. Raises RunFailed, CalledProcessError."""
    rounds = max(ROUNDS_MIN, arguments.rounds)
    rows = [row for row in make_rows(arguments.quick) if arguments.rows in row.label]
    peers = () if arguments.no_peers else PEERS
    for peer in peers:
        peer.install()
    batons = [("Baton", CHECKOUT)] + [(f"Baton in {other.name}", other.resolve()) for other in arguments.also]
    names = [name for name, _ in batons] + [peer.name for peer in peers]
    measured: Measured = {}
    for pairs in sorted({row.pairs for row in rows}):
        of_fleet = [row for row in rows if row.pairs == pairs]
        for number in range(rounds):
            begun_at = time.monotonic()
            starts = [baton_running(name, path, pairs) for name, path in batons]
            starts += [peer_running(peer, pairs) for peer in peers]
            if any(row.unit == "ms" for row in of_fleet):
                starts.append(direct_running())
            measure_round(of_fleet, starts, number, measured)
            show(page(rows, measured, names, {}))
            took_s = time.monotonic() - begun_at
            print(f"{pairs}P+{pairs}D, round {number + 1} of {rounds}: {took_s:.0f} s", file=sys.stderr)
    begun_at = time.monotonic()
    calls = [calls_per_request(path, PROFILED_REQUESTS, ROUNDS_MIN) for _, path in batons]
    print(f"calls: {time.monotonic() - begun_at:.0f} s", file=sys.stderr)
    show(page(rows, measured, names, dict(zip(names, calls, strict=False))))


def measure_round(
    rows: Sequence[Row], starts: Sequence[AbstractContextManager[Contender]], number: int, measured: Measured
) -> None:
    """Start all processes of a fleet, measure, and end them. Raises RunFailed."""
    with contextlib.ExitStack() as stack:
        contenders = [stack.enter_context(starts[(number + place) % len(starts)]) for place in range(len(starts))]
        measure_idle([contender.system for contender in contenders if not contender.is_direct])
        for contender in contenders:
            contender.send(WARM_UP_REQUESTS, connections=16, requests=WARM_UP_REQUESTS, seed="warm-up")
        measure(rows, contenders, number, measured)


def main(argv: list[str] | None = None, run: Callable[[argparse.Namespace, Show], None] = run) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="fewer rows and requests, no next turns: less than ten minutes"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS_MIN, help=f"at least {ROUNDS_MIN}")
    parser.add_argument("--rows", default="", help="only rows whose label contains this")
    parser.add_argument("--also", type=Path, action="append", default=[], help="another checkout of Baton, set up")
    parser.add_argument("--no-peers", action="store_true", help="only Baton, with --also")
    parser.add_argument(
        "--out", type=Path, help="the page; with all rows and no other checkout docs/benchmarks/router.md"
    )
    arguments = parser.parse_args(argv)
    is_whole = not (arguments.rows or arguments.also or arguments.no_peers)
    out = arguments.out or (OUT if is_whole else None)
    made_by = f"`{COMMAND} PEERS=1{' ARGS=--quick' if arguments.quick else ''}`, commit {commit()}"
    newest: list[str] = []
    with measuring() as measured:

        def show(lines: list[str]) -> None:
            newest[:] = lines
            if out:
                write_part("peers", lines, measured.said, made_by, out)

        try:
            run(arguments, show)
        except (RunFailed, subprocess.CalledProcessError) as failed:
            sys.exit(f"no more figures: {failed}")
    print("\n".join(newest))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(CUT))
    main()
