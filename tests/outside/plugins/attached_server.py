"""A pytest plugin for vLLM's own API tests: their servers become the running one at $ATTACHED_URL.

vLLM's tests start a server of their own for each module (``RemoteOpenAIServer(MODEL, ARGUMENTS)``). Here they use the one
under test, under the model's name, and are skipped where their arguments name something that it does not have. No hub is
reached: the folder of the model under test stands for every adapter that they would download.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

import pytest
from huggingface_hub import HfApi

from tests import utils

UNMET = {
    "--uds": "a Unix socket",
    "--root-path": "a root path",
    "--api-key": "an API key",
    "--skip-tokenizer-init": "no tokenizer",
    "--worker-extension-cls": "a worker extension",
    "--tool-server": "tools that the server runs",
    "--middleware": "middleware",
    "--limit-mm-per-prompt": "a model of images",
    "--enable-lora": "adapters",
    "--reasoning-parser": "a reasoning parser",
    "--enable-force-include-usage": "usage in every stream",
    "--load-format": "other weights",
}
"""By argument, what the server under test does not have. Other arguments name what it has, or sizes."""
RUNS_WITHOUT = {
    "--enable-lora": ("test_chat.py", "test_models.py"),
    "--reasoning-parser": ("responses/", "function_calling"),
}
"""Arguments without which most tests of these files run all the same."""


class AttachedServer(utils.RemoteOpenAIServer):
    """Answers as a server that was just started."""

    def __init__(self, model: str, vllm_serve_args: list[str], **_others: Any) -> None:
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        runner = vllm_serve_args[vllm_serve_args.index("--runner") + 1] if "--runner" in vllm_serve_args else "generate"
        if runner != "generate":
            pytest.skip("needs a pooling model")
        for argument in UNMET.keys() & set(vllm_serve_args):
            if not any(part in test for part in RUNS_WITHOUT.get(argument, ())):
                pytest.skip(f"needs {UNMET[argument]} ({argument})")
        url = urlsplit(os.environ["ATTACHED_URL"])
        self.uds = None
        self.host, self.port = url.hostname, url.port
        self.show_hidden_metrics = False

    def _shutdown(self) -> None:
        """The server goes on."""


# On import: conftest files take the name before any hook of a plugin runs.
utils.RemoteOpenAIServer = AttachedServer
HfApi.snapshot_download = lambda *_args, **_kwargs: os.environ["ATTACHED_MODEL"]
