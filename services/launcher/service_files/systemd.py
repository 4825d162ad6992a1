"""systemd units for the processes of one host: a target, a service for each process, and a template for workers.

Start order is NATS, then orchestrator and collector, then routers, then workers; systemd stops in the reverse order, so
workers finish their requests first. No unit requires another one: every process waits for what it needs, and stopping
NATS must not end workers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from services.launcher.service_files.host_services import File, HostServices, one_line, variable_file
from services.launcher.system.process_plan import ProcessPlan, Stage

TARGET = "baton.target"
WORKER_TEMPLATE = "baton-worker@.service"
RESTART_RULES = """\
Restart=on-failure
RestartSec=1
RestartSteps=5
RestartMaxDelaySec=30
RestartPreventExitStatus=78
"""
COMMON_RULES = """\
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


def unit_files(host: HostServices) -> list[File]:
    """The units of these processes. Raises CannotWriteService."""
    others = [each for each in host.processes if each.stage is not Stage.WORKERS]
    units = [target(host)]
    units += [File(name=unit_of(each), text=_service(host, [each], each.name)) for each in others]
    if host.workers:
        units.append(File(name=WORKER_TEMPLATE, text=_service(host, host.workers, "%i")))
    return units


def variable_files(host: HostServices) -> list[File]:
    """The variables of each process, which the units read. Raises CannotWriteService."""
    return [
        File(name=variable_file(each.name), text=variables_text(host.variables(each)), is_secret=True)
        for each in host.processes
    ]


def unit_of(process: ProcessPlan) -> str:
    """The name of its unit."""
    return worker_unit(process.name) if process.stage is Stage.WORKERS else f"baton-{process.name}.service"


def worker_unit(worker_id: str) -> str:
    return WORKER_TEMPLATE.replace("@", f"@{worker_id}")


def variables_text(variables: Mapping[str, str]) -> str:
    """As ``EnvironmentFile=`` reads it. Raises CannotWriteService."""
    return "".join(f"{name}={_quoted_value(name, value)}\n" for name, value in sorted(variables.items()))


def target(host: HostServices) -> File:
    """The target that starts and stops all units."""
    wants = "".join(f"Wants={unit_of(each)}\n" for each in host.processes)
    wanted_by = "multi-user.target" if host.user else "default.target"
    return File(name=TARGET, text=f"[Unit]\nDescription=Baton\n{wants}\n[Install]\nWantedBy={wanted_by}\n")


def _service(host: HostServices, processes: Sequence[ProcessPlan], name: str) -> str:
    """The unit of these processes: one, or all workers, whose name is ``%i``."""
    process = processes[0]
    is_worker = process.stage is Stage.WORKERS
    return (
        unit_section(host, process, name) + f"\n[Service]\nType=exec\nExecStart={command_line(process.command)}\n"
        f"EnvironmentFile={in_unit(host.folder)}/{variable_file(name)}\nEnvironment=PYTHONUNBUFFERED=1\n"
        + ("ExecReload=/bin/kill -HUP $MAINPID\n" if process.stage is Stage.NATS else "")
        + f"TimeoutStopSec={host.stop_s(processes):.0f}\n"
        + RESTART_RULES
        + COMMON_RULES.format(identifier=f"baton-{name}")
        + (SYSTEM_RULES.format(user=host.user) if host.user else "")
        + (FOR_WORKERS if is_worker else WITHOUT_GPU if host.user else "")
        + f"\n[Install]\nWantedBy={TARGET}\n"
    )


def unit_section(host: HostServices, process: ProcessPlan, name: str) -> str:
    """Order, and restarts for ever. ``name``: of the process, or ``%i`` in a template."""
    before = map(unit_of, host.before(process))
    after = " ".join(["network-online.target" if host.user else "", *before]).strip()
    kind = "worker " if process.stage is Stage.WORKERS else ""
    return (
        f"[Unit]\nDescription=Baton {kind}{name}\nPartOf={TARGET}\n"
        + (f"After={after}\n" if after else "")
        + ("Wants=network-online.target\n" if host.user else "")
        + "StartLimitIntervalSec=0\n"
    )


def in_unit(text: str) -> str:
    """A text without quotes whose percent signs mean themselves. Raises CannotWriteService."""
    return one_line(text, text).replace("%", "%%")


def command_line(command: Sequence[str]) -> str:
    """As ``ExecStart=`` reads it. Raises CannotWriteService."""
    return " ".join(_quoted_argument(each) for each in command)


def _quoted_argument(text: str) -> str:
    escaped = in_unit(text).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return escaped if re.fullmatch(r"[\w./:@=,+-]+", escaped) else f'"{escaped}"'


def _quoted_value(name: str, value: str) -> str:
    escaped = re.sub(r'([\\"`$])', r"\\\1", one_line(name, value))
    return f'"{escaped}"'
