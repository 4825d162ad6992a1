"""Clients in Python that people use, with tests in ``plugins``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.worker.tiny_model import TINY_MODEL
from tests.outside.suite import OWN_OPTIONS, PLUGINS, Run, Suite, Target, environment, pytest_run, version_of
from tests.outside.targets import CONTEXT_TOKENS, ONE_ENGINE


@dataclass
class Client(Suite):
    """One suite: a file of tests in an environment of its own."""

    name: str
    what: str
    packages: Sequence[str]
    """The first one's version is the suite's."""
    tests: str
    """A file in ``plugins``."""
    run_s_max: float
    options: Sequence[str] = ()
    """Of pytest."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the client."""

    def fetch(self, folder: Path) -> str:
        package = self.packages[0].partition("[")[0]
        return version_of(environment(folder, *self.packages, "pytest", "pytest-timeout"), package)

    def run(self, folder: Path, target: Target) -> Run:
        return pytest_run(
            environment(folder),
            [*self.options, *OWN_OPTIONS, PLUGINS / self.tests],
            cwd=folder,
            folder=folder,
            target=target,
            s_max=self.run_s_max,
            env={
                "ATTACHED_URL": target.url,
                "ATTACHED_NAME": TINY_MODEL,
                "CONTEXT_TOKENS": str(CONTEXT_TOKENS),
                "ANSWERS": str(folder / "answers"),
                "WRITE_ANSWERS": str(int(target.name == ONE_ENGINE)),
                **self.settings,
            },
        )


LANGCHAIN = Client(
    name="langchain",
    what=(
        "LangChain's standard integration tests (`langchain-tests`) of `ChatOpenAI` with chat completions and with "
        "responses, and of `ChatAnthropic`"
    ),
    packages=("langchain-tests", "langchain-openai", "langchain-anthropic"),
    tests="standard_chat_models.py",
    run_s_max=1800.0,
    options=("-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session"),
    # No file of token counts from the web: LangChain then counts with the model's API.
    settings={"LANGSMITH_TRACING": "false"},
)
LITELLM = Client(
    name="litellm",
    what=(
        "Requests through LiteLLM: its providers `openai`, `hosted_vllm` and `anthropic`, its responses and messages, "
        "and its proxy; answers must be those of one engine (`tests/outside/plugins/litellm_client.py`)"
    ),
    packages=("litellm[proxy]",),
    tests="litellm_client.py",
    run_s_max=1200.0,
    # No table of prices from the web.
    settings={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
)
