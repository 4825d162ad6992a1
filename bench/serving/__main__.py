"""What a user would pick instead, beside Baton: ``make bench-serving [ARGS=--quick] [GPU=1]``.

Real engines, one load client, one run. In each round every system starts anew, alone on the machine, and serves all loads; the
order of the systems rotates. A run in which a request fails, or in which a system that hands every prompt over moves no KV for one,
ends the benchmark with status 1 and writes no page.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import httpx
import msgspec

from bench.kv_bench_page import commit, measuring, wrapped
from bench.peer_checks import RunFailed
from bench.peer_routers import PEERS
from bench.seeds.engines import Engines, engines
from bench.serving.loads import (
    CPU,
    GPU,
    QUICK,
    Conversations,
    Job,
    Load,
    Random,
    Result,
    Size,
    closed_loads,
    rate_loads,
)
from bench.serving.page import Limits, Run, Runs, draw, lines
from bench.serving.systems import FLEETS, LOG_SHOWN_CHARS, Contender, Fleet

TTFT_TIMES, TPOT_TIMES = 5.0, 3.0
"""The SLO: times what one engine needs for a request of this length alone."""
ALONE_REQUESTS, ALONE_TOKENS = 3, 16
IDLE_S = 3.0
ROUNDS_MIN = 2
"""With fewer, a figure has no interval."""
CLIENT = [sys.executable, "-m", "bench.serving.client"]


class Client:
    """The process that sends all requests."""

    def __init__(self, process: subprocess.Popen[str], on: Engines) -> None:
        self._process = process
        self._on = on
        self._seed = 0

    def run(self, at: Contender, run: Random | Conversations) -> Result:
        """Prompts are new in each run. Raises RunFailed."""
        self._seed += 1
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = Job(at.url, at.model, at.headers, str(self._on.model_dir), self._seed, run)
        self._process.stdin.write(msgspec.json.encode(job).decode() + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RunFailed("the load client has ended; what it said is above")
        result = msgspec.json.decode(line, type=Result)
        if result.failed or not result.answers:
            raise RunFailed(result.failed or "no request was answered")
        return result


@contextmanager
def client(on: Engines) -> Iterator[Client]:
    with (
        tempfile.NamedTemporaryFile() as log,
        subprocess.Popen(CLIENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RunFailed(f"{' '.join(CLIENT)} did not start")
            yield Client(process, on)
        except RunFailed:
            print(Path(log.name).read_text(errors="replace")[-LOG_SHOWN_CHARS:], file=sys.stderr)
            raise
        finally:
            process.kill()


class Bench:
    """All rounds."""

    def __init__(self, sending: Client, size: Size, loads: Sequence[Load], fleets: Sequence[Fleet] = FLEETS) -> None:
        """``loads``: the closed ones; rising rates are added to them. The first fleet sets the SLO and the rates."""
        self.runs: Runs = {}
        self.idle: dict[str, list[dict[str, float]]] = {}
        """CPU seconds per second of what each system consists of, while nothing is asked."""
        self.limits: dict[str, Limits] = {}
        """The SLO, by load; measured at first."""
        self.loads = list(loads)
        self._fleets = fleets
        self._client = sending
        self._size = size

    def round(self, on: Engines, number: int) -> None:
        """Raises RunFailed."""
        for place in range(len(self._fleets)):
            fleet = self._fleets[(number + place) % len(self._fleets)]
            print(f"round {number + 1}: starting {', '.join(fleet.names)}", file=sys.stderr)
            with fleet.running(on) as contenders:
                for one in contenders:
                    self._client.run(
                        one, msgspec.structs.replace(self._size.random, requests=8, at_once=2, answer_tokens=16)
                    )
                if not self.limits:
                    self._calibrate(contenders[0])
                for one in contenders:
                    self.idle.setdefault(one.name, []).append(idle(one))
                for turn, load in enumerate(self.loads):
                    for at in range(len(contenders)):
                        self._measure(contenders[(number + turn + at) % len(contenders)], load)

    def _calibrate(self, one: Contender) -> None:
        """The SLO of each load, and the rates."""
        for load in self.loads:
            alone = Random(load.run.prompt_tokens_mean, ALONE_TOKENS, ALONE_REQUESTS, at_once=1)
            found = self._client.run(one, alone).answers
            self.limits[load.kind] = Limits(
                TTFT_TIMES * median(answer.ttft_s for answer in found),
                TPOT_TIMES * median(answer.tpot_s for answer in found),
            )
        self.limits["rate"] = self.limits["random"]
        fastest = self._client.run(one, self._size.random)
        self.loads += rate_loads(self._size, len(fastest.answers) / fastest.took_s)

    def _measure(self, one: Contender, load: Load) -> None:
        counts, cpu_s = one.counts(), one.cpu_s()
        result = self._client.run(one, load.run)
        used_s = one.used_s(cpu_s)
        counted = one.counts().since(counts)
        asked = len(result.answers)
        if one.hands_over and not (counted.handoffs >= asked and counted.handoff_bytes):
            raise RunFailed(
                f"{one.name}, {load.name}: hands every prompt over, but moved KV for {counted.handoffs:.0f} of {asked} requests"
            )
        run = Run(result, counted, used_s, self.limits[load.kind])
        self.runs.setdefault(load.name, {}).setdefault(one.name, []).append(run)
        print(f"{load.name}: {one.name}: {run.said()}", file=sys.stderr)


def idle(one: Contender) -> dict[str, float]:
    before, begun_at = one.cpu_s(), time.monotonic()
    time.sleep(IDLE_S)
    used_s, took_s = one.used_s(before), time.monotonic() - begun_at
    return {what: used / took_s for what, used in used_s.items()}


def measure(on: Engines, size: Size, rounds: int, s_max: float) -> Bench:
    """As many of the rounds as end within ``s_max``, ``ROUNDS_MIN`` at least. Raises RunFailed."""
    with client(on) as sending:
        bench = Bench(sending, size, closed_loads(size))
        begun_at = time.monotonic()
        for number in range(rounds):
            round_at = time.monotonic()
            bench.round(on, number)
            ended_at = time.monotonic()
            print(f"round {number + 1} took {(ended_at - round_at) / 60:.1f} minutes", file=sys.stderr)
            if number + 1 >= ROUNDS_MIN and ended_at - begun_at + (ended_at - round_at) > s_max:
                break
    return bench


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.serving", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of short loads, 5 minutes; not precise")
    parser.add_argument("--rounds", type=int, default=0, help="at most; 3 in the full form")
    parser.add_argument(
        "--minutes", type=float, default=30.0, help=f"begin no round that would end later, after {ROUNDS_MIN} rounds"
    )
    parser.add_argument("--gpu", action="store_true", help="engines on one NVIDIA GPU, or two")
    parser.add_argument("--out", type=Path, help="the page; its pictures are put beside it")
    arguments = parser.parse_args(argv)
    out = arguments.out or Path(f"docs/benchmarks/serving{'-gpu' if arguments.gpu else ''}.md")
    size = QUICK if arguments.quick else GPU if arguments.gpu else CPU
    rounds = arguments.rounds or size.rounds
    begun_at = time.monotonic()
    try:
        for peer in PEERS:
            peer.install()
        with measuring() as measured, engines(on_gpus=arguments.gpu) as on:
            bench = measure(on, size, rounds, arguments.minutes * 60)
    except (RunFailed, subprocess.CalledProcessError, httpx.HTTPError) as failed:
        sys.exit(f"no figures: {failed}")
    short = "Short form on this machine: its figures are not precise. " if arguments.quick else ""
    said = f"{short}{measured.said} Commit {commit()}; {(time.monotonic() - begun_at) / 60:.0f} minutes."
    out.parent.mkdir(parents=True, exist_ok=True)
    pictures = draw(bench.runs, bench.loads, out)
    page = lines(bench.runs, bench.loads, bench.idle, bench.limits, on.said, said, pictures)
    out.write_text("\n".join(wrapped(page)))
    print(out.read_text())


if __name__ == "__main__":
    main()
