"""vLLM's own tests of its HTTP API."""

from __future__ import annotations

from pathlib import Path

from tests.outside.suite import Run, Suite, Target, pytest_run
from tests.outside.suites import vllm_sources

FOLDERS = (
    *("anthropic", "openai/responses", "openai/models", "serve/tokenize", "serve/instrumentator", "openai/completion"),
    *("openai/chat_completion", "openai", "generate"),
)
"""In the order in which they run."""
ATTACHES = "RemoteOpenAIServer"
TEST_S_MAX = 120.0
RESPONSES = "tests/entrypoints/openai/responses/"
NO_ENDPOINT = ("correctness/", "test_chat_error", "test_completion_error", "test_serving_chat.py", "test_uds", "_vlm")
"""Files that start an engine in the test's own process, a model of images, or load data sets."""
OTHER_MODELS = ("test_harmony", "test_mcp_tools", "test_parsable_context", "test_thinking_token_budget")
"""Files for models that reason and call tools by themselves: with this one their tests fail after minutes of retries."""


class VllmApi(Suite):
    name = "vllm-api"
    what = (
        "vLLM's tests of its HTTP API (`tests/entrypoints`: messages, responses, models, tokenize, instrumentator, completions, chat "
        "completions, scoring and decisions), those that talk to a server"
    )
    run_s_max = 7200.0

    def fetch(self, folder: Path) -> str:
        vllm_sources.sources(folder)
        vllm_sources.python_of(folder)
        return vllm_sources.vllm_version()

    def model_names(self, folder: Path) -> set[str]:
        return vllm_sources.model_names(self._files(folder))

    def run(self, folder: Path, target: Target) -> Run:
        cwd = vllm_sources.sources(folder)
        vllm_sources.link_models(cwd, self.model_names(folder), target)
        return pytest_run(
            vllm_sources.python_of(folder),
            [file.relative_to(cwd) for file in self._files(folder)],
            cwd=cwd,
            folder=folder,
            target=target,
            s_max=self.run_s_max,
            test_s_max=TEST_S_MAX,
            env={
                "ATTACHED_URL": target.url,
                "ATTACHED_MODEL": str(target.model_dir),
                "HF_HUB_OFFLINE": "1",
                "TRANSFORMERS_OFFLINE": "1",
            },
            plugins=("attached_server",),
        )

    def _files(self, folder: Path) -> list[Path]:
        """The tests of a server, not those of vLLM's classes."""
        cwd = vllm_sources.sources(folder)
        found = (file for part in FOLDERS for file in sorted((cwd / "tests/entrypoints" / part).rglob("test_*.py")))
        return [file for file in dict.fromkeys(found) if _is_of_server(file)]


def _is_of_server(file: Path) -> bool:
    if any(part in str(file) for part in (*NO_ENDPOINT, *OTHER_MODELS)):
        return False
    text = file.read_text()
    return ATTACHES in text or (RESPONSES in str(file) and "client: " in text)
