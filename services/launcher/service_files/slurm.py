"""An sbatch file for a whole fleet: one job, a node for each host, and on each the `baton` that starts, restarts and
stops its processes. The first node runs the head host; the others join it with tokens.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.launcher.fleet.fleet_file import Fleet, WrongFleetFile, part_of
from services.launcher.service_files.host_services import CannotWriteService, File, one_line
from services.launcher.system.process_plan import ProcessPlan, Stage, stop_s

NAME = "baton.sbatch"
OF_THE_FLEET = ("nodes", "ntasks", "ntasks-per-node", "array")
SIGNAL_S_MAX = 65535
"""Slurm's."""
OPTION = re.compile(r"(?:--)?([a-z][a-z-]*)(?:=(\S.*))?")


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What the job needs besides the fleet."""

    command: Sequence[str]
    """`baton`, on every node."""
    fleet_file: str
    state_dir: str
    """On a file system of all nodes; both are absolute."""
    inherited: Mapping[str, str]
    options: Sequence[str] = ()
    """Of sbatch: ``partition=gpu``."""


def sbatch_file(fleet: Fleet, job: SlurmJob) -> File:
    """The file. Raises CannotWriteService, WrongFleetFile."""
    _check(fleet)
    others = [host.name for host in fleet.host if host is not fleet.head]
    settings = {
        "fleet": shlex.quote(job.fleet_file),
        "state": shlex.quote(job.state_dir),
        "baton": f"({shlex.join(job.command)})",
        "hosts": f"({shlex.join([fleet.head.name, *others])})",
        "nats_port": str(fleet.nats.port),
        "api_port": str(fleet.router.port),
    }
    given = "".join(f"{name}={one_line(name, value)}\n" for name, value in settings.items())
    head = f"#!/bin/bash\n# Written by `baton service install --kind slurm`; the fleet: {job.fleet_file}\n"
    return File(name=NAME, text=f"{head}{_directives(fleet, job)}\n{given}{SCRIPT}")


def _check(fleet: Fleet) -> None:
    for host in fleet.host:
        if host.gpus or host.cores:
            key = "gpus" if host.gpus else "cores"
            raise WrongFleetFile(f'[[host]] "{host.name}" {key}: Slurm chooses them: leave {key} out')
        if host is not fleet.head and not host.workers:
            raise WrongFleetFile(f'[[host]] "{host.name}" workers: it has none, so its node would idle: leave it out')


def _directives(fleet: Fleet, job: SlurmJob) -> str:
    gpus = gpus_per_node(fleet)
    options = {
        "job-name": "baton",
        "nodes": str(len(fleet.host)),
        "ntasks-per-node": "1",
        **({"gpus-per-node": str(gpus)} if gpus else {}),
        "exclusive": "",
        "mem": "0",
        "signal": f"B:TERM@{stop_time_s(fleet, job.inherited)}",
        "requeue": "",
        "dependency": "singleton",
        "open-mode": "append",
        "output": f"{job.state_dir}/slurm-%j.out",
        **dict(map(_option, job.options)),
    }
    lines = (f"--{name}={value}" if value else f"--{name}" for name, value in options.items())
    return "".join(f"#SBATCH {one_line(line, line)}\n" for line in lines)


def _option(text: str) -> tuple[str, str]:
    found = OPTION.fullmatch(text)
    if not found:
        raise CannotWriteService(f"--sbatch {text}: write an option of sbatch, such as partition=gpu")
    if found[1] in OF_THE_FLEET:
        raise CannotWriteService(f"--sbatch {text}: the hosts of the fleet file say how many nodes there are")
    return found[1], found[2] or ""


def gpus_per_node(fleet: Fleet) -> int:
    """Of the host with most: nodes of a job are alike."""
    if fleet.engine == "simulated":
        return 0
    return max(sum(sum(each.gpu_counts) for each in part_of(fleet, host.name).models) for host in fleet.host)


def stop_time_s(fleet: Fleet, inherited: Mapping[str, str]) -> int:
    """Before the time limit: for the other hosts to drain, and then the head host."""
    parts = [part_of(fleet, host.name) for host in fleet.host]
    slowest = max(stop_s(_process("worker", Stage.WORKERS), {**part.env, **inherited}) for part in parts)
    env = {**part_of(fleet, fleet.head.name).env, **inherited}
    services = stop_s(_process("router", Stage.SERVICES), env) + stop_s(_process("collector", Stage.SERVICES), env)
    nats = stop_s(_process("nats", Stage.NATS), {})
    return min(round(slowest * (2 if len(parts) > 1 else 1) + services + nats), SIGNAL_S_MAX)


def _process(name: str, stage: Stage) -> ProcessPlan:
    return ProcessPlan(name=name, stage=stage, command=())


SCRIPT = r"""
[ -n "${SLURM_JOB_NODELIST:-}" ] || { echo "Submit this file: sbatch $0" >&2; exit 1; }
umask 077
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# At which the other nodes reach NATS and the API on the first one. HEAD_ADDRESS=... chooses another network.
address=${HEAD_ADDRESS:-$(getent ahostsv4 "${nodes[0]}" | awk '$1 !~ /^127\./ { print $1; exit }')}
: "${address:=$(hostname -I | cut -d ' ' -f 1)}"
stopping=$state/stopping.$SLURM_JOB_ID
rm -f "$stopping"

on() { srun --quiet --nodes=1 --ntasks=1 --nodelist="$1" "${@:2}"; }  # NODE [OPTIONS] COMMAND
runs() { kill -0 "$1" 2>/dev/null; }  # PID

# HOST NODE COMMAND: runs a host until it ends well, or fails in its first minute.
keep() {
  trap '' TERM  # srun would kill the host.
  local pid_file=$state/$1.pid began
  while rm -f "$pid_file"; began=$SECONDS; [ ! -e "$stopping" ]; do
    on "$2" --job-name="$1" bash -c 'echo $$ > "$0" && exec "$@"' "$pid_file" "${@:3}" && return 0
    (( SECONDS - began > 60 )) || return 1
    echo "$1 on $2 has ended and is started again."
    sleep 5
  done
}

# HOST NODE PID: lets a host drain. A signal of scancel or srun would reach its NATS and engines as well.
stop() {
  while runs "$3" && [ ! -s "$state/$1.pid" ]; do sleep 1; done
  ! runs "$3" || on "$2" --overlap kill -TERM "$(< "$state/$1.pid")"
}

head=${hosts[0]} others=("${hosts[@]:1}")
for host in "${others[@]}"; do
  "${baton[@]}" token --config "$fleet" --name "$host" --address "$address" --state-dir "$state" \
    > "$state/$host.token" || exit 1
done
term=0 failed=0 pids=()
trap 'term=1' TERM
keep "$head" "${nodes[0]}" "${baton[@]}" up --config "$fleet" --name "$head" --address "$address" \
  --state-dir "$state" &
head_pid=$!
until (( term )) || (exec 3<> "/dev/tcp/$address/$nats_port") 2>/dev/null; do
  runs "$head_pid" || exit 1
  sleep 1
done
for i in "${!others[@]}"; do
  keep "${others[i]}" "${nodes[i + 1]}" "${baton[@]}" join "$state/${others[i]}.token" \
    --state-dir "$state/hosts/${others[i]}" &
  pids+=($!)
done
echo "API: http://$address:$api_port/v1. Commands find the fleet with BATON_NATS_URL=tls://$address:$nats_port"
echo "To stop it when requests are finished: scancel --batch --signal=TERM $SLURM_JOB_ID"

while (( !term && !failed )) && runs "$head_pid"; do
  wait -n || (( term )) || failed=1
done
trap '' TERM
touch "$stopping"
for i in "${!others[@]}"; do
  stop "${others[i]}" "${nodes[i + 1]}" "${pids[i]}" &
done
for pid in "${pids[@]}"; do wait "$pid"; done
stop "$head" "${nodes[0]}" "$head_pid"
wait "$head_pid" || failed=1
rm -f "$stopping"
exit "$failed"
"""
