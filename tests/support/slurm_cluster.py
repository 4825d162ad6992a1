"""A Slurm cluster of two nodes on this machine, with its own ports, keys and folders; nothing of it is left afterwards."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.support.nats_server import free_port
from tests.support.system import is_alive, until

PATH = f"/usr/sbin:/sbin:{os.environ['PATH']}"
DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = ("n1", "n2")
COMMAND_S_MAX = 60.0
START_S_MAX = 60.0
STOP_S_MAX = 30.0
CONFIGURATION = """\
ClusterName=baton
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
PartitionName=all Nodes=ALL Default=YES State=UP
"""
NODE = "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=2000\n"


def why_not() -> str:
    """Why there can be no cluster here; empty if there can."""
    missing = [each for each in (*DAEMONS, "sbatch") if not shutil.which(each, path=PATH)]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: slurmctld, slurmd, slurm-client, munge)"
    return "" if os.geteuid() == 0 else "slurmd must be started by root"


class SlurmCluster:
    """Used as ``with``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for each in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / each).mkdir(parents=True)
        text = CONFIGURATION.format(folder=folder, controller=free_port())
        text += "".join(NODE.format(name=name, port=free_port()) for name in NODES)
        (folder / "slurm.conf").write_text(text)
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o600)
        self.env = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> Self:
        names = ("key-file=munge.key", "socket=munge.socket", "pid-file=munged.pid", "log-file=munged.log")
        options = [f"--{name}={self._folder}/{file}" for name, file in (each.split("=") for each in names)]
        try:
            self.run("munged", "--force", f"--seed-file={self._folder}/munged.seed", *options)
            self.run("slurmctld", "-c")
            for node in NODES:
                self.run("slurmd", "-N", node)
            until(lambda: "idle" in self.run("sinfo", "--noheader", "--format=%T"), "nodes are idle", START_S_MAX)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def run(self, *command: str, s_max: float = COMMAND_S_MAX, **variables: str) -> str:
        """What it prints."""
        done = subprocess.run(
            command, env={**self.env, **variables}, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=s_max, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def state_of(self, job: str) -> str:
        shown = self.run("scontrol", "--oneliner", "show", "job", job)
        return next(word.partition("=")[2] for word in shown.split() if word.startswith("JobState="))

    def _stop(self) -> None:
        """Nodes first, with the steps of jobs that a test has left."""
        pids = [file for name in ("slurmd-*.pid", "slurmctld.pid", "munged.pid") for file in self._folder.glob(name)]
        for file in pids:
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ValueError):
                process = psutil.Process(int(file.read_text()))
                process.terminate()
                until(lambda process=process: not is_alive(process), f"{file.stem} ends", STOP_S_MAX)  # type: ignore[misc]
