"""Defaults of UCX's settings for GPU memory. UCX reads them when an agent starts; the operator's values stay.

Settings for host memory are in ``nixl_read_agent``: they hold for every agent.
"""

from __future__ import annotations

import os
from collections.abc import Collection

CUDA_DEFAULTS = {
    # Baton reads (GET). Without NVLink UCX allows cuda_ipc for writes only, because reads over PCIe are slower than
    # writes, and falls back to TCP through host memory, which is slower by far (openucx/ucx, cuda_ipc_iface.c).
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
}


def set_defaults(devices: Collection[str]) -> None:
    """``devices``: kinds of the memory to be read, cpu or cuda. UCX warns of a setting that it has no use for, so
    nothing is set without a GPU. Call before the first agent of the process starts.
    """
    if "cuda" in devices:
        for name, value in CUDA_DEFAULTS.items():
            os.environ.setdefault(name, value)
