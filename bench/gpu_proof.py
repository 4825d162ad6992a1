"""Baton on one NVIDIA GPU, shown in one command and ten minutes: ``make gpu-proof [ON_CPU=1]``.

``baton up`` with two engines that share the GPU, a request explained, handoffs and read-back that give the tokens of one engine, models with
windows and with a state, handoffs beside vLLM's connector, and P/D beside engines that do both. Writes one page with the machine's name. A
part that fails is told in it, and the command ends with status 1; the others run. With ``ON_CPU=1`` it rehearses itself on CPU engines and
says so: such a page shows nothing about GPUs.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from bench.kv_bench_fleet import VOCABULARY
from bench.kv_bench_page import Measured, commit, machine, measuring, page, table
from bench.peer_checks import RunFailed
from bench.seeds.engines import engines
from bench.serving import __main__ as serving
from bench.serving.loads import GPU, QUICK, closed_loads
from bench.serving.page import load_table
from bench.serving.systems import ENGINES_APART, ENGINES_OF_BOTH
from services.launcher.system.machine import gpus, nvidia_smi
from services.worker.tiny_model import TINY_MODEL
from tests.support.kv_driver import BLOCK
from tests.support.model_families import make_model
from tests.support.system import System, baton

PROOF_S_MAX = 600.0
"""Parts that would begin later are not run."""
READY_S_MAX = 240.0
PART_S_MAX = 300.0
ON_CPU = bool(os.environ.get("ON_CPU"))
PROMPTS = (40, 333, 1000, 3000)
"""Tokens of the prompts that are handed over."""
TOKENS, HISTORY, LONG_ANSWER, NEXT = 32, 500, 200, 100
EXACT_ARGS = "--dtype float32" if ON_CPU else "--dtype float32 --attention-backend TRITON_ATTN --enforce-eager"
"""Engines that compute the same tokens whatever they batch. On a GPU only this backend computes with float32."""
SEEN = {"WORKER_MAX_MODEL_LEN": "4096", "WORKER_KV_FETCH_MIN_TOKENS": str(BLOCK), "ROUTER_FETCH_TOKENS_MIN": str(BLOCK)}
"""Short prompts are fetched, too."""
OTHER_MODELS = ("gemma-3", "granite-4")
"""With windows, and with a state."""
REFUSAL = re.compile(r"The Baton connector cannot exchange this engine's KV: [^\n]*")


@dataclass
class Model:
    """A model that two engines serve, and what was found of it."""

    name: str
    arguments: Sequence[str] = ()
    """Of ``baton up``."""
    equal: int = 0
    """Prompts whose answer after a handoff was that of one engine."""
    handoffs: int = 0
    handoff_bytes: int = 0
    read_back_tokens: int = 0
    """That the prefill engine read from the decode engine before the second turn."""
    turn_is_equal: bool = False
    explained: list[str] = field(default_factory=list, repr=False)
    refused: str = ""

    @property
    def is_proved(self) -> bool:
        return self.equal == len(PROMPTS) and self.turn_is_equal and self.read_back_tokens > 0 and self.handoffs > 0

    def prove(self) -> None:
        """Start the system and ask it. Raises RunFailed."""
        arguments = ["--kv-cache", "512M", *self.arguments, "--engine-args", EXACT_ARGS]
        with tempfile.TemporaryDirectory() as folder:
            try:
                with System(Path(folder), *arguments, env=SEEN) as system:
                    system.wait_ready(READY_S_MAX)
                    system.until_exact(2)
                    self._ask(Asker(system))
            except (AssertionError, httpx.HTTPError) as failed:
                if found := REFUSAL.search(str(failed)):
                    self.refused = found[0]
                    return
                raise RunFailed(f"{self.name}: {str(failed)[:2000]}") from failed

    def _ask(self, asker: Asker) -> None:
        reads, read_bytes = asker.reads()
        for tokens in PROMPTS:
            prompt = asker.prompt(tokens)
            self.equal += asker.alone(prompt) == asker.complete(prompt, "disaggregated")
        now, now_bytes = asker.reads()
        self.handoffs, self.handoff_bytes = int(now - reads), int(now_bytes - read_bytes)
        _code, said, _error = baton("explain", "--url", asker.system.endpoint, s_max=60.0)
        self.explained = [line.rstrip() for line in said.rstrip().splitlines()]
        history = asker.prompt(HISTORY)
        history += asker.complete(history, "disaggregated", LONG_ANSWER)
        history += asker.prompt(NEXT)
        received = asker.received_by_prefill()
        # Placement would let the decode worker, which has most of the prompt, compute the rest.
        told = {"prefill_worker": asker.worker("prefill"), "sources": [asker.worker("decode")]}
        self.turn_is_equal = asker.alone(history) == asker.complete(history, "disaggregated", baton=told)
        self.read_back_tokens = int(asker.received_by_prefill() - received)

    def row(self) -> list[object]:
        if self.refused:
            return [self.name, f"refused: {self.refused}", "", "", "", ""]
        return [
            self.name,
            f"{self.equal} of {len(PROMPTS)}",
            self.handoffs,
            f"{self.handoff_bytes / 1e6:.1f}",
            "equal" if self.turn_is_equal else "differs",
            self.read_back_tokens,
        ]


class Asker:
    """A client of one system."""

    def __init__(self, system: System) -> None:
        self.system = system
        self._draw = random.Random(54)
        self._model = system.http.get("/v1/models").raise_for_status().json()["data"][0]["id"]

    def prompt(self, tokens: int) -> list[int]:
        return self._draw.choices(VOCABULARY, k=tokens)

    def complete(self, prompt: list[int], mode: str, tokens: int = TOKENS, **fields: Any) -> list[int]:
        """The answer's token ids. Raises httpx.HTTPError."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        asked = {**body, "return_token_ids": True, **fields}
        found = self.system.http.post("/v1/completions", json=asked, headers={"x-baton-mode": mode}).raise_for_status()
        token_ids: list[int] = found.json()["choices"][0]["token_ids"]
        return token_ids

    def alone(self, prompt: list[int]) -> list[int]:
        """By one engine, without anything that is cached."""
        return self.complete(prompt, "aggregated", cache_salt="alone")

    def worker(self, role: str) -> str:
        """The id of the worker with this role."""
        return next(name for name, one in self.system.fleet().items() if one["record"]["role"] == role)

    def reads(self) -> tuple[float, float]:
        metrics = self.system.settled_metrics()
        reads = metrics.sum("baton_worker_kv_reads_total", outcome="done")
        return reads, metrics.sum("baton_worker_kv_received_bytes_total")

    def received_by_prefill(self) -> float:
        metrics = self.system.settled_metrics()
        return metrics.sum("baton_worker_prompt_tokens_total", role="prefill", source="received")


# ---- the parts of the page


def prove_up() -> list[str]:
    model = Model(TINY_MODEL)
    model.prove()
    if not model.is_proved:
        raise RunFailed(f"{model}")
    return [
        "## `baton up` with two engines, a request explained, handoff and read-back",
        "",
        f"A prefill and a decode worker of `{TINY_MODEL}`{'' if ON_CPU else ' on one GPU'}, `{EXACT_ARGS}`;",
        f"prompts of {', '.join(map(str, PROMPTS))} tokens, each answer beside that of one engine without anything cached.",
        f"Read-back: a second turn behind {HISTORY} tokens and an answer of {LONG_ANSWER}.",
        "",
        *model_table([model]),
        "The last of these requests, by `baton explain`:",
        "",
        "```text",
        *model.explained,
        "```",
        "",
    ]


def prove_models() -> list[str]:
    models = []
    with tempfile.TemporaryDirectory() as folder:
        for name in OTHER_MODELS:
            models.append(Model(name, ["--model", str(make_model(name, Path(folder)))]))
            models[-1].prove()
    if wrong := [one.name for one in models if not (one.is_proved or one.refused)]:
        raise RunFailed(f"answers of {', '.join(wrong)} differ, or nothing was handed over: {models}")
    return [
        "## Models with windows and with a state",
        "",
        "Tiny models with random weights. The KV layout refuses those whose KV it cannot describe.",
        "",
        *model_table(models),
    ]


def model_table(models: Sequence[Model]) -> list[str]:
    head = "model | answers equal | handoffs | MB | second turn | tokens read back"
    return table(head, [model.row() for model in models])


def prove_speed() -> list[str]:
    """The short form of ``make bench-kv``."""
    module = ["bench.bench_kv", "--only", "handoff"] if ON_CPU else ["bench.bench_kv_gpu"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kv.md"
        command = [sys.executable, "-m", *module, "--quick", "--out", str(out)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=PART_S_MAX)
        except subprocess.CalledProcessError as failed:
            raise RunFailed(f"{' '.join(command[1:])}: {failed.stderr[-2000:]}") from failed
        except subprocess.TimeoutExpired as failed:
            raise RunFailed(f"{' '.join(command[1:])} took more than {PART_S_MAX:.0f} s") from failed
        found = out.read_text()
    body = found.partition("<!-- handoff -->")[2].strip()
    if not body:
        raise RunFailed(f"{' '.join(command[1:])} wrote no handoffs")
    return [
        "## Handoffs beside vLLM's connector",
        "",
        f"`python {' '.join(command[1:-2])}`: TTFT and second token beside upstream's connector, and GB/s",
        "beside a plain read.",
        "",
        *body.replace("\n## ", "\n### ").splitlines(),
        "",
    ]


def prove_goodput() -> list[str]:
    """As ``make bench-serving``, with one prefill and one decode engine, and two that do both."""
    size = QUICK if ON_CPU else replace(GPU, rates=(0.5, 1.0), rate_s=6.0)
    fleets = (ENGINES_OF_BOTH, ENGINES_APART)
    loads = closed_loads(size)[:1]
    with engines(on_gpus=not ON_CPU) as on, serving.client(on) as sending:
        bench = serving.Bench(sending, size, loads, fleets)
        bench.round(on, 0)
    lines = [
        "## Goodput of P/D beside engines that do both",
        "",
        f"{on.said}.",
        "As `make bench-serving` measures it: the SLO is 5 times the TTFT and 3 times the TPOT of one request alone with",
        "`--both 2`, and rates are shares of what that completes in a closed loop.",
        "",
    ]
    for load in bench.loads:
        lines += [
            f"**{load.name}.** {load.said}",
            f"SLO: {bench.limits[load.kind]}.",
            "",
            *load_table(bench.runs[load.name]),
        ]
    return lines


PARTS: dict[str, Callable[[], list[str]]] = {
    "up": prove_up,
    "models": prove_models,
    "speed": prove_speed,
    "goodput": prove_goodput,
}


def head() -> list[str]:
    if ON_CPU:
        return [
            "# Rehearsal of the GPU proof, on a CPU",
            "",
            "**This is a rehearsal: `make gpu-proof ON_CPU=1` ran the proof's own code with CPU engines.**",
            "It shows nothing about GPUs. `make gpu-proof` itself has not run on a GPU yet.",
            "",
            f"{machine()}, commit {commit()}.",
        ]
    names = nvidia_smi("--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    return [
        "# Baton on one GPU",
        "",
        f"`make gpu-proof` on {machine()}, commit {commit()}. GPUs: {'; '.join(names)}; the first is used.",
    ]


def run(name: str, part: Callable[[], list[str]], begun_at: float) -> tuple[Measured, bool]:
    """One part of the page, and whether it held."""
    with measuring() as measured:
        part_at = time.monotonic()
        if part_at - begun_at > PROOF_S_MAX:
            measured.lines = [f"Part {name}: not run, because {PROOF_S_MAX / 60:.0f} minutes were over.", ""]
            return measured, False
        try:
            measured.lines, holds = part(), True
        except RunFailed as failed:
            measured.lines, holds = [f"Part {name} FAILED:", "", "```text", str(failed), "```", ""], False
        measured.said = f"{measured.said} Took {time.monotonic() - part_at:.0f} s."
    return measured, holds


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.gpu_proof", description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--out", type=Path, help="the page")
    arguments = parser.parse_args()
    if not ON_CPU:
        if not (found := gpus()):
            sys.exit("nvidia-smi lists no GPU; ON_CPU=1 rehearses the proof with CPU engines.")
        os.environ["CUDA_VISIBLE_DEVICES"] = found[0]
    out = arguments.out or Path(f"docs/benchmarks/gpu-proof{'-rehearsal' if ON_CPU else ''}.md")
    names, begun_at, held = arguments.only.split(","), time.monotonic(), True
    if unknown := set(names) - PARTS.keys():
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    text = out.read_text() if out.exists() else ""
    out.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        measured, holds = run(name, PARTS[name], begun_at)
        held = held and holds
        text = page(head(), {name: measured}, list(PARTS), text)
        out.write_text(text)
    print(text)
    print(f"{time.monotonic() - begun_at:.0f} s; {out}", file=sys.stderr)
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
