"""``python -m services.worker``: one worker beside one engine."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import NoReturn

import msgspec

from services.worker.engines.plugged import load_plugged
from services.worker.engines.port import StartEngine
from services.worker.late_reports import LateReports
from services.worker.lifecycle.sleeping import begin_anew
from services.worker.network import network_addresses, own_address, ucx_defaults
from services.worker.service import SHUTDOWN_S_MAX, Ending, engine_starter, run_worker
from services.worker.settings import OWN_ENGINES, Settings
from shared.bus.nats_bus import connect_nats
from shared.bus.port import Bus
from shared.contracts.ids import is_subject_token
from shared.contracts.workers import Role
from shared.runtime.service import CONNECT_S_MAX, Service, refuse, run_service
from shared.runtime.settings import CommonSettings, SettingsError, load, load_common

ENVIRONMENT = dict(os.environ)
"""The process's environment before an engine adds to it."""


def main() -> None:
    try:
        common, settings = load_common(), with_id(load(Settings, "WORKER_"))
    except SettingsError as error:
        refuse("worker", error)

    ending = Ending.STOPPED

    async def live(service: Service) -> None:
        nonlocal ending
        if settings.node:
            from services.worker.engines.vllm.follower import follow  # Only a further host of an engine imports it.

            await follow(service, settings, common)
            return
        host = settings.meeting[0] if settings.nodes > 1 else await own_address(common.nats_url)
        here = msgspec.structs.replace(settings, kv_host=settings.kv_host or host)
        os.environ.update(ucx_defaults(here.kv_host, os.environ))
        starter, late = starter_of(here, service.bus), late_reports(common, settings.worker_id)
        ending = await run_worker(service, here, common, starter, network_addresses, late)

    try:
        run_service("worker", settings.worker_id, common, live, drain_s_max=settings.drain_s_max + SHUTDOWN_S_MAX)
    except SystemExit as ended:
        if ending is Ending.ASLEEP and not ended.code:
            begin_anew(ENVIRONMENT)
        if ending is Ending.DRAINED and settings.stay_drained and not ended.code:
            stay()
        raise


def late_reports(common: CommonSettings, worker_id: str) -> LateReports:
    """With a second connection of this worker."""
    connect = partial(
        connect_nats,
        common.nats_url,
        name=f"worker-{worker_id}-late",
        connect_s_max=CONNECT_S_MAX,
        access=common.nats_access("worker"),
    )
    return LateReports(connect)


def stay() -> NoReturn:
    """Replace this process by one that does nothing until SIGTERM."""
    sys.stderr.write("worker: drained; restart the container to start this worker again\n")
    sys.stderr.flush()
    os.execvp("sleep", ["sleep", "infinity"])  # noqa: S606  # no shell is wanted


def starter_of(settings: Settings, bus: Bus) -> StartEngine:
    """Starts the engine; for role store the store, which finds its partner over the bus. Raises WrongConfiguration."""
    if settings.role is not Role.STORE:
        return engine_starter(settings.engine)
    if settings.engine not in OWN_ENGINES:
        return partial(load_plugged(settings.engine), bus=bus)
    from services.worker.engines.store.engine import start_store  # Only a store imports it.

    return partial(start_store, bus=bus)


def with_id(settings: Settings) -> Settings:
    """Settings whose worker id is set and can be part of a subject. Raises SettingsError."""
    worker_id = settings.worker_id or f"{settings.role.value}-{os.getpid()}"
    if not is_subject_token(worker_id):
        raise SettingsError(f"WORKER_WORKER_ID={worker_id!r}: use letters, digits, '-' and '_' only")
    return msgspec.structs.replace(settings, worker_id=worker_id)


if __name__ == "__main__":  # vLLM's child process imports this module too.
    main()
