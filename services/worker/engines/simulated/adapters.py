"""LoRA adapters of the simulated engine: they change what is computed and how blocks are named."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable

from services.worker.engines.adapters import AdapterFiles
from services.worker.engines.simulated.core.sequence import Sequence


class SimulatedAdapters:
    """An ``AdapterBackend``. Requests that run keep the adapter that they began with."""

    def __init__(self) -> None:
        self.by_name: dict[str, tuple[str, str]] = {}
        """``RequestParams.lora`` of each loaded adapter."""

    async def enter(self, name: str, files: AdapterFiles) -> str:
        """See the port. The files are needed for their digest only."""
        await asyncio.to_thread(shutil.rmtree, files.folder, ignore_errors=True)
        hashed_as = f"sha256:{files.digest}"
        self.by_name[name] = (name, hashed_as)
        return hashed_as

    async def leave(self, name: str) -> None:
        """See the port."""
        del self.by_name[name]


def adapters_of(sequences: Iterable[Sequence]) -> list[str]:
    """The names of these sequences' adapters."""
    return sorted({sequence.params.lora[0] for sequence in sequences if sequence.params.lora is not None})
