"""From the first process to the last: bring a plan up, say where everything is, stay, take it down."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.markup import escape

from services.launcher.system.children import open_nursery
from services.launcher.system.machine import inherited_environment, key_headers, look
from services.launcher.system.plan import Stage, SystemPlan, UpOptions
from services.launcher.system.scaling import Scaling
from services.launcher.system.screen import Screen
from services.launcher.system.system import StartFailed, System
from services.launcher.system.waiting import first_of
from shared.runtime.settings import load_common

ROUTER_READY_S_MAX = 60.0
"""After the workers are ready: the router has heard of them and has checked their tokens."""
POLL_S = 0.2
HTTP_S_MAX = 5.0
GONE_POLL_S = 2.0


@dataclass(frozen=True)
class Session:
    """One life of `baton up`."""

    plan: SystemPlan
    options: UpOptions
    screen: Screen
    gone: Callable[[], bool]
    """Whether what this session depends on has ended: asked every ``GONE_POLL_S``."""

    async def run(self) -> int:
        """Start, stay, stop. Answers the exit code."""
        for note in self.plan.notes:
            self.screen.say(f"[yellow]![/] {note}")
        with stop_signals() as (stop, hurry), open_nursery(self.logs, inherited_environment()) as nursery:
            async with System(self.plan, nursery, self.screen, hurry) as system:
                broken = await self._live(system, stop)
                self.screen.say("Stopping: what runs may finish. Ctrl-C again kills it.")
                with self.screen.watching():
                    await system.take_down()
        if broken:
            self.screen.complain(broken)
        return 1 if broken else 0

    @property
    def logs(self) -> Path:
        """One file per process."""
        return Path(self.options.state_dir) / "logs"

    async def _live(self, system: System, stop: asyncio.Event) -> str:
        """Until all must end; answers why, if nobody asked for it."""
        try:
            with self.screen.watching():
                await first_of(system.bring_up(), stop.wait())
            if not stop.is_set() and self.options.workers_max:
                await Scaling(system, self.options, look(), self.screen).listen()
            if not stop.is_set():
                await first_of(self._announce(), stop.wait())
        except StartFailed as failure:
            return str(failure)
        return await first_of(system.until_broken(), self._until_told(stop, system)) or ""

    async def _until_told(self, stop: asyncio.Event, system: System) -> None:
        """Workers that joined alone are all that there is to stay for."""
        while not stop.is_set() and not self.gone() and not (self.options.join and system.is_drained):
            await first_of(stop.wait(), asyncio.sleep(GONE_POLL_S))

    async def _announce(self) -> None:
        """Say where everything is, once the router would answer. Raises StartFailed."""
        workers = ", ".join(process.name for process in self.plan.stage(Stage.WORKERS))
        if self.options.join:
            self.screen.say(f"\n[green]{workers} joined[/] {self.plan.nats_url}. Logs: {self.logs}. Ctrl-C drains it.")
            return
        where = endpoints(self.options)
        for router in where.routers.values():
            await served_model(router)
        endpoint = where.api
        model = await served_model(endpoint)
        usual = self.options.state_dir == load_common(inherited_environment()).state_dir
        folder = "" if usual else f" --state-dir {self.options.state_dir}"
        key = "" if model else " -H 'Authorization: Bearer KEY'"
        model = model or self.options.model or "MODEL"
        body = json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": 32, "stream": True})
        self.screen.say(f"""
[bold green]Baton is ready:[/] {endpoint}/v1   model [bold]{escape(model)}[/]   {workers}

  Try it    [bold]curl -N {endpoint}/v1/completions -H 'Content-Type: application/json'{key} \\
              -d {escape(shlex.quote(body))}[/]
  Why so    [bold]{program()} explain{folder}[/]   why it went there, and what took how long
  Watch     [bold]{where.console}[/]   or {program()} top{folder}
  Metrics   {where.metrics}{routers_own(where)}
  More      {program()} up --join{folder}   one more worker
  Trouble?  {program()} doctor{folder}   says what is wrong and what to do
  Logs      {self.logs}

Ctrl-C stops it all.""")


@dataclass(frozen=True)
class Endpoints:
    """URLs on this machine."""

    api: str
    metrics: str
    """Of the fleet."""
    console: str
    """For a browser."""
    routers: dict[str, str]
    """Each router's own, if several share ``api``."""


def endpoints(options: UpOptions) -> Endpoints:
    """Where this machine reaches what it runs."""
    host = "127.0.0.1" if options.host in {"0.0.0.0", "::"} else options.host
    collector = f"http://{host}:{options.collector_port}"
    return Endpoints(
        api=f"http://{host}:{options.port}",
        metrics=f"{collector}/metrics",
        console=f"{collector}/console",
        routers={f"router-{n}": f"http://{host}:{port}" for n, port in enumerate(options.router_ports, 1)},
    )


def routers_own(where: Endpoints) -> str:
    """Where routers tell of themselves alone."""
    if not where.routers:
        return f"   (router: {where.api}/metrics)"
    each = "   ".join(f"{name} {url}" for name, url in where.routers.items())
    return f"\n  Routers   {each}   (share the port; /metrics of each there)"


def program() -> str:
    """What to type to get this program again."""
    typed = Path(sys.argv[0])
    if typed.name != "baton":
        return "python -m services.launcher"
    return "baton" if shutil.which("baton") else str(typed)


async def served_model(endpoint: str) -> str:
    """The first model that the router offers, once it is ready; empty if it wants a key to say. Raises StartFailed."""
    said = "it does not answer"
    async with httpx.AsyncClient(base_url=endpoint, timeout=HTTP_S_MAX, trust_env=False) as client:
        # The clock is read between the attempts: httpx could lose a cancellation, and each attempt ends by itself.
        until = asyncio.get_running_loop().time() + ROUTER_READY_S_MAX
        while asyncio.get_running_loop().time() < until:
            try:
                answer = await client.get("/ready")
                said = answer.text
                if answer.status_code == httpx.codes.OK:
                    models = await client.get("/v1/models", headers=key_headers())
                    if models.status_code == httpx.codes.UNAUTHORIZED:
                        return ""
                    return str(models.json()["data"][0]["id"])
            except (httpx.TransportError, LookupError):
                pass
            await asyncio.sleep(POLL_S)
    raise StartFailed(f"All processes are up, but after {ROUTER_READY_S_MAX:.0f} s the router is not ready: {said}")


@contextlib.contextmanager
def stop_signals() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Ctrl-C, SIGTERM or a closed terminal: the first sets ``stop``, the next one ``hurry``."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def told() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in numbers:
        loop.add_signal_handler(number, told)
    try:
        yield stop, hurry
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
