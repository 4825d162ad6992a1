"""vLLM's profiler of EngineCore and its ranks. It is configured at each start, which costs nothing until it runs."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.worker.engines.port import EngineProfiler, ProfilerFailed

if TYPE_CHECKING:
    from services.worker.engines.vllm.client import LegEngine


def configure_profiler(config: Any, folder: Path) -> None:
    """Torch's profiler, unless the operator's arguments name another one, with traces in ``folder``."""
    profiler, options = config.profiler_config, dict[str, Any]()
    if profiler.profiler is None:
        options = {"profiler": "torch", "torch_profiler_with_stack": False}  # Stacks make a step several times as long.
    if profiler.profiler in (None, "torch"):
        options |= {
            "torch_profiler_dir": str(folder),
            "torch_profiler_use_gzip": False,  # The engine stands still meanwhile; the worker compresses.
            "torch_profiler_dump_cuda_time_total": False,  # A table for the log, which takes longer than the trace.
            "ignore_frontend": True,
        }
    config.profiler_config = dataclasses.replace(profiler, **options)


class VllmProfiler(EngineProfiler):
    def __init__(self, llm: LegEngine, folder: Path) -> None:
        self._llm = llm
        self._folder = folder
        self.name = f"vLLM's {llm.vllm_config.profiler_config.profiler} profiler"

    async def start(self, profile_id: str, steps_max: int) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            await self._llm.start_profile(profile_id, max_iterations=steps_max)
        except Exception as error:  # vLLM raises a bare Exception for what EngineCore raised.
            raise ProfilerFailed(str(error) or type(error).__name__) from error

    async def stop(self) -> list[Path]:
        try:
            await self._llm.stop_profile()
        except Exception as error:
            raise ProfilerFailed(str(error) or type(error).__name__) from error
        return sorted(self._folder.glob("*.json"))
