"""LoRA adapters in vLLM: loaded under a new id each time, and given up when no request uses them any more.

vLLM's own way to load an adapter again keeps its id and replaces its weights below the requests that run. Their further
blocks would then be cached under the name of the old files.
"""

from __future__ import annotations

import asyncio
import logging
import shutil

from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from connector.scheduler.engine_scheduler import hashed_by_content, loadable
from services.worker.engines.adapters import AdapterFiles, AdapterRefused
from services.worker.engines.port import EngineDead
from services.worker.engines.vllm.openai_app import VllmServer

log = logging.getLogger("baton.worker")

REASON_CHARS_MAX = 500


class VllmAdapters:
    """An ``AdapterBackend``."""

    def __init__(self, llm: AsyncLLM, server: VllmServer, *, hashes_content: bool) -> None:
        """``hashes_content``: the engine has Baton's scheduler."""
        self._llm = llm
        self._server = server
        self._models = server.models
        self._hashes_content = hashes_content
        self._leaving: set[asyncio.Task[None]] = set()

    async def enter(self, name: str, files: AdapterFiles) -> str:
        plain = LoRARequest(name, self._models.lora_id_counter.inc(1), str(files.folder))
        try:
            await self._llm.add_lora(plain)
        except EngineDeadError as dead:
            raise EngineDead(str(dead)) from dead
        except Exception as error:  # vLLM raises whatever the model's layers raise at an adapter that does not fit.
            await asyncio.to_thread(shutil.rmtree, files.folder, ignore_errors=True)
            why = str(error).replace(str(files.folder), "the adapter")[:REASON_CHARS_MAX]
            raise AdapterRefused(f"vLLM cannot load {name}: {why}") from error
        hashed = hashed_by_content(plain, files.digest) if self._hashes_content else plain
        before = self._models.lora_requests.get(name)
        self._models.lora_requests[name] = hashed
        if before is not None:
            self._give_up(before)
        return hashed.lora_path

    async def leave(self, name: str) -> None:
        self._give_up(self._models.lora_requests.pop(name))

    def close(self) -> None:
        for task in self._leaving:
            task.cancel()

    def _give_up(self, request: LoRARequest) -> None:
        task = asyncio.get_running_loop().create_task(self._when_unused(loadable(request)), name="give-up-adapter")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _when_unused(self, request: LoRARequest) -> None:
        """A request of which the engine cannot read the adapter would end the engine."""
        await self._server.present_ones_ended()
        try:
            await self._llm.remove_lora(request.lora_int_id)
        except EngineDeadError:
            return
        finally:
            await asyncio.to_thread(shutil.rmtree, request.lora_path, ignore_errors=True)
        log.info("the engine has dropped the adapter %s", request.lora_name)
