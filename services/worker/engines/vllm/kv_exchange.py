"""The KV exchange of a vLLM engine: utility calls into EngineCore, and the notifications that it pushes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq
import zmq.asyncio
from vllm.v1.engine.exceptions import EngineDeadError

from connector.messages import EngineCall, EngineNotification
from services.worker.engines.port import EngineDead

NOTIFICATIONS_QUEUED_MAX = 4096
"""Notifications in ZMQ's receive queue; the engine drops further ones."""
SHUTTING_DOWN = "Server shutting down"
"""EngineCore's error when it is about to end."""

NIXL_PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
"""What nixl takes without CUDA: the first that is installed."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(EngineNotification).decode


def nixl_package(cuda: str | None) -> str:
    """The package that ``nixl`` stands for in the engine's process, where PyTorch has been built for this CUDA."""
    if cuda:
        return f"nixl_cu{cuda.partition('.')[0]}"
    return next(filter(find_spec, NIXL_PACKAGES), "nixl")


class VllmExchange:
    """An ``EngineExchange``. It receives notifications after ``attach``."""

    def __init__(self, run_dir: Path) -> None:
        self.nixl_package = nixl_package(torch.version.cuda)
        self.endpoint = f"ipc://{run_dir}/notifications"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)  # type: ignore[attr-defined]
        self._socket.set_hwm(NOTIFICATIONS_QUEUED_MAX)
        self._socket.bind(self.endpoint)
        self._listeners: list[Callable[[EngineNotification], None]] = []
        self._core: Any = None
        self._following: asyncio.Task[None] | None = None

    def attach(self, core: Any, on_failed: Callable[[str], None]) -> None:
        """``core`` is vLLM's client of EngineCore. ``on_failed`` gets the reason when receiving fails."""
        self._core = core

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                on_failed(f"the engine's notifications cannot be read: {task.exception()!r}")

        self._following = asyncio.get_running_loop().create_task(self._follow(), name="engine-notifications")
        self._following.add_done_callback(ended)

    async def call(self, call: EngineCall) -> EngineNotification:
        """In EngineCore's main thread, between two steps. Raises EngineDead."""
        try:
            return _decode(await self._core.call_utility_async("kv_exchange", _encode(call)))
        except EngineDeadError as error:
            raise EngineDead(str(error)) from error
        except Exception as error:  # vLLM raises no more specific type for a failed utility call.
            if SHUTTING_DOWN in str(error):
                raise EngineDead(str(error)) from error
            raise

    def on_notifications(self, listener: Callable[[EngineNotification], None]) -> None:
        self._listeners.append(listener)

    def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
        self._context.destroy(linger=0)

    async def _follow(self) -> None:
        while True:
            notifications = _decode(await self._socket.recv())
            for listener in self._listeners:
                listener(notifications)
