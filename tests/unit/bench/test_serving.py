from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.peer_checks import RunFailed
from bench.peer_routers import PEERS
from bench.serving.client import Speaker, words_of
from bench.serving.loads import CPU, Answer, Load, Random, Result, closed_loads, rate_loads
from bench.serving.page import Limits, Run, Runs, lines
from bench.serving.systems import APART, AUTO, DISAGGREGATED, ENGINE, NAMES, Contender, Counts
from services.worker.tiny_model import ensure_tiny_tokenizer

LIMITS = Limits(ttft_s=0.5, tpot_s=0.05)
GOOD, LATE, SLOW = Answer(0.4, 0.04, 100, 10), Answer(0.6, 0.04, 100, 10), Answer(0.4, 0.06, 100, 10)


def run_of(*answers: Answer, took_s: float = 2.0, computed: float = 100.0, handoffs: float = 0.0) -> Run:
    return Run(Result(list(answers), took_s), Counts(computed, handoffs, handoffs * 1e6), {ENGINE: 0.5}, LIMITS)


def test_a_request_is_good_within_both_limits_only():
    run = run_of(GOOD, LATE, SLOW, GOOD)

    assert run.good_share == 0.5
    assert run.good_per_s == 1.0
    assert run.tokens_per_s == 20.0


def test_what_no_engine_computed_was_cached():
    assert run_of(GOOD, GOOD, computed=50.0).cached_share == 0.75
    assert run_of(GOOD, computed=101.0).cached_share == 0.0


class Sender:
    """A client whose requests are all answered at once."""

    def run(self, _at: Contender, _run: object) -> Result:
        return Result([GOOD, GOOD], 1.0)


def contender(counts: Callable[[], Counts], *, hands_over: bool) -> Contender:
    return Contender("one", "", "", counts, {}, hands_over=hands_over)


@pytest.mark.parametrize(
    ("hands_over", "handoffs", "fails"), [(True, 0, True), (True, 1, True), (True, 2, False), (False, 0, False)]
)
def test_a_run_of_which_a_request_moved_no_kv_means_nothing(hands_over: bool, handoffs: int, fails: bool):
    from bench.serving.__main__ import Bench

    counted = iter([Counts(0.0, 0.0, 0.0), Counts(100.0, handoffs, handoffs * 1e6)])
    load: Load = closed_loads(CPU)[0]
    client: Any = Sender()
    bench = Bench(client, CPU, [load])
    bench.limits[load.kind] = LIMITS

    def measure() -> None:
        bench._measure(contender(lambda: next(counted), hands_over=hands_over), load)

    if fails:
        with pytest.raises(RunFailed, match="moved KV for"):
            measure()
    else:
        measure()
        assert bench.runs[load.name]["one"][0].counts.handoffs == handoffs


def test_the_page_says_where_disaggregated_systems_and_auto_lose():
    loads = [*closed_loads(CPU), *rate_loads(CPU, one_per_s=5.0)]
    runs: Runs = {}
    slow = {"Multi-turn": DISAGGREGATED, "Coding agents": (AUTO,)}
    for load in loads:
        for name in NAMES:
            took_s = 4.0 if name in slow.get(load.name, ()) else 2.0
            runs.setdefault(load.name, {})[name] = [run_of(GOOD, GOOD, took_s=took_s)] * 3
    idle = {name: [{ENGINE: 0.01}] for name in NAMES}
    limits = {load.kind: LIMITS for load in loads}

    page = "\n".join(lines(runs, loads, idle, limits, "Engines", "Measured", ["serving-loads.png"]))

    assert "it loses by more than 3% at: Multi-turn.\n" in page
    behind = "Coding agents (tokens/s, vllm serve), Coding agents (good requests/s, vllm serve)"
    assert f"`--both auto` is behind the best of all systems by more than 3% at: {behind}.\n" in page
    assert "| Random prompts | tokens/s | vllm serve | 1.00 (1.00 to 1.00) | " in page
    assert all(f"## {load.name}\n" in page for load in loads)
    assert page.count(f"| {AUTO} |") >= len(loads)
    assert page.count(f"| {APART} |") >= len(loads)


def test_a_process_that_ends_in_a_run_ends_no_benchmark():
    """A worker's trials end when they have passed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as short:
        own, child = psutil.Process(), psutil.Process(short.pid)
        one = Contender("one", "", "", lambda: Counts(0.0, 0.0, 0.0), {"server": [own], "trial": [child]})
        before = one.cpu_s()
        short.communicate(b"\n")
        sum(range(2_000_000))
        used_s = one.used_s(before)

    assert used_s["server"] > 0.0
    assert used_s["trial"] == 0.0


def test_rates_are_shares_of_what_one_engine_completes():
    rates = [load.run for load in rate_loads(CPU, one_per_s=5.0)]

    assert all(isinstance(run, Random) for run in rates)
    assert [run.per_s for run in rates if isinstance(run, Random)] == [2.0, 3.5, 5.0]


def test_what_agents_read_is_a_hundred_times_what_they_write():
    agents = CPU.agents

    assert 80 <= agents.prompt_tokens_mean / (sum(agents.answer_tokens) / 2) <= 120


def test_text_has_as_many_tokens_as_it_should(tmp_path: Path):
    from tokenizers import Tokenizer

    folder = ensure_tiny_tokenizer(tmp_path)
    said = Speaker(words_of(str(folder)), "seed").say(200)

    assert len(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(said).ids) == pytest.approx(200, abs=1)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.package)
def test_a_router_of_whole_requests_is_told_of_no_roles(peer: Any):
    command = peer.whole_command(8000, 8001, [9001, 9002])

    assert not [word for word in command if "disaggregation" in word or word in ("--prefill", "--decode")]
    assert command[command.index("--policy") + 1] == "cache_aware"
    at = command.index("--worker-urls")
    assert command[at + 1 : at + 3] == ["http://127.0.0.1:9001", "http://127.0.0.1:9002"]
