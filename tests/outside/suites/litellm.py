"""LiteLLM, as a library and as a proxy."""

from __future__ import annotations

from pathlib import Path

from services.worker.tiny_model import TINY_MODEL
from tests.outside.suite import OWN_OPTIONS, PLUGINS, Run, Target, environment, pytest_run, version_of
from tests.outside.targets import CONTEXT_TOKENS, ONE_ENGINE


class Litellm:
    """See the module."""

    name = "litellm"
    what = (
        "Requests through LiteLLM: its providers `openai`, `hosted_vllm` and `anthropic`, its responses and messages, "
        "and its proxy; answers must be those of one engine (`tests/outside/plugins/litellm_client.py`)"
    )
    run_s_max = 1200.0

    def fetch(self, folder: Path) -> str:
        return version_of(environment(folder, "litellm[proxy]", "pytest", "pytest-timeout"), "litellm")

    def model_names(self, _folder: Path) -> set[str]:
        return set()

    def run(self, folder: Path, target: Target) -> Run:
        return pytest_run(
            environment(folder),
            [*OWN_OPTIONS, PLUGINS / "litellm_client.py"],
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
                # No table of prices from the web.
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            },
        )
