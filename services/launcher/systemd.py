"""systemd units for the processes of one host: a target, a service for each process, and a template for workers; and
how an upgrade restarts its workers.

Start order is NATS, then orchestrator and collector, then routers, then workers; systemd stops in the reverse order, so
workers finish their requests first. No unit requires another one: every process waits for what it needs, and stopping
NATS must not end workers.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.launcher.system.process_plan import ProcessPlan, Stage
from shared.bus.port import Bus, Envelope
from shared.contracts.channels import SERVICE_STATUS
from shared.contracts.control import ServicePhase, ServiceStatus

TARGET = "baton.target"
WORKER_TEMPLATE = "baton-worker@.service"
STOP_SPARE_S = 15.0
"""Added to the drain deadline of a process: for its last status and its children."""
DRAIN_S = {Stage.WORKERS: 30.0, Stage.SERVICES: 30.0, Stage.NATS: 10.0}
"""Unless a variable ``*_DRAIN_S_MAX`` says otherwise."""
COMMON_RULES = """\
Restart=on-failure
RestartSec=1
RestartSteps=5
RestartMaxDelaySec=30
RestartPreventExitStatus=78
KillMode=mixed
LimitNOFILE=65536
SyslogIdentifier={identifier}
NoNewPrivileges=yes
"""
SYSTEM_RULES = """\
User={user}
UMask=0077
CapabilityBoundingSet=
ProtectSystem=full
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectHostname=yes
RestrictSUIDSGID=yes
LockPersonality=yes
"""
"""Without ProtectClock and PrivateDevices, which hide GPUs, MemoryDenyWriteExecute, which breaks compiled kernels, and
PrivateTmp, which hides the socket of CUDA's MPS.
"""
WITHOUT_GPU = "PrivateDevices=yes\nPrivateTmp=yes\n"
FOR_WORKERS = "LimitMEMLOCK=infinity\n"
"""RDMA locks the memory that it reads and writes."""


class CannotWriteUnit(Exception):
    """A value cannot be written into a unit; the message says which."""


@dataclass(frozen=True, kw_only=True)
class File:
    """A file to write."""

    name: str
    text: str
    is_secret: bool = False
    """For its owner only: it may have variables such as HF_TOKEN."""


@dataclass(frozen=True, kw_only=True)
class UnitOptions:
    """What units need besides the plan."""

    folder: str
    """Of the variables' files; absolute."""
    user: str = ""
    """Runs the processes; empty: units of a user's own service manager."""


def unit_files(processes: Sequence[ProcessPlan], options: UnitOptions) -> list[File]:
    """The units of these processes. Raises CannotWriteUnit."""
    workers = [each for each in processes if each.stage is Stage.WORKERS]
    units = [File(name=TARGET, text=_target(processes, options))]
    units += [
        File(name=unit_of(each), text=_service(each, processes, options)) for each in processes if each not in workers
    ]
    if workers:
        units.append(File(name=WORKER_TEMPLATE, text=_service(workers[0], processes, options, drain_of=workers)))
    return units


def variable_files(processes: Sequence[ProcessPlan], inherited: Mapping[str, str]) -> list[File]:
    """The variables of each process, which the units read. Raises CannotWriteUnit."""
    return [
        File(
            name=variable_file(each.name),
            text=variables_text({**_inherits(each, inherited), **each.env}),
            is_secret=True,
        )
        for each in processes
    ]


def _inherits(process: ProcessPlan, inherited: Mapping[str, str]) -> Mapping[str, str]:
    return {} if process.stage is Stage.NATS else inherited


def variable_file(name: str) -> str:
    """The file with the variables of a process."""
    return f"{name}.env"


def unit_of(process: ProcessPlan) -> str:
    """The name of its unit."""
    if process.stage is Stage.WORKERS:
        return WORKER_TEMPLATE.replace("@", f"@{process.name}")
    return f"baton-{process.name}.service"


def variables_text(variables: Mapping[str, str]) -> str:
    """As ``EnvironmentFile=`` reads it. Raises CannotWriteUnit."""
    return "".join(f"{name}={_quoted_value(name, value)}\n" for name, value in sorted(variables.items()))


def read_variables(text: str) -> dict[str, str]:
    """The inverse of ``variables_text``."""
    lines = [line.partition("=") for line in text.splitlines() if line]
    return {name: re.sub(r"\\(.)", r"\1", value[1:-1]) for name, _, value in lines}


def _target(processes: Sequence[ProcessPlan], options: UnitOptions) -> str:
    wants = "".join(f"Wants={unit_of(each)}\n" for each in processes)
    return (
        f"[Unit]\nDescription=Baton\n{wants}\n"
        f"[Install]\nWantedBy={'multi-user.target' if options.user else 'default.target'}\n"
    )


def _service(
    process: ProcessPlan,
    processes: Sequence[ProcessPlan],
    options: UnitOptions,
    drain_of: Sequence[ProcessPlan] = (),
) -> str:
    """``drain_of``: processes that share the unit, if it is a template."""
    is_worker = process.stage is Stage.WORKERS
    name = "%i" if is_worker else process.name
    before = [unit_of(each) for each in processes if _rank(each) < _rank(process)]
    after = " ".join(["network-online.target" if options.user else "", *before]).strip()
    folder = options.folder.replace("%", "%%")
    return (
        f"[Unit]\nDescription=Baton {'worker %i' if is_worker else process.name}\nPartOf={TARGET}\n"
        + (f"After={after}\n" if after else "")
        + ("Wants=network-online.target\n" if options.user else "")
        + "StartLimitIntervalSec=0\n"
        f"\n[Service]\nType=exec\nExecStart={command_line(process.command)}\n"
        f"EnvironmentFile={folder}/{variable_file(name)}\nEnvironment=PYTHONUNBUFFERED=1\n"
        + ("ExecReload=/bin/kill -HUP $MAINPID\n" if process.stage is Stage.NATS else "")
        + f"TimeoutStopSec={max(map(_drain_s, drain_of or [process])) + STOP_SPARE_S:.0f}\n"
        + COMMON_RULES.format(identifier=f"baton-{name}")
        + (SYSTEM_RULES.format(user=options.user) if options.user else "")
        + (FOR_WORKERS if is_worker else WITHOUT_GPU if options.user else "")
        + f"\n[Install]\nWantedBy={TARGET}\n"
    )


def _rank(process: ProcessPlan) -> tuple[int, bool]:
    """Start order: of the services, those that requests do without come first."""
    return process.stage, process.serves_requests


def _drain_s(process: ProcessPlan) -> float:
    given = [value for name, value in process.env.items() if name.endswith("_DRAIN_S_MAX")]
    return max([DRAIN_S[process.stage], *map(float, given)])


def command_line(command: Sequence[str]) -> str:
    """As ``ExecStart=`` reads it. Raises CannotWriteUnit."""
    return " ".join(_quoted_argument(each) for each in command)


def _quoted_argument(text: str) -> str:
    escaped = _one_line(text, text).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if re.fullmatch(r"[\w./:@=,+-]+", escaped) else f'"{escaped}"'


def _quoted_value(name: str, value: str) -> str:
    escaped = re.sub(r'([\\"`$])', r"\\\1", _one_line(name, value))
    return f'"{escaped}"'


def _one_line(name: str, text: str) -> str:
    if any(each in text for each in "\n\r\0"):
        raise CannotWriteUnit(f"{name} has more than one line")
    return text


# Restarts the workers of a host one after another, each when the one before serves again.

READY_S_MAX = 3600.0
"""For a worker, which may have to download a model."""
RESTART_S_MAX = 900.0
"""For systemd to stop a worker, which drains, and to start it."""


class UpgradeStopped(Exception):
    """A worker did not come back, and the ones after it were left as they are; the message names it."""


class Systemctl:
    """systemd's command line, for the system's or the user's service manager."""

    def __init__(self, *, user: bool, program: str = "systemctl") -> None:
        self._program = [program, *(["--user"] if user else [])]

    def run(self, *arguments: str) -> str:
        """Its output. Raises UpgradeStopped."""
        try:
            done = subprocess.run(
                [*self._program, *arguments], capture_output=True, text=True, timeout=RESTART_S_MAX, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UpgradeStopped(f"{' '.join(arguments)}: {error}") from error
        if done.returncode:
            raise UpgradeStopped(f"{' '.join(arguments)}: {done.stderr.strip() or done.returncode}")
        return done.stdout.strip()

    def restart(self, unit: str) -> int:
        """Returns the pid of the new process; systemd has waited for the end of the old one. Raises UpgradeStopped."""
        self.run("restart", unit)
        return int(self.run("show", "--property", "MainPID", "--value", unit) or 0)


async def restart_workers(
    bus: Bus,
    workers: Sequence[str],
    restart: Callable[[str], int],
    show: Callable[[str], None],
    ready_s_max: float = READY_S_MAX,
) -> None:
    """``restart`` gets a unit and returns its new pid, on a thread. Raises UpgradeStopped, BusError."""
    for number, worker_id in enumerate(workers, 1):
        show(f"Restarting {worker_id} ({number} of {len(workers)}): it drains first.")
        await _restart(bus, worker_id, restart, ready_s_max)
        show(f"{worker_id} is ready.")


async def _restart(bus: Bus, worker_id: str, restart: Callable[[str], int], ready_s_max: float) -> None:
    ended: dict[int, ServiceStatus] = {}
    heard = asyncio.Event()

    def on_status(status: ServiceStatus, _envelope: Envelope) -> None:
        if status.phase in {ServicePhase.READY, ServicePhase.FAILED}:
            ended[status.pid] = status
            heard.set()

    subscription = await bus.subscribe(SERVICE_STATUS, on_status, service="worker", instance=worker_id)
    try:
        pid = await asyncio.to_thread(restart, WORKER_TEMPLATE.replace("@", f"@{worker_id}"))
        earlier = ended.keys() - {pid}  # systemd may have to start it more than once, so any later process will do.
        async with asyncio.timeout(ready_s_max):
            while not ended.keys() - earlier:
                heard.clear()
                await heard.wait()
    except TimeoutError:
        raise UpgradeStopped(f"{worker_id} is not ready after {ready_s_max:.0f} s") from None
    finally:
        await subscription.close()
    if failed := [each for key, each in ended.items() if key not in earlier and each.phase is ServicePhase.FAILED]:
        raise UpgradeStopped(f"{worker_id} failed: {failed[0].detail}")
