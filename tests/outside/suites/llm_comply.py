"""llm-comply: compares answers with the OpenAPI documents of OpenAI, Open Responses and Anthropic."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from services.worker.tiny_model import TINY_MODEL
from tests.outside.suite import Outcome, Run, Suite, Target, command, environment, last_line, read_json, version_of

FORMATS = {
    "open-responses": (),
    "openai-chat": (),
    "anthropic": ("--auth-header", "x-api-key", "--no-bearer", "--header", "anthropic-version:2023-06-01"),
}
REQUEST_S_MAX = 180
QUOTED = re.compile(r"(: )[{\[].*[}\]]( is not)", re.DOTALL)
"""The part of an answer that an error quotes."""


class LlmComply(Suite):
    name = "llm-comply"
    what = (
        "`llm-comply` sends requests to responses, chat completions and messages, and checks each answer and each streamed event "
        "against the schemas of Open Responses, OpenAI and Anthropic"
    )
    run_s_max = 1200.0

    def fetch(self, folder: Path) -> str:
        return version_of(environment(folder, "llm-comply"), "llm-comply")

    def run(self, folder: Path, target: Target) -> Run:
        return Run([outcome for form in FORMATS for outcome in self._outcomes(folder, target, form)])

    def _outcomes(self, folder: Path, target: Target, form: str) -> list[Outcome]:
        report = folder / f"{target.name}-{form}.json"
        server = ["--base-url", f"{target.url}/v1", "--api-key", "unused", "--model", TINY_MODEL]
        code = command(
            [
                environment(folder).with_name("llm-comply"),
                *("--format", form, "--json", "--timeout", str(REQUEST_S_MAX)),
                *(*server, *FORMATS[form]),
            ],
            report,
            s_max=self.run_s_max / len(FORMATS),
            cwd=folder,
        )
        if code not in {0, 1}:  # 1: some checks failed
            return [Outcome(f"{form}: all", "failed", f"ended with {code}: {last_line(report)}")]
        return [outcome for found in read_json(report)["results"] for outcome in outcomes_of(form, found)]


def outcomes_of(form: str, found: dict[str, Any]) -> list[Outcome]:
    """One, or one for each error: what vLLM's answers lack of a schema must not hide what only Baton's lack."""
    test = f"{form} {found['id']}"
    if found["status"] != "failed":
        return [Outcome(test, found["status"], "; ".join(found.get("errors", ())))]
    errors = {QUOTED.sub(r"\1...\2", error): None for error in found["errors"]}
    return [Outcome(f"{error}::{test}", "failed", error) for error in errors]
