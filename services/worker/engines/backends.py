"""Whether NIXL here can move KV with the plug-in that the operator chose, before an engine is loaded."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE

import msgspec

from connector.transfer.backend_trial import BackendTried
from services.worker.engines.port import EngineRefused
from shared.contracts.workers import USUAL_BACKEND

TRIAL_S_MAX = 60.0
"""A busy machine takes seconds to load NIXL."""


async def check_backend(nixl_package: str, backend: str) -> None:
    """Raises EngineRefused, OSError, TimeoutError. The usual one comes with NIXL, and its failures are the engine's: it
    is not tried, which takes a second.
    """
    if backend != USUAL_BACKEND and (why := await try_backend(nixl_package, backend)):
        raise EngineRefused(f"WORKER_KV_BACKEND={backend}: {why}")


async def try_backend(nixl_package: str, backend: str) -> str:
    """Have another process read a few bytes of its own with it. Returns why it cannot. Raises OSError, TimeoutError."""
    path = os.pathsep.join(filter(None, sys.path))
    environ = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    command = (sys.executable, "-m", "connector.transfer.backend_trial", nixl_package, backend)
    process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, env=environ)
    try:
        async with asyncio.timeout(TRIAL_S_MAX):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return why_not(said, process.returncode or 0)


def why_not(said: bytes, status: int) -> str:
    """What the process found, and what to do."""
    try:
        tried = msgspec.json.decode(said, type=BackendTried)
    except msgspec.DecodeError:
        return f"NIXL ends a process that uses it (exit status {status}); use {USUAL_BACKEND}"
    if not tried.failure:
        return ""
    return f"{tried.failure}. Those here are {', '.join(tried.plugins) or 'none'}; not all move KV between engines"
