"""One run of `baton up`: start all processes, print the addresses, wait, stop everything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.markup import escape

from services.launcher.system.children import open_child_starter
from services.launcher.system.machine import inherited_environment, key_headers
from services.launcher.system.options import UpOptions
from services.launcher.system.process_plan import Machine, Stage, SystemPlan
from services.launcher.system.scaling import Scaler
from services.launcher.system.screen import Screen
from services.launcher.system.supervisor import StartFailed, Supervisor
from shared.addresses import url_of
from shared.runtime.heartbeat import heartbeat_of
from shared.runtime.service import EXIT_CONFIGURATION
from shared.runtime.settings import load_common
from shared.runtime.waiting import first_of

ROUTER_READY_S_MAX = 60.0
"""Time for a router to learn of the ready workers and to compare its tokens with theirs; after that it is reported."""
POLL_S = 0.2
HTTP_S_MAX = 5.0
ENDED_POLL_S = 2.0


@dataclass(frozen=True)
class Session:
    """One run of `baton up`."""

    plan: SystemPlan
    options: UpOptions
    machine: Machine
    """This machine when the plan was made."""
    screen: Screen
    has_ended: Callable[[], bool]
    """Whether the system that this session joined has ended; polled every ``ENDED_POLL_S``."""

    async def run(self) -> int:
        """Start, wait, stop. Returns the exit code."""
        for note in self.plan.notes:
            self.screen.show(f"[yellow]![/] {note}")
        heartbeat_of(os.environ).begin()
        with stop_signals() as (stop, hurry), open_child_starter(self.logs, inherited_environment()) as starter:
            async with Supervisor(self.plan, starter, self.screen, hurry) as system:
                failure = await self._serve(system, stop)
                self.screen.show("Stopping. Running requests may finish; Ctrl-C again kills everything.")
                with self.screen.watching():
                    await system.take_down()
        if not failure:
            return 0
        self.screen.show_error(failure)
        return EXIT_CONFIGURATION if system.is_misconfigured else 1

    @property
    def logs(self) -> Path:
        """Folder of the log files."""
        return Path(self.options.state_dir) / "logs"

    async def _serve(self, system: Supervisor, stop: asyncio.Event) -> str:
        """Until the system must stop. Returns the failure, or an empty string when the user stopped it."""
        try:
            with self.screen.watching():
                await first_of(system.bring_up(), stop.wait())
            if not stop.is_set() and self.options.scales:
                await Scaler(system, self.options, self.machine, self.screen).listen()
            if not stop.is_set():
                await first_of(system.unless_broken(self._announce(stop)), stop.wait())
        except StartFailed as failure:
            return str(failure)
        return await first_of(system.until_broken(), self._until_stopped(stop, system)) or ""

    async def _until_stopped(self, stop: asyncio.Event, system: Supervisor) -> None:
        """A joined session also ends when all its workers have drained."""
        while not stop.is_set() and not self.has_ended() and not (self.options.join and system.is_drained):
            await first_of(stop.wait(), asyncio.sleep(ENDED_POLL_S))

    async def _announce(self, stop: asyncio.Event) -> None:
        """Print the addresses when the router is ready."""
        workers = ", ".join(process.name for process in self.plan.stage(Stage.WORKERS))
        if self.options.join:
            self.screen.show(
                f"\n[green]{workers} joined[/] {self.plan.nats_url}. Logs: {self.logs}. Ctrl-C drains and stops."
            )
            return
        where = endpoints(self.options)
        for router in where.routers.values():
            await self._served_models(router, stop)
        models = await self._served_models(where.api, stop)
        self.screen.show(self._greeting(where, models, workers))

    def _greeting(self, where: Endpoints, models: list[str], workers: str) -> str:
        endpoint = where.api
        is_default = self.options.state_dir == load_common({}).state_dir  # Another terminal has other variables.
        folder = "" if is_default else f" --state-dir {self.options.state_dir}"
        key = "" if models else " -H 'Authorization: Bearer KEY'"
        password = "" if models else " (password: a key with the permission view)"
        models = models or [each.model or "baton-tiny" for each in self.options.models]
        body = json.dumps({"model": models[0], "prompt": "Once upon a time", "max_tokens": 32, "stream": True})
        return f"""
[bold green]Baton is ready:[/] {endpoint}/v1   model [bold]{escape(", ".join(models))}[/]   {workers}

  Try it    [bold]curl -N {endpoint}/v1/completions -H 'Content-Type: application/json'{key} \\
              -d {escape(shlex.quote(body))}[/]
  Explain   {program()} explain{folder}   shows why it went to these workers, and how long each part took
  Watch     [bold]{where.console}[/]   in a browser{password}, or {program()} workers --watch{folder}
  Metrics   {where.metrics}{routers_own(where)}
  Add       {program()} up --join{folder}   adds a worker
  Check     {program()} doctor{folder}   finds problems and says what to do
  Logs      {self.logs}

Ctrl-C stops everything."""

    async def _served_models(self, endpoint: str, stop: asyncio.Event) -> list[str]:
        """The models that a router lists once it is ready; empty if listing needs a key, or on ``stop``."""
        reason, said, began = "it does not respond", False, self.screen.clock.now()
        names_min = sum(1 + len(each.aliases) for each in self.options.models)
        async with httpx.AsyncClient(base_url=endpoint, timeout=HTTP_S_MAX, trust_env=False) as client:
            while not stop.is_set():  # httpx could swallow a cancellation; each attempt ends by itself.
                late = self.screen.clock.now() - began > ROUTER_READY_S_MAX
                try:
                    response = await client.get("/ready")
                    reason = response.text
                    if response.status_code == httpx.codes.OK:
                        models = await client.get("/v1/models", headers=key_headers())
                        if models.status_code == httpx.codes.UNAUTHORIZED:
                            return []
                        names = [str(each["id"]) for each in models.json()["data"]]
                        reason = f"it serves {', '.join(names) or 'no model'}"
                        # A key may be for some models only: do not wait for the others for ever.
                        if len(names) >= names_min or (names and late):
                            return names
                except (httpx.TransportError, LookupError):
                    pass
                if late and not said:
                    said = True
                    self.screen.show_error(
                        f"All processes have started, but after {ROUTER_READY_S_MAX:.0f} s {endpoint} is not ready: "
                        f"{reason}"
                    )
                await asyncio.sleep(POLL_S)
        return []


@dataclass(frozen=True)
class Endpoints:
    """URLs on this machine."""

    api: str
    metrics: str
    console: str
    routers: dict[str, str]
    """Each router's own, if several share ``api``."""


def endpoints(options: UpOptions) -> Endpoints:
    """Addresses for clients on this machine."""
    host, watched = (
        "127.0.0.1" if each in {"0.0.0.0", "::"} else each for each in (options.host, options.collector_host)
    )
    collector = url_of("http", watched, options.collector_port)
    return Endpoints(
        api=url_of("http", host, options.port),
        metrics=f"{collector}/metrics",
        console=f"{collector}/console",
        routers={f"router-{n}": url_of("http", host, port) for n, port in enumerate(options.router_ports, 1)},
    )


def routers_own(where: Endpoints) -> str:
    """Addresses of single routers, for their own metrics."""
    if not where.routers:
        return f"   (router: {where.api}/metrics)"
    each = "   ".join(f"{name} {url}" for name, url in where.routers.items())
    return f"\n  Routers   {each}   (they share the port; each serves its own /metrics)"


def program() -> str:
    """The command line of this program."""
    typed = Path(sys.argv[0])
    if typed.name != "baton":
        return "python -m services.launcher"
    return "baton" if shutil.which("baton") else str(typed)


@contextlib.contextmanager
def stop_signals() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Ctrl-C, SIGTERM or a closed terminal: the first sets ``stop``, the next one ``hurry``."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop, hurry
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
