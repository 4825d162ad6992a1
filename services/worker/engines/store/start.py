"""Starts the store of a worker of role store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from services.worker.engines.port import Engine, Identity
from services.worker.engines.store.engine import Plan, StoreEngine
from services.worker.engines.store.files import StoreFiles
from services.worker.engines.store.memory import Arena, Storage
from services.worker.engines.store.mover import MoverOf, mover_of
from services.worker.engines.store.partner import find_partner, wait_for_orphanage
from services.worker.settings import Settings
from shared.bus.port import Bus
from shared.runtime.settings import CommonSettings

BLOCKS_MIN = 16


async def start_store(
    settings: Settings, common: CommonSettings, report: Callable[[str], None], *, identity: Identity, bus: Bus
) -> Engine:
    """The store of a worker with these settings, once a worker of its model is there. Raises ValueError for settings
    that cannot work.
    """
    model = settings.served_model_name or settings.model
    report(f"waiting for a worker of {model}")
    partner = await find_partner(bus, identity.worker_id, model)
    folder = folder_of(settings, common, identity)
    plan = Plan(
        partner=partner,
        model=partner.record.models[0] if partner.record.models else model,
        identity=identity,
        memory_bytes=settings.store_memory_bytes,
        files_bytes=settings.store_files_bytes,
        folder=folder,
        lease_s_max=settings.kv_lease_s,
    )
    report(f"opening {folder}" if plan.files_bytes else "allocating memory")
    store = await open_store(plan, mover_of(settings, partner.record.engine))
    store.ends_when(wait_for_orphanage(bus, partner.record.fingerprint.key(), model))
    return store


async def open_store(plan: Plan, make_mover: MoverOf) -> StoreEngine:
    """A running store; ``close`` ends it. Raises ValueError, FolderTaken, OSError."""
    shape = plan.partner.shape
    blocks = shape.blocks_in(plan.memory_bytes)
    if blocks < BLOCKS_MIN:
        raise ValueError(
            f"WORKER_STORE_MEMORY_BYTES={plan.memory_bytes}: a block of {plan.model} takes {shape.block_bytes} bytes, "
            f"and a store needs room for {BLOCKS_MIN}; set it to {BLOCKS_MIN * shape.block_bytes} or more"
        )
    arena = Arena(blocks * shape.block_bytes)
    thread = ThreadPoolExecutor(1, thread_name_prefix="store-files")
    slots, files = shape.blocks_in(plan.files_bytes), None
    if slots:
        files = await asyncio.get_running_loop().run_in_executor(
            thread,
            lambda: StoreFiles(
                plan.folder,
                identity=shape.identity(),
                block_bytes=shape.block_bytes,
                slots=slots,
                memory=(arena.address, arena.size),
                io=plan.io,
            ),
        )
    return StoreEngine(plan, shape, blocks, Storage(arena, files, thread), make_mover)


def folder_of(settings: Settings, common: CommonSettings, identity: Identity) -> Path:
    """The folder of its files, the same after a restart."""
    return Path(settings.store_dir or Path(common.state_dir) / "kv-store").expanduser() / identity.worker_id
