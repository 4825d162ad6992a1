"""Fills in the sbatch file for a whole fleet: what the job asks for, and which host each node runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.launcher.fleet.fleet_file import Fleet, HostTable, WrongFleetFile, part_of
from services.launcher.service_files.files import filled, host_stop_s, one_line

SIGNAL_S_MAX = 65535
"""Slurm sends a signal at most this long before the time limit."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What the job needs besides the fleet."""

    command: Sequence[str]
    """The command line of `baton`, which is the same on every node."""
    fleet_file: str
    state_dir: str
    """An absolute path on a file system of all nodes."""
    inherited: Mapping[str, str]
    """Variables of the shell that submits the job."""


def sbatch_file(fleet: Fleet, job: SlurmJob) -> str:
    """``baton.sbatch``. Raises CannotWriteService, WrongFleetFile."""
    _check(fleet)
    others = [host.name for host in fleet.host if host is not fleet.head]
    return filled(
        "baton.sbatch",
        directives=_directives(fleet, job),
        fleet=shlex.quote(one_line("--config", job.fleet_file)),
        state=shlex.quote(one_line("--state-dir", job.state_dir)),
        baton=shlex.join(job.command),
        hosts=shlex.join([fleet.head.name, *others]),
        nats_port=str(fleet.nats.port),
        api_port=str(fleet.router.port),
    )


def _check(fleet: Fleet) -> None:
    for host in fleet.host:
        if host is not fleet.head and not part_of(fleet, host.name).models:
            raise WrongFleetFile(f'[[host]] "{host.name}" workers: it has none, so its node would idle: leave it out')


def _directives(fleet: Fleet, job: SlurmJob) -> str:
    gpus = gpus_per_node(fleet)
    cpus = max((core + 1 for host in fleet.host for core in host.cores), default=0)
    options = {
        "job-name": "baton",
        "nodes": str(len(fleet.host)),
        "ntasks-per-node": "1",
        **({"gpus-per-node": str(gpus)} if gpus else {}),
        **({"mincpus": str(cpus)} if cpus else {}),
        "exclusive": "",
        "mem": "0",
        "signal": f"B:TERM@{stop_time_s(fleet, job.inherited)}",
        "requeue": "",
        "dependency": "singleton",
        "open-mode": "append",
        "output": f"{job.state_dir}/slurm-%j.out",
    }
    lines = (f"--{name}={value}" if value else f"--{name}" for name, value in options.items())
    return "\n".join(f"#SBATCH {one_line(line, line)}" for line in lines)


def gpus_per_node(fleet: Fleet) -> int:
    """The most GPUs that a host needs: nodes of a job are alike. Slurm numbers a job's GPUs from 0, and a host
    takes those that it names, so the job has as many as the highest number needs.
    """
    if fleet.engine == "simulated":
        return 0
    return max(_gpus_of(fleet, host) for host in fleet.host)


def _gpus_of(fleet: Fleet, host: HostTable) -> int:
    if host.cores:
        return 0
    engines = sum(sum(each.gpu_counts) for each in part_of(fleet, host.name).models)
    return max(host.gpus) + 1 if host.gpus and engines else engines


def stop_time_s(fleet: Fleet, inherited: Mapping[str, str]) -> int:
    """Time before the time limit in which the other hosts drain, and then the head host."""
    head = host_stop_s(part_of(fleet, fleet.head.name), inherited, is_head=True)
    others = [part_of(fleet, host.name) for host in fleet.host if host is not fleet.head]
    slowest = max((host_stop_s(part, inherited, is_head=False) for part in others), default=0.0)
    return min(round(slowest + head), SIGNAL_S_MAX)
