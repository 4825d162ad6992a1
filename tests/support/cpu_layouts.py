"""A CPU engine that keeps the layers of a block together (``BLHNC``), as engines on CUDA do.

vLLM's CPU kernels find a block by its stride, whatever lies between two blocks; their backend declares one layout only. A
plugin of vLLM's registers a backend that declares both.
"""

from __future__ import annotations

from pathlib import Path

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_layout import KVCacheLayout

ENTRY_POINTS = "[vllm.general_plugins]\nlayouts = tests.support.cpu_layouts:register\n"


class BothLayouts(CPUAttentionBackend):
    """vLLM's CPU backend."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)


def register() -> None:
    """Called by vLLM in each of its processes."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{BothLayouts.__module__}.{BothLayouts.__qualname__}")


def plugin_in(folder: Path) -> str:
    """Make a distribution with the plugin; returns the ``PYTHONPATH`` with which a worker's engine finds it."""
    distribution = folder / "layouts-1.dist-info"
    distribution.mkdir(exist_ok=True)
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: layouts\nVersion: 1\n")
    (distribution / "entry_points.txt").write_text(ENTRY_POINTS)
    return str(folder)
