"""The tests of the OpenAI and Anthropic SDKs for Python that send requests and check the types of the answers.

They are written for a mock that answers any request from the OpenAPI document. Against a real server, those of endpoints
that it has are meaningful; the others are left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from tests.outside.suite import Run, Suite, Target, environment, pytest_run, source_distribution

MODEL = re.compile(r'\bmodel(?:_id)?="([\w.:-]+)"|"(gpt-[\w.-]+)"')
CHOSEN = "loose and (create or count_tokens or Models)"
"""Requests that a server without an account's data can answer, each once: strict clients send the same."""
NEEDS = (
    *("pytest<9", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "respx", "time-machine", "dirty-equals"),
    *("importlib-metadata", "rich", "nest-asyncio", "inline-snapshot", "http-snapshot[httpx]", "opentelemetry-sdk"),
)


class Sdk(Suite):
    def __init__(self, package: str, files: Sequence[str], base_path: str, *options: str) -> None:
        self.name = f"{package}-sdk"
        self.what = f"`{package}`'s own tests of {', '.join(f'`{file}`' for file in files)} (`TEST_API_BASE_URL`)"
        self.run_s_max = 1200.0
        self._package = package
        self._files = files
        self._base_path = base_path
        # In place of the SDK's own options, which distribute the tests to all cores and make a warning an error.
        self._options = ["-o", f"addopts={' '.join(options)}", "-W", "ignore", "-k", CHOSEN]

    def fetch(self, folder: Path) -> str:
        wanted = version(self._package)
        source_distribution(folder, self._package, wanted)
        environment(folder, f"{self._package}[aiohttp]=={wanted}", *NEEDS)
        return wanted

    def model_names(self, folder: Path) -> set[str]:
        tests = self._tests(folder)
        return {
            name for file in self._files for pair in MODEL.findall((tests / file).read_text()) for name in pair if name
        }

    def run(self, folder: Path, target: Target) -> Run:
        return pytest_run(
            environment(folder),
            [*self._options, *(f"tests/api_resources/{file}" for file in self._files)],
            cwd=self._tests(folder).parents[1],
            folder=folder,
            target=target,
            s_max=self.run_s_max,
            env={"TEST_API_BASE_URL": f"{target.url}{self._base_path}"},
        )

    def _tests(self, folder: Path) -> Path:
        return source_distribution(folder, self._package, version(self._package)) / "tests/api_resources"


OPENAI = Sdk(
    "openai", ("test_models.py", "test_completions.py", "chat/test_completions.py", "test_responses.py"), "/v1"
)
ANTHROPIC = Sdk(
    "anthropic", ("test_models.py", "test_messages.py", "beta/test_messages.py"), "", "-p tests._alias_httpx"
)
