"""vLLM's tests of prefill/decode systems: edge cases of prefix caches, and the same text as one engine's."""

from __future__ import annotations

from pathlib import Path

from services.worker.tiny_model import TINY_MODEL
from tests.outside.aggregated_door import aggregated_door
from tests.outside.suite import Outcome, Run, Suite, Target, command, last_line, pytest_run
from tests.outside.suites import vllm_sources
from tests.outside.targets import ONE_ENGINE

NIXL = "tests/v1/kv_connector/nixl_integration"


class VllmPd(Suite):
    name = "vllm-pd"
    what = (
        f"vLLM's P/D scripts (`{NIXL}`): `test_disagg_accuracy.py` compares texts with one engine's; "
        "`test_edge_cases.py` primes the engines' caches by requests that are not disaggregated"
    )
    run_s_max = 600.0

    def fetch(self, folder: Path) -> str:
        vllm_sources.sources(folder)
        vllm_sources.python_of(folder)
        return vllm_sources.vllm_version()

    def run(self, folder: Path, target: Target) -> Run:
        accuracy = self._accuracy(folder, target)
        edge_cases = self._edge_cases(folder, target)
        return Run([accuracy, *edge_cases.outcomes], cut_off=edge_cases.cut_off)

    def _accuracy(self, folder: Path, target: Target) -> Outcome:
        """On one engine it writes the texts that the second run compares."""
        cwd, log = vllm_sources.sources(folder), folder / f"accuracy-{target.name}.log"
        mode = "baseline" if target.name == ONE_ENGINE else "disagg"
        script = f"{NIXL}/test_disagg_accuracy.py"
        server = ["--service_url", target.url, "--model_name", TINY_MODEL, "--mode", mode]
        python = vllm_sources.python_of(folder)
        code = command([python, script, *server, "--file_name", folder / "texts"], log, s_max=self.run_s_max, cwd=cwd)
        passed = code == 0
        why = "" if passed else last_line(log)
        return Outcome("test_disagg_accuracy.py", "passed" if passed else "failed", why)

    def _edge_cases(self, folder: Path, target: Target) -> Run:
        with aggregated_door(target.url) as door:
            ports = {"PREFILL_PORT": str(door), "DECODE_PORT": str(door), "PROXY_PORT": target.url.rpartition(":")[2]}
            hosts = dict.fromkeys(("PREFILL_HOST", "DECODE_HOST", "PROXY_HOST"), "127.0.0.1")
            return pytest_run(
                vllm_sources.python_of(folder),
                [f"{NIXL}/test_edge_cases.py"],
                cwd=vllm_sources.sources(folder),
                folder=folder / self.name,
                target=target,
                s_max=self.run_s_max,
                env={**ports, **hosts},
            )
