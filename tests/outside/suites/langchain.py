"""LangChain's standard tests."""

from __future__ import annotations

from pathlib import Path

from services.worker.tiny_model import TINY_MODEL
from tests.outside.suite import OWN_OPTIONS, PLUGINS, Run, Target, environment, pytest_run, version_of

OPTIONS = ("-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session", *OWN_OPTIONS)


class Langchain:
    """See the module."""

    name = "langchain"
    what = (
        "LangChain's standard integration tests (`langchain-tests`) of `ChatOpenAI` with chat completions and with "
        "responses, and of `ChatAnthropic`"
    )
    run_s_max = 1800.0

    def fetch(self, folder: Path) -> str:
        needs = ("langchain-tests", "langchain-openai", "langchain-anthropic", "pytest-timeout")
        return version_of(environment(folder, *needs), "langchain-tests")

    def model_names(self, _folder: Path) -> set[str]:
        return set()

    def run(self, folder: Path, target: Target) -> Run:
        return pytest_run(
            environment(folder),
            [*OPTIONS, PLUGINS / "standard_chat_models.py"],
            cwd=folder,
            folder=folder,
            target=target,
            s_max=self.run_s_max,
            env={
                "ATTACHED_URL": target.url,
                "ATTACHED_NAME": TINY_MODEL,
                # No file of token counts from the web: LangChain then counts with the model's API.
                "LANGSMITH_TRACING": "false",
            },
        )
