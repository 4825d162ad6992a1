"""The head host: makes the keys of a fleet and the tokens with which other hosts join."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import signal
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from services.launcher.cluster.certificates import NoCertificate
from services.launcher.cluster.files import InitResult, create, create_for
from services.launcher.cluster.folder import NKEY, SECURE, TRUSTED, InitRequest, folder_of
from services.launcher.fleet.fleet_file import Fleet, HostPart
from services.launcher.fleet.joining import Token
from services.launcher.system.options import UpOptions
from services.launcher.system.plan import worker_names
from services.launcher.system.process_plan import PlanRefused
from services.launcher.system.state_file import RunningSystem
from shared.addresses import servers_of, url_of
from shared.bus.nats_bus import connect_nats
from shared.bus.nats_credentials import Access, read_seed
from shared.bus.port import BusDown, BusError
from shared.contracts.channels import Party
from shared.contracts.permissions import owner_of
from shared.contracts.workers import Role
from shared.loopback import is_loopback

KEY_ERRORS = (NoCertificate, BusDown, OSError)
"""Errors when keys are read or made."""
RETRY_S = 0.2
ACCEPT_S_MAX = 10.0
"""Longest wait until nats-server has read its configuration again."""


def head_options(fleet: Fleet, part: HostPart, state_dir: Path, keys: Path) -> UpOptions:
    """How to run the head host of a fleet, with access configured."""
    address = fleet.head.address or "127.0.0.1"
    return UpOptions(
        models=part.models,
        engine=part.engine,
        host=fleet.router.host or address,
        port=fleet.router.port,
        routers=fleet.router.count,
        collector_host=fleet.collector.host,
        collector_port=fleet.collector.port,
        nats_host=address,
        nats_port=fleet.nats.port,
        keys_dir=str(keys),
        state_dir=str(state_dir),
        access_configured=True,
        host_name=part.name,
        cores=part.cores,
        gpus=part.gpus,
    )


def create_fleet_keys(keys: Path, fleet: Fleet, now: datetime) -> InitResult:
    """The cluster's keys and a first API key, unless they exist. Raises CannotCreate, KEY_ERRORS."""
    return create_for(keys, fleet.head.address or "127.0.0.1", InitRequest(), now)


def nats_url_of(fleet: Fleet) -> str:
    """Where the other hosts find NATS."""
    return url_of("tls", fleet.head.address, fleet.nats.port)


def nats_url_for_others(running: RunningSystem) -> str:
    """Where other hosts find the NATS of a running system. Raises PlanRefused if they cannot."""
    if not running.keys_dir:
        raise PlanRefused("The running system has an open NATS (--open): tokens need keys and TLS.")
    if any(is_loopback(urlsplit(each).hostname or "") for each in servers_of(running.nats_url)):
        raise PlanRefused(
            "NATS listens on this machine only. Start the system with `baton up --nats-host ADDRESS`, with the address "
            "at which other hosts reach this one, or with a fleet file (`baton up --config`)."
        )
    return running.nats_url


def make_token(keys: Path, nats_url: str, part: HostPart) -> Token:
    """With a key for each worker of the part; existing keys are kept, so that a token can be made again.

    Raises PlanRefused, CannotCreate, KEY_ERRORS.
    """
    ids = [*worker_names(part.models, part.name)]
    if not ids:
        raise PlanRefused(f"Host {part.name} has no workers, so it has nothing to join with.")
    servers = servers_of(nats_url)
    create_for(
        keys, urlsplit(servers[0]).hostname or "", InitRequest(workers=tuple(ids), api_key=False), datetime.now(UTC)
    )
    folders = {each: keys / folder_of(owner_of(Party.WORKER, each)) for each in ids}
    return Token(
        nats_urls=tuple(servers),
        ca=(folders[ids[0]] / TRUSTED).read_text(encoding="ascii"),
        seeds={each: read_seed(folder / NKEY).text for each, folder in folders.items()},
        part=part.of_workers,
    )


def revoke(keys: Path, host_name: str) -> list[str]:
    """Delete the keys of the workers of that host; returns their ids. Raises as ``make_token``."""
    own = re.compile(rf"{Party.WORKER.value}-({re.escape(host_name)}-(?:{'|'.join(Role)})-\d+)")
    ids = [found[1] for folder in sorted(keys.glob("*")) if (found := own.fullmatch(folder.name))]
    for each in ids:
        shutil.rmtree(keys / folder_of(owner_of(Party.WORKER, each)))
    if ids:
        create(keys, InitRequest(api_key=False), datetime.now(UTC))
    return ids


def reload_nats(keys: Path) -> bool:
    """Have the nats-server of this machine that runs with these keys read its users again; False if there is none."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(keys / SECURE) in process.cmdline()[1:] and process.name() == "nats-server":
                process.send_signal(signal.SIGHUP)
                return True
    return False


async def refused_keys(nats_url: str, keys: Path, worker_ids: Sequence[str]) -> str:
    """Why NATS does not accept the keys of these workers, which it may read at this moment; empty if it does."""
    for worker_id in worker_ids:
        folder = keys / folder_of(owner_of(Party.WORKER, worker_id))
        access = Access(party=Party.WORKER, nkey_file=str(folder / NKEY), ca_file=str(folder / TRUSTED))
        deadline = time.monotonic() + ACCEPT_S_MAX
        while why := await _refusal(nats_url, access):
            if time.monotonic() > deadline:
                return why
            await asyncio.sleep(RETRY_S)
    return ""


async def _refusal(nats_url: str, access: Access) -> str:
    try:
        bus = await connect_nats(nats_url, name="baton-token", connect_s_max=ACCEPT_S_MAX, access=access)
    except BusError as error:
        return str(error)
    await bus.close()
    return ""
