"""Supervises the processes of a system: starts all, restarts those that die, stops them in reverse order."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar, cast

from services.launcher.bus_client import launcher_access
from services.launcher.system import children
from services.launcher.system.children import (
    Child,
    ChildStarter,
    RestartHistory,
    RestartPolicy,
    last_lines,
    why_it_died,
)
from services.launcher.system.process_plan import ProcessPlan, Stage, SystemPlan, stop_s
from services.launcher.system.screen import Row, Screen
from services.launcher.system.watchdog import STEP_S
from shared.bus.nats_bus import connect_nats
from shared.bus.port import Bus, BusError, Envelope
from shared.contracts.channels import DRAINED, SERVICE_STATUS
from shared.contracts.control import ServicePhase, ServiceStatus
from shared.contracts.fleet_orders import WorkerDrained
from shared.runtime.service import EXIT_CONFIGURATION
from shared.runtime.state_folder import saved_role_file
from shared.runtime.waiting import first_of
from shared.text.fleet_text import drained

T = TypeVar("T")

NATS_START_S_MAX = 30.0
NATS_CONNECT_S_MAX = 5.0
"""Longest wait for a NATS that is already running."""
START_S_MAX = {Stage.SERVICES: 15.0, Stage.WORKERS: 3600.0}
"""Seconds after which a process that is not ready is reported, and others are started meanwhile. A worker's start
includes the download of a model.
"""
STARTS_AT_ONCE_MIN = 2
DEATHS_SHOWN_MAX = 5
"""Deaths of one process in a row that are shown with the last lines of its log."""


class StartFailed(Exception):
    """The system could not be started; the message says why."""


class Supervisor:
    """One process tree, used as ``async with``; leaving the context stops everything."""

    def __init__(
        self,
        plan: SystemPlan,
        starter: ChildStarter,
        screen: Screen,
        hurry: asyncio.Event,
        restarts: RestartPolicy | None = None,
    ) -> None:
        """``hurry``, once set, ends every wait for a graceful stop."""
        self._restarts = restarts or RestartPolicy()
        self.plan = plan
        self._screen = screen
        self._clock = screen.clock
        self._starter = starter
        self._hurry = hurry
        self._tasks = asyncio.TaskGroup()
        self._children: dict[str, Child] = {}
        self._ready = {process.name: asyncio.Event() for process in plan.processes}
        self._settled = {process.name: asyncio.Event() for process in plan.processes}
        """The processes for which the start waits no longer: they are ready, or keep trying and have failed once."""
        self._restarting: set[str] = set()
        self._stopping = asyncio.Event()
        self._broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.is_misconfigured = False
        """Whether it broke because of a process with a wrong configuration: to start it again would not help."""
        self._bus: Bus | None = None
        for process in plan.processes:
            self._screen.board.plan(process.name, process.note)

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._tasks.create_task(self._rotate_logs(), name="rotate-logs")
        self._tasks.create_task(self._end_still(), name="end-still-processes")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.take_down()
        await self._tasks.__aexit__(None, None, None)

    @property
    def rows(self) -> dict[str, Row]:
        """Every process and where it is."""
        return self._screen.board.rows

    @property
    def bus(self) -> Bus:
        """The launcher's own connection; there is one once the system is up."""
        assert self._bus is not None
        return self._bus

    @property
    def workers(self) -> list[ProcessPlan]:
        """Processes that run or are being started, in start order."""
        return [process for process in self.plan.stage(Stage.WORKERS) if self._is_kept(process.name)]

    def _is_kept(self, name: str) -> bool:
        row = self.rows[name]
        is_over = row.phase is ServicePhase.STOPPED or (
            row.phase is ServicePhase.FAILED and name not in self._restarting
        )
        return not (is_over or row.has_drained)

    def add(self, process: ProcessPlan) -> None:
        """Add a process on which the system does not depend. One of the same name that has ended is forgotten."""
        others = tuple(each for each in self.plan.processes if each.name != process.name)
        extra = replace(process, is_extra=True)
        self.plan = replace(self.plan, processes=(*others, extra))
        self._screen.board.plan(extra.name, extra.note)
        self._ready[extra.name], self._settled[extra.name] = asyncio.Event(), asyncio.Event()
        self._keep(extra)
        self._tasks.create_task(self._greet(extra), name=f"greet-{extra.name}")

    async def _greet(self, process: ProcessPlan) -> None:
        """Report when it is ready, unless the system ends before."""
        await first_of(self._ready[process.name].wait(), self._stopping.wait(), within_s=START_S_MAX[Stage.WORKERS])
        if self._ready[process.name].is_set():
            seconds = self.rows[process.name].seconds(self._clock.now())
            self._screen.show(f"[green]●[/] {process.name} is ready, {seconds:.1f} s after its start.")

    @property
    def is_drained(self) -> bool:
        """Whether every worker was ordered to drain and has exited."""
        rows = [self.rows[process.name] for process in self.plan.stage(Stage.WORKERS)]
        return all(row.has_drained and row.phase is ServicePhase.STOPPED for row in rows)

    async def bring_up(self) -> None:
        """Start everything; returns when all are ready, except workers that keep trying. Raises StartFailed."""
        for process in self.plan.stage(Stage.NATS):
            self._keep(process)
        self._bus = await self._connect()
        await self._bus.subscribe(SERVICE_STATUS, self._on_status)
        await self._bus.subscribe(DRAINED, self._on_drained)
        await self.unless_broken(self._start_all(self.plan.stage(Stage.SERVICES) + self.plan.stage(Stage.WORKERS)))

    async def _start_all(self, processes: list[ProcessPlan]) -> None:
        """Loading a model keeps a core busy, so the number of concurrent starts is limited."""
        slots = asyncio.Semaphore(max(STARTS_AT_ONCE_MIN, len(os.sched_getaffinity(0))))
        groups: dict[str, list[ProcessPlan]] = {}
        for process in processes:
            groups.setdefault(process.group or process.name, []).append(process)
        async with asyncio.TaskGroup() as starts:
            for name, group in groups.items():
                starts.create_task(self._start_group(group, slots), name=f"start-{name}")

    async def _start_group(self, group: list[ProcessPlan], slots: asyncio.Semaphore) -> None:
        """None is ready before all have started, so they share a slot."""
        async with slots, asyncio.TaskGroup() as starts:
            kept = [self._keep(process) for process in group]
            for process, task in zip(group, kept, strict=True):
                starts.create_task(self._settle(process, task), name=f"settle-{process.name}")
        for process, task in zip(group, kept, strict=True):
            await first_of(self._settled[process.name].wait(), asyncio.shield(task))

    async def _settle(self, process: ProcessPlan, kept: asyncio.Task[None]) -> None:
        """Until it is settled or given up. It may wait for something that comes late: then that is reported."""
        name, s_max = process.name, START_S_MAX[process.stage]
        settled = self._settled[name]
        await first_of(settled.wait(), asyncio.shield(kept), within_s=s_max)
        if not (settled.is_set() or kept.done()):
            self._screen.show_error(
                f"{name} is not ready after {s_max:.0f} s{self._detail(name)}. Its log: {self._starter.log_of(name)}"
            )

    def _detail(self, name: str) -> str:
        return f": {self.rows[name].detail}" if self.rows[name].detail else ""

    async def _rotate_logs(self) -> None:
        while not self._stopping.is_set():
            for child in list(self._children.values()):
                try:
                    await asyncio.to_thread(children.rotate, child.log)
                except OSError as error:
                    self._screen.show_error(f"{child.log} cannot be rotated: {error}")
            await first_of(self._stopping.wait(), asyncio.sleep(children.ROTATE_S))

    async def _end_still(self) -> None:
        """Kill processes whose event loop stands still. They are started again as others that die."""
        while not self._stopping.is_set():
            await first_of(self._stopping.wait(), asyncio.sleep(STEP_S))
            still = self._starter.watchdog.step()
            for child in self._children.values():
                if why := still.get(child.pid):
                    self._tasks.create_task(child.kill(why), name=f"kill-{child.plan.name}")

    async def until_broken(self) -> str:
        """Returns the reason when the system cannot continue."""
        return await asyncio.shield(self._broken)

    async def unless_broken(self, work: Awaitable[T]) -> T:
        """The result of ``work``. Raises StartFailed when the system cannot continue."""
        done = await first_of(work, asyncio.shield(self._broken))
        if self._broken.done():
            raise StartFailed(self._broken.result())
        return cast("T", done)

    async def _connect(self) -> Bus:
        """Connect to NATS. Raises StartFailed."""
        connect_s = NATS_START_S_MAX if self.plan.stage(Stage.NATS) else NATS_CONNECT_S_MAX
        connecting = connect_nats(
            self.plan.nats_url, name="launcher", connect_s_max=connect_s, access=launcher_access()
        )
        try:
            bus = await self.unless_broken(connecting)
        except BusError as error:
            raise StartFailed(f"NATS at {self.plan.nats_url} does not respond: {error}") from error
        for process in self.plan.stage(Stage.NATS):
            self._screen.board.mark(process.name, ServicePhase.READY, self.plan.nats_url, self._clock.now())
            self._ready[process.name].set()
        return bus

    def _on_status(self, status: ServiceStatus, _envelope: Envelope) -> None:
        row = self._screen.board.heard(status, self._clock.now())
        if row and row.phase is ServicePhase.READY:
            self._is_ready(row)

    def _on_drained(self, report: WorkerDrained, _envelope: Envelope) -> None:
        if report.ordered and report.worker_id in self.rows:
            self.rows[report.worker_id].has_drained = True
            self._screen.show(f"[yellow]●[/] {drained(report)}")

    def _is_ready(self, row: Row) -> None:
        self._ready[row.name].set()
        self._settled[row.name].set()
        if row.name in self._restarting:
            self._restarting.discard(row.name)
            self._screen.show(
                f"[green]●[/] {row.name} is ready again, {row.seconds(self._clock.now()):.1f} s after its start."
            )

    def _keep(self, process: ProcessPlan) -> asyncio.Task[None]:
        reset_saved_role(process)
        return self._tasks.create_task(self._keep_running(process), name=f"keep-{process.name}")

    async def _keep_running(self, process: ProcessPlan) -> None:
        """Start the process and restart it when it dies, until the system stops or the process is given up."""
        history = RestartHistory(self._restarts)
        while not self._stopping.is_set():
            pause_s = await self._run(process, history)
            if pause_s is None:
                return
            await first_of(asyncio.sleep(pause_s), self._stopping.wait())
            if process.stage is Stage.NATS and not self._stopping.is_set():
                self._tasks.create_task(self._watch_nats_return(process), name="nats-return")

    async def _run(self, process: ProcessPlan, history: RestartHistory) -> float | None:
        """From its start to its end. Returns the pause before the next start, or None for no other start."""
        try:
            child = await self._starter.start(process)
        except OSError as error:  # Such as no space for its log, no memory, or a program that was removed.
            return self._after_failure(process, f"It cannot be started: {error}.", (), 1, history)
        self._children[process.name] = child
        self._screen.board.started(process.name, child.pid, self._clock.now())
        if self._stopping.is_set():  # It started while the others were being stopped.
            await self._stop(child)
        exit_code = await child.process.wait()
        del self._children[process.name]
        self._starter.forget(child)
        if self._stopping.is_set() or (self.rows[process.name].has_drained and exit_code == 0):
            self._screen.board.mark(process.name, ServicePhase.STOPPED, "", self._clock.now())
            return None
        if exit_code == 0 and self._ready[process.name].is_set():
            return self._after_end(process, history)
        return self._after_death(process, child, exit_code, history)

    async def _watch_nats_return(self, process: ProcessPlan) -> None:
        """NATS publishes no status: it is ready when the launcher's connection is back."""
        assert self._bus is not None
        deadline = self._clock.now() + NATS_START_S_MAX
        while self._clock.now() < deadline and not self._stopping.is_set():
            await first_of(asyncio.sleep(0.2), self._stopping.wait())
            if self._bus.connected and process.name in self._children:
                self._screen.board.mark(process.name, ServicePhase.READY, self.plan.nats_url, self._clock.now())
                self._is_ready(self.rows[process.name])
                return

    def _after_end(self, process: ProcessPlan, history: RestartHistory) -> float:
        """Report that a process ended in order: a command such as `baton service upgrade`, or a user, sent it SIGTERM.
        Returns the pause before the restart.
        """
        self._screen.board.mark(process.name, ServicePhase.STOPPED, "", self._clock.now())
        self._restarting.add(process.name)
        self._screen.show(f"[yellow]●[/] {process.name} was told to end and has ended. Starting it again.")
        return history.died(self._clock.now()).pause_s

    def _after_death(self, process: ProcessPlan, child: Child, exit_code: int, history: RestartHistory) -> float | None:
        """As ``_after_failure``, with the launcher's own reason, or the one from its status and log."""
        row = self._screen.board.rows[process.name]
        detail = row.detail if row.phase is ServicePhase.FAILED else ""
        lines = children.tail(child.log)
        why = child.why_ended or why_it_died(lines, exit_code, detail)
        return self._after_failure(process, why, lines, exit_code, history)

    def _after_failure(
        self, process: ProcessPlan, why: str, lines: Sequence[str], exit_code: int, history: RestartHistory
    ) -> float | None:
        """Report it. Returns the pause before the next start, or None for no restart."""
        now = self._clock.now()
        self._screen.board.mark(process.name, ServicePhase.FAILED, why, now)
        if self._is_final(process, exit_code):
            self._give_up(process, exit_code, f"{why}\nIts log: {self._starter.log_of(process.name)}")
            return None
        restart = history.died(now)
        self._restarting.add(process.name)
        if process.keeps_trying:
            self._settled[process.name].set()
        shown = last_lines(lines) if restart.attempt <= DEATHS_SHOWN_MAX else []
        report = f"{process.name}: {why}\n" + "".join(f"    {line}\n" for line in shown)
        self._screen.show_error(f"{report}Restarting it in {restart.pause_s:.1f} s (attempt {restart.attempt}).")
        return restart.pause_s

    def _is_final(self, process: ProcessPlan, exit_code: int) -> bool:
        """Whether the process stays down: its configuration is wrong, or its first start failed. A service whose first
        start failed otherwise may only have missed what it needs. Requests are served without the orchestrator and the
        collector: once they have been ready, they always come back.
        """
        was_ready = self._ready[process.name].is_set()
        if exit_code == EXIT_CONFIGURATION:
            return process.serves_requests or not was_ready
        return not was_ready and process.stage is not Stage.SERVICES and not process.keeps_trying

    def _give_up(self, process: ProcessPlan, exit_code: int, why: str) -> None:
        """The process stays down. The system ends with it during its start, or when none is left that does its work."""
        self._restarting.discard(process.name)
        if not self._ready[process.name].is_set():
            text, ends = f"{process.name} did not start. {why}", not process.is_extra
        else:
            like_it = [p for p in self.plan.stage(process.stage) if p.serves_requests and p.name != process.name]
            text = f"{process.name} is not restarted: its configuration is wrong. {why}"
            ends = not any(self._is_kept(p.name) for p in like_it)
        if not ends:
            self._screen.show_error(text)
        elif not self._broken.done():
            self.is_misconfigured = exit_code == EXIT_CONFIGURATION
            self._broken.set_result(text)

    async def take_down(self) -> None:
        """Workers first, so that running requests can finish; then routers, which report what these used; then the
        other services, which keep that; NATS last.
        """
        self._stopping.set()
        for stage in sorted(Stage, reverse=True):
            if stage is Stage.NATS and self._bus:
                await self._bus.close()
            for serving in (True, False):
                of_stage = [c for c in self._children.values() if c.plan.stage is stage]
                stopping = [child for child in of_stage if child.plan.serves_requests is serving]
                await asyncio.gather(*(self._stop(child) for child in stopping))

    async def _stop(self, child: Child) -> None:
        name = child.plan.name
        self._screen.board.draining(name, self._clock.now())
        grace_s = stop_s(child.plan, self._starter.environment)
        by_itself = await child.stop(grace_s=grace_s, hurry=self._hurry)
        detail = (
            ""
            if by_itself
            else ("killed" if self._hurry.is_set() else f"killed: it had not stopped after {grace_s:.0f} s")
        )
        self._screen.board.mark(name, ServicePhase.STOPPED, detail, self._clock.now())


def reset_saved_role(process: ProcessPlan) -> None:
    """Delete the role that an earlier worker of this name was changed to: this one starts with its planned role."""
    if process.stage is Stage.WORKERS and "BATON_STATE_DIR" in process.env:
        saved_role_file(process.env["BATON_STATE_DIR"], process.name).unlink(missing_ok=True)
