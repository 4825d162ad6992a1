"""Load generators with the APIs that Baton serves. What they prove is that each request completes with the tokens that it asked for;
their figures are measured on whatever machine this is, while it does other work.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from services.worker.tiny_model import TINY_MODEL
from tests.outside.suite import Outcome, Run, Suite, Target, command, environment, last_line, read_json, version_of

REQUEST_S_MAX = 180
REQUESTS, AT_ONCE, PROMPT_TOKENS, ANSWER_TOKENS, TURNS = 24, 4, 256, 32, 4
ENDS_BY_ITSELF = "messages"
"""The API without ``ignore_eos``."""


class LoadGenerator(Suite, ABC):
    """One suite: the same load over several APIs."""

    name: str
    apis: ClassVar[Mapping[str, Sequence[str]]]
    """Arguments by API."""
    run_s_max = 1500.0

    @property
    def what(self) -> str:
        return (
            f"`{self.name}` with {REQUESTS} synthetic prompts of {PROMPT_TOKENS} tokens, {ANSWER_TOKENS} tokens each, "
            f"{AT_ONCE} at once, streamed, over {', '.join(self.apis)}"
        )

    def fetch(self, folder: Path) -> str:
        # With the tokenizer's libraries of this checkout, PyTorch among them: without it, pip takes a build for GPUs.
        return version_of(environment(folder, self.name, on_ours=True), self.name)

    def run(self, folder: Path, target: Target) -> Run:
        return Run([self._outcome(folder, target, api) for api in self.apis])

    def _outcome(self, folder: Path, target: Target, api: str) -> Outcome:
        place = folder / f"{target.name}-{api.replace(' ', '-')}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        log = place / "log"
        program = environment(folder).with_name(self.name)
        arguments = self.arguments(target, place, self.apis[api])
        command([program, *arguments], log, s_max=self.run_s_max / len(self.apis), cwd=place)
        test = f"{api}: {REQUESTS} requests complete"
        report = place / self.report
        if not report.exists():
            return Outcome(test, "failed", last_line(log))
        complete, tokens = self.complete(report)
        passed = complete == REQUESTS and (tokens == REQUESTS * ANSWER_TOKENS or api == ENDS_BY_ITSELF)
        return Outcome(
            test, "passed" if passed else "failed", "" if passed else f"{complete} complete, {tokens} tokens"
        )

    report: str
    """The file that it writes."""

    @abstractmethod
    def arguments(self, target: Target, place: Path, of_api: Sequence[str]) -> list[str]:
        """Of the program."""

    @abstractmethod
    def complete(self, report: Path) -> tuple[int, int]:
        """Requests that completed, and the tokens of their answers."""


class Guidellm(LoadGenerator):
    """vLLM's own."""

    name = "guidellm"
    report = "report.json"
    apis: ClassVar[Mapping[str, Sequence[str]]] = {
        "completions": ("/v1/completions",),
        "chat completions": ("/v1/chat/completions",),
        "responses": ("/v1/responses",),
    }

    def arguments(self, target: Target, place: Path, of_api: Sequence[str]) -> list[str]:
        (path,) = of_api
        options = {
            "backend": f"kind=openai_http,target={target.url},model={TINY_MODEL},request_format={path},timeout={REQUEST_S_MAX}",
            "profile": f"kind=concurrent,streams={AT_ONCE}",
            "constraint": f"kind=max_requests,count={REQUESTS}",
            "tokenizer": f"kind=hf_auto,model={target.model_dir}",
            "data": f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={ANSWER_TOKENS}",
            "output": f"kind=json,path={self.report}",
        }
        given = [part for name, value in options.items() for part in (f"--{name}", value)]
        return ["run", *given, "--disable-console-interactive"]

    def complete(self, report: Path) -> tuple[int, int]:
        metrics = read_json(report)["benchmarks"][0]["metrics"]
        return metrics["request_totals"]["successful"], round(metrics["output_token_count"]["successful"]["total_sum"])


class Aiperf(LoadGenerator):
    """NVIDIA's."""

    name = "aiperf"
    report = "profile_export_aiperf.json"
    apis: ClassVar[Mapping[str, Sequence[str]]] = {
        "completions": ("completions",),
        "conversations of four turns": (
            "chat",
            "--num-sessions",
            str(REQUESTS // TURNS),
            "--session-turns-mean",
            str(TURNS),
        ),
        "responses": ("responses",),
        "messages": ("messages",),
    }

    def arguments(self, target: Target, place: Path, of_api: Sequence[str]) -> list[str]:
        api, *more = of_api
        sizes = ["--synthetic-input-tokens-mean", str(PROMPT_TOKENS), "--output-tokens-mean", str(ANSWER_TOKENS)]
        requests = more or ["--request-count", str(REQUESTS)]
        return [
            *("profile", "--url", target.url, "--model", TINY_MODEL, "--endpoint-type", api, "--streaming"),
            *("--tokenizer", str(target.model_dir), "--use-server-token-count", "--extra-inputs", "ignore_eos:true"),
            *(*sizes, *requests, "--concurrency", str(AT_ONCE), "--random-seed", "1"),
            *("--request-timeout-seconds", str(REQUEST_S_MAX), "--output-artifact-dir", str(place)),
            *("--ui", "none", "--no-gpu-telemetry", "--no-server-metrics", "--workers-max", "2"),
        ]

    def complete(self, report: Path) -> tuple[int, int]:
        found = read_json(report)
        return round(found["request_count"]["avg"]), round(found["total_osl"]["avg"])
