"""A vLLM engine's weights, changed in place, and its pause: vLLM's own calls, and new names of blocks.

What the engine caches while its weights change has a name that no request ever asks for: ``begin`` gives it one before
the first weight is written, ``name`` gives the final one.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.v1.engine.exceptions import EngineDeadError

from connector.scheduler.block_names import set_seed
from services.worker.engines.port import EngineDead, EngineWeights, NamedWeights, WeightsRefused
from services.worker.engines.vllm.client import LegEngine
from shared.contracts.fleet_orders import PauseMode, WeightsAction
from shared.contracts.workers import Fingerprint, HashScheme

T = TypeVar("T")
LOAD_S_MAX = 3600.0
"""For the ranks to read and load a checkpoint, or to receive a part of one."""
REASON_CHARS_MAX = 500


class VllmWeights(EngineWeights):
    def __init__(self, llm: LegEngine, fingerprint: Fingerprint, hashing: HashScheme) -> None:
        """``fingerprint`` and ``hashing``: with the weights of the start."""
        self._llm = llm
        self._fingerprint = fingerprint
        self._hashing = hashing
        self.paused = False

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """VLLM would clear its cache only while no block is leased, and fail otherwise. Requests that come during the
        pause wait; ``AsyncLLM.pause_generation`` would refuse them from 0.33 on.
        """
        self.paused = True
        await _asked(self._llm.engine_core.pause_scheduler_async(mode=mode.value, clear_cache=False))
        if clear_cache and mode is not PauseMode.KEEP:
            await self._rename("")

    async def resume(self) -> None:
        await _asked(self._llm.resume_generation())
        self.paused = False

    async def begin(self) -> None:
        await self._rename(f"{self._hashing.seed} changing {uuid.uuid4().hex}")

    async def load(self, folder: Path) -> None:
        named = {"weights_path": str(folder)}
        await _asked(self._llm.collective_rpc("reload_weights", timeout=LOAD_S_MAX, kwargs=named))

    async def transfer(self, action: WeightsAction, payload: dict[str, Any]) -> None:
        llm = self._llm
        if action is WeightsAction.INIT:
            await _asked(llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=payload)))
        elif action is WeightsAction.UPDATE:
            await _asked(llm.update_weights(WeightTransferUpdateRequest(update_info=payload)))
        elif action is WeightsAction.START:
            await _asked(llm.start_weight_update())
        elif action is WeightsAction.FINISH:
            await _asked(llm.finish_weight_update())
        else:
            await _asked(llm.shutdown_weight_transfer_engine())

    async def name(self, weights: str, version: str) -> NamedWeights:
        seed = f"{self._hashing.seed} weights {weights}"
        if self._llm.model_config.is_multimodal_model:
            await _asked(self._llm.reset_encoder_cache())
        await self._rename(seed)
        await _asked(self._llm.update_weight_version(version))
        self._llm.weight_version = version
        set_seed(seed, self._hashing.algorithm)  # for prompts that are rendered or tokenized here
        return NamedWeights(
            msgspec.structs.replace(self._fingerprint, weights=weights),
            msgspec.structs.replace(self._hashing, seed=seed),
        )

    async def _rename(self, seed: str) -> None:
        await _asked(self._llm.engine_core.call_utility_async("rename_blocks", seed))


async def _asked(call: Awaitable[T]) -> T:
    """Raises EngineDead, or WeightsRefused with what vLLM says."""
    try:
        return await call
    except EngineDeadError as dead:
        raise EngineDead(str(dead)) from dead
    except Exception as error:  # vLLM raises whatever its executor, its model's layers or its transfer raise.
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise WeightsRefused(f"vLLM says: {lines[-1][:REASON_CHARS_MAX]}") from error
