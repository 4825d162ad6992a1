"""The process of a further host of an engine: that host's ranks, and the connection to the worker (``nodes``).

It takes no part in requests: all that it says on the bus is its status. It ends when the worker has ended, or one of
the ranks here; its supervisor starts it again, and then it waits for the worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from connector.transfer.threads import in_daemon_thread
from services.worker.engines.port import EngineDead, Identity
from services.worker.engines.vllm.engine import Launch, configuration_of_ranks, import_engine, kill_children, model_of
from services.worker.engines.vllm.nodes import Membership, join
from services.worker.network import own_address, ucx_defaults
from services.worker.settings import Settings
from shared.contracts.control import ServicePhase
from shared.contracts.ids import WorkerId
from shared.deadline import unless
from shared.runtime.service import Service
from shared.runtime.settings import CommonSettings

log = logging.getLogger("baton.worker")


async def follow(service: Service, settings: Settings, common: CommonSettings) -> None:
    """Run this host's ranks until the process is told to stop. Raises EngineRefused when they cannot run, EngineDead
    when the engine has ended.
    """
    try:
        service.set_phase(ServicePhase.STARTING, f"waiting for the worker at {settings.head_address}")
        membership = await unless(service.stopping, join(settings))
        if membership is None:
            return
        service.set_phase(ServicePhase.STARTING, "the worker has come: loading the model")
        run_dir = Path(tempfile.mkdtemp(prefix="baton-ranks-"))
        try:
            await unless(service.stopping, _until_dead(service, settings, common, membership, run_dir))
        finally:
            membership.close()
            shutil.rmtree(run_dir, ignore_errors=True)
    finally:
        kill_children()


async def _until_dead(
    service: Service, settings: Settings, common: CommonSettings, membership: Membership, run_dir: Path
) -> None:
    """Run the ranks until one of them or the worker has ended. Always raises: EngineRefused, EngineDead."""
    host, _port = settings.meeting
    here = msgspec.structs.replace(
        settings, role=membership.role, kv_host=settings.kv_host or await own_address(f"nats://{host}")
    )
    os.environ.update(ucx_defaults(here.kv_host, os.environ))
    launch = Launch(
        settings=here,
        identity=Identity(WorkerId(settings.worker_id), membership.epoch),
        model=await model_of(here, common),
        run_dir=run_dir,
        otlp_endpoint="",
        media_hosts=common.media_hosts,
        port=membership.port,
    )
    await import_engine(launch)
    lost = asyncio.ensure_future(membership.until_lost())
    begun_at, loop = time.monotonic(), asyncio.get_running_loop()

    def ready() -> None:
        detail = f"node {settings.node} of {settings.nodes}, {time.monotonic() - begun_at:.0f} s after all had come"
        loop.call_soon_threadsafe(service.set_phase, ServicePhase.READY, detail)

    ranks = asyncio.ensure_future(in_daemon_thread("ranks", lambda: _run_ranks(launch, ready)))
    try:
        await asyncio.wait([ranks, lost], return_when=asyncio.FIRST_COMPLETED)
        if ranks.done():
            ranks.result()
            raise EngineDead(f"a rank of node {settings.node} has ended")
        raise EngineDead(f"the worker at {settings.head_address} has ended or cannot be reached")
    finally:
        ranks.cancel()
        lost.cancel()


def _run_ranks(launch: Launch, ready: Callable[[], None]) -> None:
    """Blocks until a rank has ended. Raises EngineRefused, and what vLLM raises."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    with configuration_of_ranks(launch) as config:
        executor: Any = MultiprocExecutor(config, monitor_workers=False)
    ready()
    with suppress(Exception):  # It stops what is left of them itself, and may fail at that.
        executor.start_worker_monitor(inline=True)
