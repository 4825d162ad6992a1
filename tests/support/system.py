"""The whole system as a user has it: ``baton up`` on free ports, with a state directory of its own."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from unittest import mock

import httpx
import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from services.launcher.bus_client import read_fleet, read_loads
from services.launcher.cluster.folder import variables
from services.launcher.system import state_file
from shared.contracts.channels import Party
from shared.contracts.load import LoadReport
from tests.support.nats_server import free_port

STOP_S_MAX = 120.0
"""From the signal to the launcher's end: drains included."""
GUARD_S_MAX = 45.0
"""From the launcher's SIGKILL until its guard has ended everything."""
SOON_S_MAX = 60.0
"""What the system does by itself is done by then."""
POLL_S = 0.1
PR_SET_PDEATHSIG = 1
MARK = "E2E_SYSTEM"
"""A variable that every process of a system inherits, so that none can be overlooked."""


def until(promise: Callable[[], Any], what: str, s_max: float = SOON_S_MAX) -> Any:
    """Look again and again until it holds, and answer what it gave."""
    deadline = time.monotonic() + s_max
    while True:
        if held := promise():
            return held
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {s_max:g} s: {what}")
        time.sleep(POLL_S)


async def _next_loads(nats_url: str) -> list[LoadReport]:
    return await read_loads(nats_url, await read_fleet(nats_url))


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs: neither gone nor waiting to be buried."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Metrics:
    """One scrape. Only what is asked for is parsed: tests poll, and a collector's whole page takes 35 ms."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()

    def sum(self, name: str, **labels: str) -> float:
        """The sum over all samples of that name that carry these labels."""
        return sum(value for _, value in self.each(name, **labels))

    def each(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        asked = "".join(f"{line}\n" for line in self._lines if line.startswith((f"{name}{{", f"{name} ")))
        for family in text_string_to_metric_families(asked):
            for sample in family.samples:
                if labels.items() <= sample.labels.items():
                    yield sample.labels, sample.value


def baton(*arguments: str, env: Mapping[str, str] | None = None, s_max: float = STOP_S_MAX) -> tuple[int, str, str]:
    """Run a ``baton`` command to its end: exit code, stdout, stderr.

    Its process is forked from one that has imported the command: that takes half a second of CPU, and most commands less.
    """
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(["services.launcher.cli"])
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        variables = {**environment(), **(env or {})}
        process = forking.Process(target=_run_command, args=(arguments, variables, Path.cwd(), out, err))
        process.start()
        process.join(s_max)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(["baton", *arguments], s_max, out.read_text(), err.read_text())
        return process.exitcode, out.read_text(), err.read_text()


def _run_command(arguments: Sequence[str], variables: Mapping[str, str], folder: Path, out: Path, err: Path) -> None:
    """As the installed script does, in ``folder`` and with these variables alone."""
    from services.launcher.cli import main

    for stream, file in enumerate((out, err), start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = ["baton", *arguments]
    main()


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "services.launcher.cli", *arguments]


def environment() -> dict[str, str]:
    """Ours, less what would change the system; wide enough that no word of a table is cut."""
    prefixes = ("BATON_", "ROUTER_", "WORKER_", "COLLECTOR_", "ORCHESTRATOR_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**kept, "COLUMNS": "200", "NO_COLOR": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def end_with_the_tests() -> None:
    """In the launcher, before it runs: SIGTERM comes when pytest is killed, so that not even then anything is left."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Launched:
    """One ``baton up``, with everything that it starts. Leaving the ``with`` asserts that nothing is left behind."""

    def __init__(
        self, folder: Path, *arguments: str, env: Mapping[str, str] | None = None, program: Path | None = None
    ) -> None:
        """``program``: an installed ``baton``; None: this checkout's."""
        self.folder = folder
        self._program = command() if program is None else [str(program)]
        self._arguments = arguments
        self._mark = uuid.uuid4().hex
        self._env = {**environment(), **(env or {}), MARK: self._mark}
        if program is not None:
            del self._env["PYTHONPATH"]
        self._log = folder / f"launcher-{self._mark[:6]}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._children: set[psutil.Process] = set()

    def start(self) -> None:
        """Start the launcher; it is not ready yet."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [*self._program, "up", "--state-dir", str(self.folder), *self._arguments],
                cwd=self.folder,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_the_tests,  # noqa: PLW1509  # one system call between fork and exec
            )

    def said(self) -> str:
        """What the launcher printed."""
        return self._log.read_text(errors="replace")

    def wait_said(self, text: str, s_max: float) -> None:
        """Wait for words of the launcher. Raises AssertionError with all that is known if it ends before."""

        def has_said() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                raise AssertionError(f"the launcher ended with {self.process.returncode}:\n{self.report_text()}")
            return text in self.said()

        try:
            until(has_said, f"the launcher says {text!r}", s_max)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.report_text()}") from error

    def report_text(self) -> str:
        """What the launcher printed and the ends of all logs."""
        logs = [f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in sorted(self.logs.glob("*.log"))]
        return "\n".join([self.said()[-5000:], *logs])

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def processes(self) -> list[psutil.Process]:
        """Every living process of this system, the launcher and its guard included.

        Those that hide their environment behind a title (vLLM's EngineCore) are found as children, once and for all.
        """
        running = list(psutil.process_iter(["ppid"]))
        ours = {process for process in running if self._is_ours(process)}
        family = {process.pid for process in ours}
        # Not by ``children()``, which looks at all processes of the machine for each of ours: tests poll.
        while found := {each for each in running if each.info["ppid"] in family and each.pid not in family}:
            self._children |= found
            family |= {each.pid for each in found}
        self._children = {process for process in self._children if is_alive(process)}
        return list(ours | self._children)

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self._mark
        except (psutil.Error, OSError):
            return False

    def addresses(self) -> dict[str, set[str]]:
        """Where processes of this system accept connections or datagrams, with their commands."""
        found: dict[str, set[str]] = {}
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                command = " ".join(process.cmdline())
                for one in process.net_connections("inet"):
                    if one.status == psutil.CONN_LISTEN or (one.type is socket.SOCK_DGRAM and not one.raddr):
                        found.setdefault(one.laddr.ip, set()).add(command)
        return found

    def pids(self, module: str, worker_id: str = "") -> list[int]:
        """Processes that run ``python -m MODULE``, of one worker if it is named. A child looks the same until it runs
        another program, and has a lower number where numbers start over.
        """
        found = {
            process.pid: process.ppid()
            for process in psutil.process_iter()
            if self._is_ours(process)
            and f"-m {module}" in " ".join(process.cmdline())
            and (not worker_id or process.environ().get("WORKER_WORKER_ID") == worker_id)
        }
        return [pid for pid, parent in found.items() if parent not in found]

    def worker_pid(self, worker_id: str) -> int:
        """The worker's process, as it is now; waits for one that is being started again."""
        return int(until(lambda: self.pids("services.worker", worker_id), f"{worker_id} runs")[0])

    def end(self, number: int = signal.SIGINT, *, code: int = 0, s_max: float = STOP_S_MAX) -> None:
        """Signal the launcher; asserts its exit code and that no process is left."""
        assert self.process is not None
        self.processes()  # Now that they have parents, all are found.
        self.process.send_signal(number)
        try:
            ended_with = self.process.wait(s_max)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"the launcher did not end within {s_max:g} s:\n{self.report_text()}") from error
        assert ended_with == code, self.report_text()
        until(lambda: not self.processes(), f"no process is left of {self.processes()}", GUARD_S_MAX)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_failure: object) -> None:
        assert self.process is not None
        try:
            if self.process.poll() is None:
                self.end()
        finally:
            for process in self.processes():
                process.kill()
            self.process.wait(STOP_S_MAX)


class System(Launched):
    """A whole system: with its endpoint, its metrics and its fleet."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        nats_url: str = "",
        env: Mapping[str, str] | None = None,
        program: Path | None = None,
    ) -> None:
        """With ``nats_url`` the test brings its own NATS, to break it; with ``--open`` it can connect without a key."""
        self.port, self.collector_port, self.nats_port = free_port(), free_port(), free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        scheme = "nats" if "--open" in arguments else "tls"
        self.nats_url = nats_url or f"{scheme}://127.0.0.1:{self.nats_port}"
        nats = ("--nats-url", nats_url) if nats_url else ("--nats-port", str(self.nats_port))
        ports = ("--port", str(self.port), "--collector-port", str(self.collector_port))
        super().__init__(folder, *ports, *nats, *arguments, env=env, program=program)
        # Tests use it in many threads. One of them may close a connection that another has just taken from the pool.
        unpooled = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(base_url=self.endpoint, timeout=httpx.Timeout(60.0), trust_env=False, limits=unpooled)

    def wait_ready(self, s_max: float) -> Self:
        """Until the launcher says that the system answers."""
        self.wait_said("Baton is ready", s_max)
        return self

    def metrics(self) -> Metrics:
        """The router's."""
        return Metrics(self.http.get("/metrics").raise_for_status().text)

    def fleet_metrics(self) -> Metrics:
        """The metrics collector's: what the workers say of themselves."""
        url = f"http://127.0.0.1:{self.collector_port}/metrics"
        return Metrics(httpx.get(url, trust_env=False).raise_for_status().text)

    def fleet(self) -> dict[str, dict[str, Any]]:
        """What ``baton workers --json`` prints, by worker id; read in this process, because tests poll it."""
        state = self._asked(read_fleet).state
        workers = json.loads(msgspec.json.encode(state.workers))
        return {worker["record"]["worker_id"]: worker for worker in workers}

    def settled_metrics(self) -> Metrics:
        """As ``fleet_metrics``, with all prompt tokens that workers had counted before this call."""
        loads = self._asked(_next_loads)

        def settled() -> Metrics | None:
            metrics = self.fleet_metrics()
            told = (
                metrics.sum("baton_worker_prompt_tokens_total", worker_id=load.worker_id, source=source)
                >= getattr(load, f"{source}_tokens_total")
                for load in loads
                for source in ("computed", "cached", "received")
            )
            return metrics if all(told) else None

        return until(settled, "the collector has the workers' load reports")

    def _asked(self, ask: Callable[[str], Coroutine[Any, Any, Any]]) -> Any:
        """What ``ask`` finds out with this system's NATS and the launcher's key."""
        running = state_file.find(self.folder)
        assert running is not None, self.report_text()
        keys = variables(running.keys_dir, Party.LAUNCHER) if running.keys_dir else {}
        with mock.patch.dict(os.environ, {**environment(), **keys}, clear=True):
            return asyncio.run(ask(running.nats_url))

    def until_idle(self) -> None:
        """Until no worker says that it has anything to do."""

        def idle() -> bool:
            metrics = self.fleet_metrics()
            return not any(
                metrics.sum(f"baton_worker_{work}") for work in ("requests_running", "legs", "waiting_tokens")
            )

        until(idle, "no worker has anything to do")

    def until_exact(self, workers: int) -> None:
        """Until the router's prefix index is exact for so many workers."""
        until(lambda: self.exact_indexes() == workers, f"the indexes of {workers} workers are exact")

    def exact_indexes(self) -> int:
        return int(self.metrics().sum("baton_router_index_state", state=EXACT))

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)
        self.http.close()


EXACT = "exact"
